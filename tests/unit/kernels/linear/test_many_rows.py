"""Products of many rows by a package against double precision, where it is installed; and when they are asked for."""

from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from kernel_inputs import DEVICE, LINES, assert_near, assert_replays_alike, randn
from torch import Tensor

from worker_svc.core.formats.dense import Dense
from worker_svc.core.kernels.linear import many_rows as module
from worker_svc.core.kernels.linear.batch_rows import has_batch_rows
from worker_svc.core.kernels.linear.many_rows import ManyRows, make_many_rows
from worker_svc.core.kernels.linear.product import Kind
from worker_svc.core.kernels.linear.table import Line
from worker_svc.core.kernels.linear.unscaled import Unscaled
from worker_svc.core.kernels.linear.ways import ManyRowsTile
from worker_svc.core.layers.linear import Linear, Projection
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import NormSpec, StoredRows
from worker_svc.core.operations.triton_operations import TritonOperations

INPUTS = 1024
Tiles: TypeAlias = dict[Kind, list[ManyRowsTile]]

KINDS: tuple[Kind, ...] = ("plain", "added", "gated")
# All that the H200's table has.
TILES: Tiles = {
    kind: list(
        dict.fromkeys(way for line in LINES if kind in line.kinds for way in line.ways if isinstance(way, ManyRowsTile))
    )
    for kind in KINDS
}


def whole(name: str, outputs: int) -> Projection:
    """A projection that is stored alone, of which this rank has all."""
    return Projection(StoredRows(name), outputs, slice(0, outputs))


def weight_of(linear: Linear) -> Tensor:
    """Of dense ones."""
    assert isinstance(linear.packed, Dense)
    return linear.packed.weight


