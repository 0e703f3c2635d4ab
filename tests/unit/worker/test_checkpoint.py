"""Where a worker's checkpoint comes from."""

from pathlib import Path

import pytest

from contract.domain.errors import Fault, PenstockError
from worker_svc.checkpoint import resolve_checkpoint


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


def test_a_hub_id_is_downloaded_with_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, revision))
        assert {"*.json", "*.safetensors"} <= set(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_checkpoint("someone/model", "v2") == tmp_path
    assert asked == [("someone/model", "v2")]


@pytest.mark.parametrize("model", ["someone/model", "/no/such/directory", "./here"])
def test_what_cannot_be_had_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(PenstockError, match=model) as caught:
        resolve_checkpoint(model)
    assert caught.value.fault is Fault.OPERATOR
