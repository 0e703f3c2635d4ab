"""Gated products by a package against double precision, where it is installed; and when they are asked for."""

from types import SimpleNamespace

import pytest
import torch
from kernel_inputs import DEVICE, DTYPE, assert_near, assert_replays_alike, randn
from torch import Tensor

from worker_svc.core.kernels import gated_product
from worker_svc.core.kernels.batch_linear import has_batch_linear
from worker_svc.core.kernels.gated_product import TILES, GatedProduct, Tile, find_tile, make_gated_product
from worker_svc.core.layers.linear import ColumnParallelLinear
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.operations import triton_operations
from worker_svc.core.operations.interface import Unscaled
from worker_svc.core.operations.triton_operations import TritonOperations

INPUTS = 1024


def gated(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    gate, up = (hidden.double() @ weight.double().t() * Unscaled(hidden, eps).scales()).chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


@pytest.fixture(scope="module")
def product() -> GatedProduct:
    pytest.importorskip("quack", reason="needs quack-kernels")
    if not has_batch_linear(DEVICE):
        pytest.skip("needs a Hopper GPU")
    return make_gated_product(DEVICE)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("outputs", [128, 3072])
def test_any_tile_gives_the_gates_of_normed_rows(product: GatedProduct, tile: Tile, outputs: int) -> None:
    weight = randn(2 * outputs, INPUTS, seed=2, scale=0.05)
    for rows in (2, 129, 200, 256, 1500):
        hidden = randn(rows, INPUTS, seed=rows, scale=3.0)
        assert_near(product(hidden, weight, tile, 1e-5), gated(hidden, weight, 1e-5))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_chain_of_products_in_a_graph_gives_what_it_gives_launched_one_by_one(
    product: GatedProduct, tile: Tile
) -> None:
    hidden, up, down = randn(700, INPUTS), randn(6144, INPUTS, seed=2, scale=0.05), randn(INPUTS, 3072, scale=0.05)

    def chain() -> Tensor:
        out = hidden
        for _ in range(6):
            out = torch.addmm(out, product(out, up, tile, 1e-6), down.t())
        return out

    assert_replays_alike(chain, times=20)


def test_many_rows_are_left_to_it_and_fewer_to_others() -> None:
    large, small = (24576, 4096), (6144, 1024)
    wide, square, narrow = TILES
    assert [find_tile(*large, rows) for rows in (208, 224, 256, 320, 512, 640, 1024, 4096)] == [
        *(None, wide, wide, None, wide, None, square, square)
    ]
    assert [find_tile(*small, rows) for rows in (208, 224, 256, 512, 1024, 1280, 8192)] == [
        *(None, narrow, narrow, None, None, square, square)
    ]
    assert find_tile(6144, 896, 4096) is None


@pytest.mark.parametrize(("rows", "is_asked"), [(3, False), (208, False), (256, True)])
def test_operations_ask_it_where_it_is_there_for_rows_that_it_is_better_at(
    monkeypatch: pytest.MonkeyPatch, rows: int, *, is_asked: bool
) -> None:
    asked = []

    def fake(hidden: Tensor, weight: Tensor, tile: Tile, eps: float) -> Tensor:
        asked.append(tile)
        return gated(hidden, weight, eps).to(hidden.dtype)

    monkeypatch.setattr(triton_operations, "_fits", lambda *_: True)
    monkeypatch.setattr(triton_operations, "find_gated_cut", lambda *_: None)
    monkeypatch.setattr(triton_operations, "find_cut", lambda *_: None)
    placement = Placement(DEVICE, DTYPE)
    norm = RMSNorm(placement, "norm", INPUTS, 1e-6)
    gate_up = ColumnParallelLinear(
        placement, INPUTS, [("gate", 64, slice(0, 64)), ("up", 64, slice(0, 64))], bias=False
    )
    norm.weight.copy_(1 + randn(INPUTS, seed=1, scale=0.3))
    gate_up.weight.copy_(randn(128, INPUTS, seed=2, scale=0.05))
    norm.fold(gate_up.weight)
    hidden = randn(rows, INPUTS, seed=3)
    operations = TritonOperations()
    assert_near(operations.norm_gated(hidden, norm, gate_up), gated(hidden, gate_up.weight, 1e-6), 2e-2)
    operations.gated_product = fake  # type: ignore[assignment]
    assert_near(operations.norm_gated(hidden, norm, gate_up), gated(hidden, gate_up.weight, 1e-6), 2e-2)
    assert bool(asked) == is_asked


def package(change: float) -> SimpleNamespace:
    """One that computes gates, and adds something to them."""

    def gemm(hidden: Tensor, weight: Tensor, *_: object, epi_args: dict[str, Tensor], **__: object) -> None:
        gate, up = (hidden.float() @ weight.float().t() * epi_args["scale"].t()).chunk(2, 1)
        epi_args["out"].copy_(torch.nn.functional.silu(gate) * up + change)

    return SimpleNamespace(EPILOGUE=SimpleNamespace(gemm=gemm))


def test_a_package_is_taken_that_computes_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_product, "import_module", lambda _: package(0.0))
    make_gated_product(DEVICE)


def test_a_package_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_product, "import_module", lambda _: package(1.0))
    with pytest.raises(RuntimeError, match="not what they should be"):
        make_gated_product(DEVICE)
