"""The pooling that a checkpoint of embeddings asks for."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.domain.errors import PenstockError
from contract.domain.pooling import PoolingFacts, PoolingKind
from servicekit.checkpoint.model import read_checkpoint
from servicekit.checkpoint.pooling import pooling_facts

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def facts(directory: Path, modules: Any = None, **modes: bool) -> PoolingFacts:
    (directory / "config.json").write_text(json.dumps({"hidden_size": 8}))
    if modules is not None:
        (directory / "modules.json").write_text(json.dumps(modules))
    if modes:
        (directory / "1_Pooling").mkdir()
        config = {"word_embedding_dimension": 8, "include_prompt": True, **modes}
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return pooling_facts(read_checkpoint(directory))


def test_without_modules_it_is_the_last_state_of_length_one(tmp_path: Path) -> None:
    assert facts(tmp_path) == PoolingFacts(PoolingKind.LAST, normalize=True, size=8)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("LlamaForCausalLM", PoolingKind.LAST),
        ("GPT2LMHeadModel", PoolingKind.LAST),
        ("Gemma3ForConditionalGeneration", PoolingKind.LAST),
        ("BertModel", PoolingKind.CLS),
        ("ModernBertForMaskedLM", PoolingKind.CLS),
    ],
)
def test_without_modules_it_is_the_first_state_of_what_is_no_decoder(
    architecture: str, kind: PoolingKind, tmp_path: Path
) -> None:
    facts(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "architectures": [architecture]}))
    assert pooling_facts(read_checkpoint(tmp_path)) == PoolingFacts(kind, normalize=True, size=8)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("pooling_mode_lasttoken", PoolingKind.LAST),
        ("pooling_mode_mean_tokens", PoolingKind.MEAN),
        ("pooling_mode_cls_token", PoolingKind.CLS),
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_modules_say_the_kind_and_the_length(tmp_path: Path, mode: str, kind: PoolingKind, normalize: bool) -> None:
    modules = [TRANSFORMER, POOLING, *([NORMALIZE] if normalize else [])]
    others = {"pooling_mode_max_tokens": False, "pooling_mode_cls_token": False}
    assert facts(tmp_path, modules, **others | {mode: True}) == PoolingFacts(kind, normalize, 8)


def test_what_is_not_done_is_told_by_name(tmp_path: Path) -> None:
    assert "pooling_mode_max_tokens" in facts(tmp_path, [POOLING], pooling_mode_max_tokens=True).trouble
    assert "Dense" in facts(tmp_path, [TRANSFORMER, POOLING, DENSE]).trouble


@pytest.mark.parametrize("text", ["{}", "[1]", "["])
def test_modules_that_are_broken_are_the_operators(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(PenstockError, match="fetch the checkpoint again"):
        pooling_facts(read_checkpoint(tmp_path))
