"""Products of a batch's rows against double precision, on a Hopper; that they compile for one, anywhere."""

from typing import TypeVar

import pytest
import torch
from hopper import compile_for_hopper
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DEVICE, assert_near, assert_replays_alike, randn

from worker_svc.core.kernels.linear.batch_rows import BatchRows, RowScales, has_batch_rows
from worker_svc.core.kernels.linear.candidates import candidates
from worker_svc.core.kernels.linear.fp8_rounding import round_rows
from worker_svc.core.kernels.linear.product import FP8_W8A8, Kind, Product
from worker_svc.core.kernels.linear.unscaled import Unscaled
from worker_svc.core.kernels.linear.ways import MULTIPROCESSORS, BatchTile, Fp8BatchTile

needs_hopper = pytest.mark.skipif(not has_batch_rows(DEVICE), reason="needs a Hopper GPU")
Tile = TypeVar("Tile", BatchTile, Fp8BatchTile)
INPUTS = 1024
KERNEL = "worker_svc.core.kernels.linear.batch_rows._batch_rows"
TILES = [
    BatchTile(64, 128, 64, 64, 1, 7),
    BatchTile(64, 128, 64, 128, 1, 3),
    BatchTile(64, 128, 64, 64, 4, 4),
    BatchTile(64, 64, 0, 64, 8, 3),
    BatchTile(64, 128, 0, 64, 2, 8),
    BatchTile(64, 128, 0, 64, 3, 8),
    BatchTile(64, 64, 0, 128, 7, 6),
    BatchTile(128, 128, 64, 64, 5, 5),
    BatchTile(128, 64, 0, 64, 6, 9),
    BatchTile(128, 128, 64, 64, 1, 5),
    BatchTile(128, 128, 0, 64, 4, 6),
]
EVEN_TILES = [
    BatchTile(64, 64, 0, 128, 1, 6, stream_k=True),
    BatchTile(64, 128, 0, 64, 1, 7, stream_k=True),
    BatchTile(128, 128, 0, 64, 1, 6, stream_k=True),
]


FP8_TILES = [
    Fp8BatchTile(64, 64, 0, 256, 1, 7),
    Fp8BatchTile(64, 64, 0, 256, 2, 7),
    Fp8BatchTile(64, 128, 64, 128, 1, 3),
    Fp8BatchTile(64, 128, 64, 128, 4, 7),
    Fp8BatchTile(64, 128, 64, 256, 3, 3),
    Fp8BatchTile(128, 128, 64, 128, 1, 5),
    Fp8BatchTile(128, 64, 0, 256, 2, 4),
    Fp8BatchTile(128, 128, 0, 128, 8, 3),
]


@needs_hopper
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_any_tile_gives_the_product(tile: BatchTile) -> None:
    batch = BatchRows()
    weight = randn(5 * tile.outputs, INPUTS, seed=2, scale=0.05)
    for rows in (1, 17, tile.rows - 1, tile.rows):  # launched again and again: splits' counters go on
        x, residual = randn(rows, INPUTS, seed=rows), randn(rows, len(weight), seed=3)
        product = x.double() @ weight.double().t()
        assert_near(batch.multiply(x, weight, tile), product)
        assert_near(batch.multiply(x, weight, tile, residual), product + residual.double())
        assert_near(batch.multiply(x, weight, tile, residual[:1].expand(rows, -1)), product + residual[:1].double())


@needs_hopper
@pytest.mark.parametrize("tile", [*(each for each in TILES if each.splits == 1), *EVEN_TILES], ids=str)
@pytest.mark.parametrize(
    "tiles", [3, 40, 80, 140]
)  # of even shares: less than a tile, in which some begin and end, more
def test_gates_are_those_of_normed_rows(tile: BatchTile, tiles: int) -> None:
    weight = randn(tiles * tile.outputs, INPUTS, seed=2, scale=0.05)
    for rows in (1, 17, tile.rows):
        hidden = randn(rows, INPUTS, seed=rows, scale=3.0)
        gate, up = (hidden.double() @ weight.double().t() * Unscaled(hidden, 1e-5).scales()).chunk(2, 1)
        assert_near(BatchRows().gate(hidden, weight, tile, 1e-5), torch.nn.functional.silu(gate) * up)


