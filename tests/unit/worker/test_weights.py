"""Filling shards from safetensors: layouts, dtypes, ranks, and errors that name file and tensor."""

import json
import sys
import threading
from collections.abc import Collection
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from contract.domain.errors import ErrorCode, PenstockError
from servicekit.checkpoint.model import read_checkpoint
from worker_svc import weight_reading, weights
from worker_svc.core.distributed import Group
from worker_svc.core.formats.dense import Dense
from worker_svc.core.layers.linear import Linear, Projection
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import StoredRows
from worker_svc.model_config import read_model_config
from worker_svc.stored import read_header
from worker_svc.weights import load_weights

UP = torch.arange(48, dtype=torch.float32).reshape(8, 6)
DOWN = torch.arange(48, dtype=torch.float32).reshape(6, 8) + 100
TENSORS = {"up.weight": UP, "down.weight": DOWN, "down.bias": torch.ones(6)}


def layers(rank: int = 0, world_size: int = 1) -> tuple[Placement, Linear, Linear]:
    placement = Placement(torch.device("cpu"), torch.float32, Group(rank, world_size))
    part = placement.part(8, "size")
    up = Linear(placement, [Projection(StoredRows("up"), 8, part)], 6)
    down = Projection(StoredRows("down"), 6, slice(0, 6))
    return placement, up, Linear(placement, [down], 8, part, has_bias=True)


def weight_of(linear: Linear) -> Tensor:
    assert isinstance(linear.packed, Dense)
    return linear.packed.weight


def load(directory: Path, tensors: dict[str, Tensor], *, unused: Collection[str] = ()) -> None:
    save_file(tensors, directory / "model.safetensors")
    load_weights(directory, layers()[0].wanted, unused=unused)


def test_each_rank_reads_its_part(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    for rank in range(2):
        placement, up, down = layers(rank, 2)
        load_weights(tmp_path, placement.wanted)
        assert torch.equal(weight_of(up), UP[rank * 4 : rank * 4 + 4])
        assert torch.equal(weight_of(down), DOWN[:, rank * 4 : rank * 4 + 4])
        assert down.bias is not None
        assert torch.equal(down.bias, torch.ones(6))


@pytest.mark.parametrize("is_broken", [False, True])
def test_threads_take_short_turns_only_while_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_broken: bool
) -> None:
    usual_s = sys.getswitchinterval()
    meanwhile_s = []
    read = weight_reading._read

    def watched(file: int, piece: weight_reading._Piece, buffer: Tensor) -> Tensor:
        meanwhile_s.append(sys.getswitchinterval())
        if is_broken:
            raise ValueError("broken")
        return read(file, piece, buffer)

    monkeypatch.setattr(weight_reading, "_read", watched)
    with pytest.raises(ValueError, match="broken") if is_broken else nullcontext():
        load(tmp_path, TENSORS)
    assert meanwhile_s
    assert max(meanwhile_s) < usual_s / 2
    assert sys.getswitchinterval() == usual_s


def test_tensors_are_read_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, all_are_at_it = weight_reading._read, threading.Barrier(len(TENSORS), timeout=300)

    def read_together(file: int, piece: weight_reading._Piece, buffer: Tensor) -> Tensor:
        all_are_at_it.wait()
        return read(file, piece, buffer)

    monkeypatch.setattr(weight_reading, "_read", read_together)
    load(tmp_path, TENSORS)


def test_the_progress_bar_ends_at_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    class Shown(tqdm):
        monitor_interval = 0

        def __init__(self, **options: Any) -> None:
            super().__init__(**(options | {"disable": False, "file": StringIO()}))
            shown.append(self)

    monkeypatch.setattr(weight_reading, "tqdm", Shown)
    monkeypatch.setattr(weight_reading, "BUFFER_BYTES", 60)
    load(tmp_path, TENSORS)
    (bar,) = shown
    assert bar.n == bar.total == sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.mark.parametrize("buffer_bytes", [1, 60, 200])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_tensors_come_in_pieces_that_fit_into_a_buffer(
    buffer_bytes: int, stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_reading, "BUFFER_BYTES", buffer_bytes)
    save_file({name: tensor.to(stored) for name, tensor in TENSORS.items()}, tmp_path / "model.safetensors")
    for rank in range(2):
        placement, up, down = layers(rank, 2)
        # Rank by rank the rows of one matrix, and whole rows of the other, of which it has some columns.
        num_elements = UP.numel() // 2 + DOWN.numel() + 6
        assert load_weights(tmp_path, placement.wanted) == num_elements * stored.itemsize
        assert torch.equal(weight_of(up), UP[rank * 4 : rank * 4 + 4])
        assert torch.equal(weight_of(down), DOWN[:, rank * 4 : rank * 4 + 4])


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    placement, _, _ = layers()
    shards = {shard.name: shard for shard in placement.wanted}
    loads = [weight_reading.TensorLoad(path, stored, shards[name]) for name, stored in read_header(path).items()]
    path.write_bytes(path.read_bytes()[:-4])
    shorter = pytest.raises(PenstockError, match=r"model\.safetensors is corrupt .*shorter")
    with weight_reading.progress(loads) as bar, shorter:
        weight_reading.carry(loads, bar)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_float_dtype_is_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    placement, up, _ = layers()
    save_file({name: tensor.to(dtype) for name, tensor in TENSORS.items()}, tmp_path / "model.safetensors")
    load_weights(tmp_path, placement.wanted)
    assert torch.equal(weight_of(up), UP)


