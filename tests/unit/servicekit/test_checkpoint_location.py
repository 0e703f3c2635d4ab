"""Where a checkpoint is found, and what is fetched of it."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

from contract.domain.errors import Fault, PenstockError
from servicekit.checkpoint.location import find_checkpoint


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("with_weights", [False, True])
def test_of_a_hub_id_is_fetched_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, with_weights: bool
) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, revision))

        def fetched(name: str) -> bool:
            return any(fnmatch(name, pattern) for pattern in allow_patterns)

        assert fetched("tokenizer.json")
        assert fetched("config.json")
        assert fetched("generation_config.json")
        assert not fetched("pytorch_model.bin")
        for weights in ("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
            assert fetched(weights) == with_weights
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_checkpoint("someone/model", "v2", with_weights=with_weights) == tmp_path
    assert asked == [("someone/model", "v2")]


def test_a_hub_that_gives_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(PenstockError, match=r"someone/model .*no network") as caught:
        find_checkpoint("someone/model")
    assert caught.value.fault is Fault.OPERATOR


@pytest.mark.parametrize("model", ["/no/such/directory", "./not-here", "~/not-here", "a/b/c"])
def test_a_directory_that_is_not_there_is_not_looked_for_elsewhere(model: str) -> None:
    with pytest.raises(PenstockError, match="does not exist") as caught:
        find_checkpoint(model)
    assert caught.value.fault is Fault.OPERATOR


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(PenstockError, match="is not a directory"):
        find_checkpoint(str(file))