@needs_hopper
@pytest.mark.parametrize("tile", FP8_TILES, ids=str)
@pytest.mark.parametrize("tiles", [3, 140])
def test_any_tile_gives_the_product_of_8_bit_floats(tile: Fp8BatchTile, tiles: int) -> None:
    batch, count = BatchRows(), tiles if tile.splits == 1 else 3
    weight, of_outputs = round_rows(randn(count * tile.outputs, 2 * INPUTS, seed=2, dtype=torch.float32))
    for rows in (1, 17, 48, tile.rows - 1, tile.rows):
        x, of_rows = round_rows(randn(rows, 2 * INPUTS, seed=rows))
        scales = RowScales(of_rows, of_outputs)
        product = (x.double() * of_rows) @ (weight.double() * of_outputs).t()
        residual = randn(rows, len(weight), seed=3)
        assert_near(batch.multiply_fp8(x, weight, scales, tile, torch.bfloat16), product)
        added = batch.multiply_fp8(x, weight, scales, tile, torch.bfloat16, residual)
        assert_near(added, product + residual.double())
        if tile.splits == 1:
            gate, up = product.chunk(2, 1)
            gated = batch.multiply_fp8(x, weight, scales, tile, torch.bfloat16, is_gated=True)
            assert_near(gated, torch.nn.functional.silu(gate) * up)


@needs_hopper
def test_a_chain_of_products_in_a_graph_gives_what_it_gives_launched_one_by_one() -> None:
    batch, hidden = BatchRows(), randn(60, INPUTS, seed=1)
    up, down = randn(6 * 192, INPUTS, seed=2, scale=0.05), randn(INPUTS, 3 * 192, seed=3, scale=0.05)

    def chain() -> torch.Tensor:
        out = hidden
        for _ in range(4):
            gated = batch.gate(out, up, BatchTile(64, 128, 64, 64, 1, 7), 1e-6)
            out = batch.multiply(gated, down, BatchTile(64, 128, 0, 64, 4, 2), out)
            gated = batch.gate(out, up, BatchTile(64, 64, 0, 64, 1, 7, stream_k=True), 1e-6)
            out = batch.multiply(gated, down, BatchTile(64, 128, 0, 64, 3, 2), out)
        return out

    assert_replays_alike(chain, times=3)


@needs_hopper
@pytest.mark.parametrize("tile", EVEN_TILES, ids=str)
def test_even_shares_add_up_the_parts_of_their_own_launch(tile: BatchTile) -> None:
    """What a launch before has left is another product's, of another number of tiles: it would be seen."""
    batch, products = BatchRows(), []
    for tiles, rows in ((147, 32), (60, tile.rows), (147, 17)):
        hidden, weight = (
            randn(rows, INPUTS, seed=tiles + rows),
            randn(tiles * tile.outputs, INPUTS, seed=rows, scale=0.05),
        )
        gate, up = (hidden.double() @ weight.double().t() * Unscaled(hidden, 1e-5).scales()).chunk(2, 1)
        products.append((hidden, weight, torch.nn.functional.silu(gate) * up))
    firsts = [batch.gate(hidden, weight, tile, 1e-5) for hidden, weight, _ in products]
    for first, (_, _, expected) in zip(firsts, products, strict=True):
        assert_near(first, expected)
    for _ in range(50):  # always added up in the same order
        again = [batch.gate(hidden, weight, tile, 1e-5) for hidden, weight, _ in products]
        assert all(torch.equal(one, first) for one, first in zip(again, firsts, strict=True))