def test_a_sharded_index_is_followed(tmp_path: Path) -> None:
    save_file({"up.weight": UP}, tmp_path / "a.safetensors")
    save_file({"down.weight": DOWN, "down.bias": torch.ones(6)}, tmp_path / "b.safetensors")
    weight_map = {"up.weight": "a.safetensors", "down.weight": "b.safetensors", "down.bias": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    placement, up, _ = layers()
    load_weights(tmp_path, placement.wanted)
    assert torch.equal(weight_of(up), UP)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(PenstockError, match=r"b\.safetensors is missing"):
        load_weights(tmp_path, layers()[0].wanted)


def test_a_stored_head_is_left_out_where_it_is_tied(tmp_path: Path) -> None:
    load(tmp_path, {**TENSORS, "lm_head.weight": torch.ones(3)}, unused=["lm_head.weight"])


EMBEDDING = torch.arange(12, dtype=torch.float32).reshape(4, 3)


@pytest.mark.parametrize(
    ("head", "is_own"),
    [
        (None, False),
        (EMBEDDING.clone(), False),
        (EMBEDDING + torch.tensor([0.0, 0.0, 1e-6]), True),
        (EMBEDDING.to(torch.bfloat16), True),
    ],
)
@pytest.mark.parametrize("compared_bytes", [5, 1 << 24])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_head_is_a_models_own_if_it_is_not_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: Tensor | None, compared_bytes: int, *, is_own: bool,
    is_split: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(weights, "_COMPARED_BYTES", compared_bytes)
    names = {"model.embed_tokens.weight": EMBEDDING, "a.weight": torch.zeros(5)}
    heads = {} if head is None else {"lm_head.weight": head}
    if is_split:
        save_file(names, tmp_path / "a.safetensors")
        save_file({**heads, "b": torch.zeros(1)}, tmp_path / "b.safetensors")
        weight_map = dict.fromkeys(names, "a.safetensors") | dict.fromkeys({**heads, "b": 0}, "b.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        save_file(names | heads, tmp_path / "model.safetensors")
    assert weights.has_own_head(tmp_path, "model.embed_tokens", "lm_head") is is_own


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_weights_that_are_pickles_alone_are_to_be_converted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(PenstockError, match=rf"{name}.* safetensors alone.*save_pretrained") as caught:
        load_weights(tmp_path, layers()[0].wanted)
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"up.weight": None}, "lacks the tensor up.weight"),
        ({"extra.weight": torch.ones(1)}, "extra.weight, a tensor that the model does not have"),
        ({"lm_head.weight": torch.ones(1)}, "lm_head.weight, a tensor that the model does not have"),
        ({"up.weight": torch.ones(8, 5)}, r"up.weight in .*safetensors has shape \[8, 5\].*\[8, 6\]"),
        ({"up.weight": torch.ones(8, 6, dtype=torch.int8)}, r"up.weight in .*safetensors is of I8"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(changes: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in {**TENSORS, **changes}.items() if tensor is not None}
    with pytest.raises(PenstockError, match=message) as caught:
        load(tmp_path, tensors)
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize("damage", ["truncated", "noise", "empty"])
def test_a_corrupt_file_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[:-20], "noise": b"\xff" * 100, "empty": b""}[damage])
    with pytest.raises(PenstockError, match=r"model\.safetensors is corrupt") as caught:
        load_weights(tmp_path, layers()[0].wanted)
    assert caught.value.code is ErrorCode.INTERNAL


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match=r"model\.safetensors is missing"):
        load_weights(tmp_path, layers()[0].wanted)
    with pytest.raises(PenstockError, match=r"config\.json is missing.*give the directory"):
        read_model_config(read_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PenstockError, match=r"config\.json cannot be read"):
        read_model_config(read_checkpoint(tmp_path))
