"""Products of experts that are streamed against double precision, on a Hopper; that they compile for one anywhere."""

import pytest
import torch
from hopper import NotLaunched, compile_for_hopper
from kernel_inputs import DEVICE, assert_near, randn
from torch import Tensor

from worker_svc.core.kernels.experts import tile_stream
from worker_svc.core.kernels.experts.routing import Routed
from worker_svc.core.kernels.experts.sorting import SortedPairs, sort_pairs
from worker_svc.core.kernels.experts.tile_stream import add_streamed, can_stream, lay_tiles
from worker_svc.core.kernels.experts.tiles import add_tiles, gate_tiles
from worker_svc.core.kernels.experts.weights import FLOATS, ExpertWeights

TOP_K, EXPERTS = 3, 6
KERNELS = "worker_svc.core.kernels.experts.tile_stream"


def floats(weight: Tensor) -> ExpertWeights:
    return ExpertWeights(FLOATS, weight, weight.shape[2])


def routed(rows: int, routing: str) -> Routed:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(rows)])
    if routing == "same":  # all rows have the same experts, some experts have none
        ids = torch.tensor([[4, 0, 5]]).expand(rows, -1)
    return Routed(ids.to(DEVICE, torch.int32).contiguous(), randn(rows, TOP_K, seed=9, dtype=torch.float32).abs())


@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 0, 128], [129, 300, 0], [0, 0, 127], [64, 65, 1000]])
def test_tiles_are_laid_by_expert_and_those_after_the_last_have_no_pairs(counts: list[int]) -> None:
    firsts = [sum(counts[:index]) for index in range(3)]
    order = torch.zeros(max(1, sum(counts)), dtype=torch.int32, device=DEVICE)
    columns = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (counts, firsts))
    laid = lay_tiles(SortedPairs(order, *columns))
    assert not any(column.data_ptr() % 16 for column in (laid.experts, laid.firsts, laid.lengths))
    expected = [
        (expert, firsts[expert] + begin, min(128, count - begin))
        for expert, count in enumerate(counts)
        for begin in range(0, count, 128)
    ]
    found = list(zip(*(each.tolist() for each in (laid.experts, laid.firsts, laid.lengths)), strict=True))
    assert found[: len(expected)] == expected
    assert all(length == 0 for _, _, length in found[len(expected) :])


needs_hopper = pytest.mark.skipif(
    not can_stream(torch.empty(0, device=DEVICE).bfloat16(), floats(torch.empty(1, 256, 64)), 1000),
    reason="needs a Hopper GPU",
)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 64, 65, 128, 300, 2000])
@pytest.mark.parametrize("routing", ["any", "same"])
@pytest.mark.parametrize(("size", "hidden"), [(128, 256), (384, 512), (768, 2048)])
def test_streamed_products_are_those_of_tiles(
    rows: int, routing: str, size: int, hidden: int, dtype: torch.dtype
) -> None:
    to, x = routed(rows, routing), randn(rows, hidden, seed=1, dtype=dtype)
    up, down = (
        floats(randn(EXPERTS, outputs, inputs, seed=inputs, scale=inputs**-0.5, dtype=dtype))
        for outputs, inputs in ((2 * size, hidden), (hidden, size))
    )
    pairs, total = sort_pairs(to.ids, EXPERTS), randn(rows, hidden, seed=2, dtype=dtype)
    expected = total.clone()
    add_tiles(gate_tiles(x, up, None, to, pairs, activation="silu"), down, None, to, pairs, expected)
    add_streamed(gate_tiles(x, up, None, to, pairs, activation="silu", sorts=True), down, to, pairs, total)
    assert_near(total, expected.double())


def launch_stream() -> None:
    tile_stream._lay_tiles = NotLaunched()
    pairs = SortedPairs(*(torch.zeros(each, dtype=torch.int32) for each in (64 * 4, 8, 8)))
    to = Routed(torch.zeros(64, 4, dtype=torch.int32), torch.zeros(64, 4))
    x, down = torch.zeros(256, 768).bfloat16(), floats(torch.zeros(8, 2048, 768).bfloat16())
    tile_stream.stream_products(x, down, to, pairs)


def test_products_compile_for_a_hopper_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for_hopper(monkeypatch, f"{KERNELS}._stream_products", "wgmma.mma_async", launch_stream)