@needs_hopper
def test_even_shares_in_a_graph_compute_what_its_input_is_now() -> None:
    batch, tile, weight = BatchRows(), EVEN_TILES[0], randn(147 * 64, INPUTS, seed=2, scale=0.05)
    hidden = randn(32, INPUTS, seed=1)
    batch.gate(hidden, weight, tile, 1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = batch.gate(hidden, weight, tile, 1e-5)
    for seed in (3, 4, 5):
        hidden.copy_(randn(32, INPUTS, seed=seed))
        graph.replay()
        gate, up = (hidden.double() @ weight.double().t() * Unscaled(hidden, 1e-5).scales()).chunk(2, 1)
        assert_near(out, torch.nn.functional.silu(gate) * up)


@given(st.integers(1, 400), st.integers(1, 160))
def test_even_shares_are_even_and_leave_nothing(tiles: int, steps: int) -> None:
    tile, product = BatchTile(64, 128, 0, 128, 1, 4, stream_k=True), Product("gated", 128 * tiles, 128 * steps)
    programs, share = tile.programs(product), tile.share(product)
    assert 1 <= programs <= MULTIPROCESSORS
    assert (programs - 1) * share < tiles * steps <= programs * share
    assert share - tiles * steps / MULTIPROCESSORS < 1


def test_even_shares_are_for_gates_of_16_bits() -> None:
    tile = BatchTile(64, 128, 0, 128, 1, 4, stream_k=True)
    assert tile.fits(Product("gated", 34816, 5120), 64)
    assert not tile.fits(Product("added", 34816, 5120), 64)
    kinds: tuple[Kind, ...] = ("plain", "added", "gated")
    with_shares = {
        kind
        for kind in kinds
        for way in candidates(Product(kind, 6144, 4096), 32)
        if isinstance(way, BatchTile) and way.stream_k
    }
    assert with_shares == {"gated"}


def launch_products() -> None:
    x, weight = torch.zeros(50, 1024, dtype=torch.bfloat16), torch.zeros(384, 1024, dtype=torch.bfloat16)
    batch = BatchRows()
    batch.multiply(x, weight, BatchTile(64, 128, 64, 64, 4, 4), torch.zeros(50, 384, dtype=torch.bfloat16))
    batch.gate(x, weight, BatchTile(128, 128, 64, 64, 1, 4), 1e-6)
    batch.gate(x, weight, BatchTile(64, 128, 0, 128, 1, 4, stream_k=True), 1e-6)


def compiled(tiles: list[Tile]) -> list[Tile]:
    """All but those with 5, 6 and 7 splits, whose kernels are as those with 3: some programs have two shares."""
    return [tile for tile in tiles if tile.splits not in (5, 6, 7)]


def launch_fp8_candidates(kind: Kind, rows: int) -> None:
    product, batch = Product(kind, 6144, 4096, FP8_W8A8), BatchRows()
    x, weight = (torch.zeros(size, 4096).to(torch.float8_e4m3fn) for size in (rows, 6144))
    scales = RowScales(torch.zeros(rows, 1), torch.zeros(6144, 1))
    tiles = [way for way in candidates(product, rows) if isinstance(way, Fp8BatchTile)]
    assert len(tiles) > 4
    for tile in compiled(tiles):
        batch.multiply_fp8(x, weight, scales, tile, torch.bfloat16, is_gated=kind == "gated")


def launch_candidates(kind: Kind, rows: int) -> None:
    product, batch = Product(kind, 6144, 4096), BatchRows()
    x, weight = (torch.zeros(size, 4096, dtype=torch.bfloat16) for size in (rows, 6144))
    tiles = [way for way in candidates(product, rows) if isinstance(way, BatchTile)]
    assert len(tiles) > 4
    for tile in compiled(tiles):
        if kind == "gated":
            batch.gate(x, weight, tile, 1e-6)
        else:
            batch.multiply(x, weight, tile)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_what_a_tuner_would_measure_compiles_for_a_hopper(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, rows: int
) -> None:
    compile_for_hopper(monkeypatch, KERNEL, "wgmma", launch_candidates, kind, rows)
    compile_for_hopper(monkeypatch, KERNEL, ".e4m3.e4m3", launch_fp8_candidates, kind, rows)


def test_the_kernel_compiles_for_a_hopper_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for_hopper(monkeypatch, KERNEL, "wgmma", launch_products)
