"""A model is told from others by what it computes, not by where it lies or how it is stored."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from contract.domain.errors import PenstockError
from servicekit.checkpoint.model import Checkpoint, read_checkpoint
from worker_svc.model_digest import model_digest


def write(directory: Path, *, change: tuple[int, int] | None = None, shards: int = 1, **config: object) -> Checkpoint:
    """Two tensors of known values; `change` is a (row, column) of the large one that has another."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    large = torch.arange(300 * 64, dtype=torch.float32).reshape(300, 64)
    if change is not None:
        large[change] += 1
    tensors = {"large": large, "small": torch.ones(3)}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
    else:
        for name, tensor in tensors.items():
            save_file({name: tensor}, directory / f"{name}.safetensors")
        index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return read_checkpoint(directory)


def test_the_same_model_has_one_digest_however_it_is_stored(tmp_path: Path) -> None:
    one = model_digest(write(tmp_path / "a"), "float32")
    assert len(one) == 8
    assert model_digest(write(tmp_path / "b", shards=2, _name_or_path="elsewhere"), "float32") == one


def test_models_that_differ_have_different_digests(tmp_path: Path) -> None:
    base = write(tmp_path / "base")
    digests = [
        model_digest(base, "float32"),
        model_digest(base, "bfloat16"),
        model_digest(base, "float32", is_dummy=True),
        model_digest(write(tmp_path / "config", hidden_size=9), "float32"),
        model_digest(write(tmp_path / "first", change=(0, 0)), "float32"),
        model_digest(write(tmp_path / "last", change=(299, 63)), "float32"),
    ]
    assert len(set(digests)) == len(digests)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "a")
    (checkpoint.directory / "model.safetensors").unlink()
    with pytest.raises(PenstockError, match=r"model\.safetensors is missing"):
        model_digest(checkpoint, "float32")