def gated(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    gate, up = (hidden.double() @ weight.double().t() * Unscaled(hidden, eps).scales()).chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


@pytest.fixture(scope="module")
def many_rows() -> ManyRows:
    pytest.importorskip("quack", reason="needs quack-kernels")
    if not has_batch_rows(DEVICE):
        pytest.skip("needs a Hopper GPU")
    return make_many_rows(DEVICE, TILES)


@pytest.mark.parametrize("tile", TILES["gated"], ids=str)
@pytest.mark.parametrize("outputs", [128, 3072])
def test_any_tile_gives_the_gates_of_normed_rows(many_rows: ManyRows, tile: ManyRowsTile, outputs: int) -> None:
    weight = randn(2 * outputs, INPUTS, seed=2, scale=0.05)
    for rows in (2, 129, 200, 256, 1500):
        hidden = randn(rows, INPUTS, seed=rows, scale=3.0)
        assert_near(many_rows.gate(hidden, weight, tile, 1e-5), gated(hidden, weight, 1e-5))


@pytest.mark.parametrize("tile", TILES["plain"], ids=str)
@pytest.mark.parametrize("outputs", [128, 3072])
def test_any_tile_gives_a_product(many_rows: ManyRows, tile: ManyRowsTile, outputs: int) -> None:
    weight = randn(outputs, INPUTS, seed=2, scale=0.05)
    for rows in (2, 67, 96, 129, 200, 256):
        x = randn(rows, INPUTS, seed=rows)
        assert_near(many_rows.multiply(x, weight, tile), x.double() @ weight.double().t())


@pytest.mark.parametrize("tile", TILES["added"], ids=str)
@pytest.mark.parametrize("outputs", [128, 3072])
def test_any_tile_adds_a_product_to_a_residual(many_rows: ManyRows, tile: ManyRowsTile, outputs: int) -> None:
    weight = randn(outputs, INPUTS, seed=2, scale=0.05)
    for rows in (2, 67, 96, 129, 200, 256):
        x, residual = randn(rows, INPUTS, seed=rows), randn(rows, outputs, seed=1)
        expected = residual.double() + x.double() @ weight.double().t()
        assert many_rows.multiply(x, weight, tile, residual) is residual
        assert_near(residual, expected)


@pytest.mark.parametrize("added", TILES["added"], ids=str)
@pytest.mark.parametrize("gated_tile", TILES["gated"], ids=str)
def test_a_chain_of_products_in_a_graph_gives_what_it_gives_launched_one_by_one(
    many_rows: ManyRows, gated_tile: ManyRowsTile, added: ManyRowsTile
) -> None:
    hidden, up, down = randn(200, INPUTS), randn(6144, INPUTS, seed=2, scale=0.05), randn(INPUTS, 3072, scale=0.05)

    def chain() -> Tensor:
        out = hidden.clone()
        for _ in range(6):
            many_rows.multiply(many_rows.gate(out, up, gated_tile, 1e-6), down, added, out)
        return out

    assert_replays_alike(chain, times=20)


class FakeRows:
    """Multiplies by torch, and remembers the tiles that it was asked for."""

    def __init__(self) -> None:
        self.asked: list[ManyRowsTile] = []

    def multiply(self, x: Tensor, weight: Tensor, tile: ManyRowsTile, residual: Tensor | None = None) -> Tensor:
        self.asked.append(tile)
        product = (x.double() @ weight.double().t()).to(x.dtype)
        return residual.add_(product) if residual is not None else product

    def gate(self, hidden: Tensor, weight: Tensor, tile: ManyRowsTile, eps: float) -> Tensor:
        self.asked.append(tile)
        return gated(hidden, weight, eps).to(hidden.dtype)


@pytest.mark.parametrize(("rows", "is_asked"), [(3, False), (208, False), (256, True)])
def test_operations_ask_it_for_gates_of_rows_that_it_is_better_at(rows: int, *, is_asked: bool) -> None:
    operations = TritonOperations(DEVICE, LINES)
    placement = Placement(DEVICE, torch.bfloat16)
    norm = RMSNorm(placement, NormSpec("norm", 1e-6), INPUTS)
    gate_up = Linear(placement, [whole("gate", 64), whole("up", 64)], INPUTS, has_bias=False)
    norm.weight.copy_(1 + randn(INPUTS, seed=1, scale=0.3))
    weight_of(gate_up).copy_(randn(128, INPUTS, seed=2, scale=0.05))
    norm.fold(weight_of(gate_up))
    hidden = randn(rows, INPUTS, seed=3, dtype=torch.bfloat16)
    assert_near(operations.norm_gated(hidden, norm, gate_up), gated(hidden, weight_of(gate_up), 1e-6), 2e-2)
    fake: Any = FakeRows()
    operations.dense.use_many_rows(fake)
    assert_near(operations.norm_gated(hidden, norm, gate_up), gated(hidden, weight_of(gate_up), 1e-6), 2e-2)
    assert bool(fake.asked) == is_asked


@pytest.mark.parametrize("tile", [None, TILES["gated"][0]], ids=str)
def test_operations_ask_it_for_products_that_have_a_tile(tile: ManyRowsTile | None) -> None:
    operations = TritonOperations(DEVICE, [Line(("plain", "added"), (2, None), (tile,))] if tile is not None else [])
    fake: Any = FakeRows()
    operations.dense.use_many_rows(fake)
    placement = Placement(DEVICE, torch.bfloat16)
    column = Linear(placement, [whole("column", 128)], INPUTS, has_bias=False)
    row = Linear(placement, [whole("row", INPUTS)], 128, slice(0, 128), has_bias=False)
    weight_of(column).copy_(randn(128, INPUTS, seed=1, scale=0.05))
    weight_of(row).copy_(randn(INPUTS, 128, seed=2, scale=0.05))
    norm = RMSNorm(placement, NormSpec("norm", 1e-6), INPUTS)
    norm.weight.fill_(1)
    hidden = randn(100, INPUTS, seed=3, dtype=torch.bfloat16)
    found = operations.norm_linear(hidden, norm, column)
    assert_near(found, (hidden.double() * Unscaled(hidden, 1e-6).scales()) @ weight_of(column).double().t(), 2e-2)
    expected = hidden.double() + found.double() @ weight_of(row).double().t()
    assert_near(operations.linear_add(found, row, hidden), expected, 2e-2)
    assert fake.asked == ([tile, tile] if tile is not None else [])


def package(change: float) -> SimpleNamespace:
    """One that computes gates and products, and adds something to them."""

    def gate(hidden: Tensor, weight: Tensor, *_: object, epi_args: dict[str, Tensor], **__: object) -> None:
        gate, up = (hidden.float() @ weight.float().t() * epi_args["scale"].t()).chunk(2, 1)
        epi_args["out"].copy_(torch.nn.functional.silu(gate) * up + change)

    def multiply(x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None, **_: object) -> None:
        product = x.float() @ weight.float().mT + change
        out.copy_(product if residual is None else residual + product)

    end = SimpleNamespace(gemm=multiply)
    return SimpleNamespace(GATED=SimpleNamespace(gemm=gate), PLAIN=end, ADDED=end)


@pytest.fixture(params=["gated", "plain", "added", "split"])
def tiles(request: pytest.FixtureRequest) -> Tiles:
    kind = request.param
    tile = ManyRowsTile(96, 64, (1, 2), is_early=True, is_swapped=kind != "gated", splits=2 if kind == "split" else 1)
    return {"added" if kind == "split" else kind: [tile]}


def test_a_package_is_taken_that_computes_what_it_should(
    monkeypatch: pytest.MonkeyPatch, tiles: dict[Kind, list[ManyRowsTile]]
) -> None:
    monkeypatch.setattr(module, "import_module", lambda _: package(0.0))
    make_many_rows(DEVICE, tiles)


def test_a_package_that_computes_something_else_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tiles: dict[Kind, list[ManyRowsTile]]
) -> None:
    monkeypatch.setattr(module, "import_module", lambda _: package(1.0))
    with pytest.raises(RuntimeError, match="not what it should be"):
        make_many_rows(DEVICE, tiles)
