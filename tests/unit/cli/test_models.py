"""The list of models that workers load."""

import pytest

from penstock.cli import main
from worker_svc.core.models import FAMILIES
from worker_svc.core.quantization.choice import METHODS


def test_every_family_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    for architecture in FAMILIES:
        assert architecture in shown
    for method in METHODS:
        assert method in shown


def test_names_are_those_of_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--names"]) == 0
    assert capsys.readouterr().out.split() == sorted(FAMILIES)
