"""The list of models that workers load."""

from functools import partial

import pytest
from transformers import CONFIG_MAPPING

from penstock.cli import main, models
from worker_svc import transformers_survey
from worker_svc.core.models import FAMILIES
from worker_svc.core.models.media import TEXTS
from worker_svc.core.quantization.choice import METHODS


def test_every_family_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    for architecture in (*FAMILIES, *TEXTS):
        assert architecture in shown
    for method in METHODS:
        assert method in shown


def test_names_are_those_of_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--names"]) == 0
    assert capsys.readouterr().out.split() == sorted((*FAMILIES, *TEXTS))


def test_models_of_transformers_are_listed_with_what_came_of_their_proof(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {kind: CONFIG_MAPPING[kind] for kind in ("gpt2", "bloom", "vit", "distilbert", "fnet")}
    monkeypatch.setattr(transformers_survey, "survey", partial(transformers_survey.survey, kinds))
    assert main(["models", "--transformers"]) == 0
    gpt2, bloom, distilbert, fnet = capsys.readouterr().out.splitlines()
    assert gpt2.startswith("GPT2LMHeadModel proved with transformers")
    assert bloom.startswith("BloomForCausalLM refused: it has attention of its own")
    assert distilbert.startswith("DistilBertModel proved with transformers")
    assert fnet.startswith("FNetModel refused: it gives prompts of several lengths in a matrix other hidden states")


def test_without_the_package_it_is_said_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    assert main(["models", "--transformers"]) == 2
    assert "install penstock[worker,transformers]" in capsys.readouterr().err
