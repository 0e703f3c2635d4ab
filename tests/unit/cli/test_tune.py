"""`penstock tune` where it cannot measure: it says so in a sentence."""

import sys

import pytest

from penstock.cli import main
from penstock.launcher.layout import BUNDLED_MODEL


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--model", str(BUNDLED_MODEL)]) == 2
    said = capsys.readouterr().err
    assert said == ("penstock tune: torch finds no CUDA device here: a table is measured on the card that it is for\n")


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["tune", "--model", str(BUNDLED_MODEL)]) == 2
    assert "pip install 'penstock[worker]'" in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["0", "4,-1", "70000", "many"])
def test_rows_that_no_step_has_are_refused(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tune", "--model", str(BUNDLED_MODEL), "--rows", rows])
    assert caught.value.code == 2
    assert "--rows" in capsys.readouterr().err
