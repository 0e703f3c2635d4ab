"""Products of one row by programs that stay, on a Hopper; that they compile for one."""

from typing import Any

import pytest
import torch
from hopper import compile_for_hopper
from kernel_inputs import DEVICE, assert_near, assert_replays_alike, gelu_gated, normed, randn, silu_gated
from torch import Tensor

from worker_svc.core.kernels.linear import row_stream
from worker_svc.core.kernels.linear.fp8_one_row import fp8_row_linear
from worker_svc.core.kernels.linear.product import BFLOAT16, FP8_GROUPS, FP8_W8A8, FP8_W8A16, Product
from worker_svc.core.kernels.linear.row_stream import has_row_stream, stream_row
from worker_svc.core.kernels.linear.ways import Fp8OneRowTile, RowStreamTile

FP8 = torch.float8_e4m3fn
KERNEL = "worker_svc.core.kernels.linear.row_stream._row_stream"
# Steps of which one, some, and none are asked for after the row; of one program and of several; of two warps.
TILES = [
    RowStreamTile(4, 1024, 4, 6, 3, 2),
    RowStreamTile(2, 1024, 4, 3, 6, 3),
    RowStreamTile(1, 512, 2, 1, 2, 2),
    RowStreamTile(8, 512, 2, 2, 3, 1),
]
# Inputs that fill steps, that do not, and that are fewer than one has; outputs that tiles divide, and that they do not.
SIZES = [(4096, 4096), (1000, 2048), (37, 1088), (6144, 4352), (24, 128)]
needs_hopper = pytest.mark.skipif(not has_row_stream(DEVICE), reason="needs a Hopper GPU")


def of_fp8(tile: RowStreamTile) -> RowStreamTile:
    """With as many bytes of a step."""
    return RowStreamTile(tile.outputs, 2 * tile.inputs, tile.warps, tile.programs, tile.stages, tile.early)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("tile", TILES)
def test_products_are_torch_s(tile: RowStreamTile, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = randn(1, inputs, seed=1, dtype=dtype), randn(outputs, inputs, seed=2, scale=inputs**-0.5, dtype=dtype)
    norm, bias = 1 + randn(inputs, seed=3, scale=0.2, dtype=dtype), randn(outputs, seed=4, dtype=dtype)
    residual = randn(1, outputs, seed=5, dtype=dtype)
    product = x.double() @ weight.double().t()
    assert_near(stream_row(x, weight, tile), product)
    assert_near(stream_row(x, weight, tile, bias=bias, residual=residual), product + bias + residual)
    of_normed = normed(x, norm, 1e-6) @ weight.double().t()
    assert_near(stream_row(x, weight, tile, norm=(norm, 1e-6), bias=bias), of_normed + bias)
    ones = torch.ones_like(norm)
    of_folded = normed(x, ones, 1e-6) @ weight.double().t()
    assert_near(stream_row(x, weight, tile, norm=(ones, 1e-6), is_folded=True), of_folded)


@needs_hopper
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("tile", TILES)
def test_gates_are_torch_s(tile: RowStreamTile, outputs: int, inputs: int) -> None:
    x, weight = randn(1, inputs, seed=1), randn(2 * outputs, inputs, seed=2, scale=inputs**-0.5)
    norm, bias = 1 + randn(inputs, seed=3, scale=0.2), randn(2 * outputs, seed=4)
    product = normed(x, norm, 1e-6) @ weight.double().t()
    assert_near(stream_row(x, weight, tile, norm=(norm, 1e-6), is_gated=True), silu_gated(product))
    y = stream_row(x, weight, tile, norm=(norm, 1e-6), bias=bias, is_gated=True, is_gelu=True)
    assert_near(y, gelu_gated(product + bias))


@needs_hopper
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("tile", [of_fp8(each) for each in TILES])
def test_products_of_8_bit_floats_are_those_of_other_programs(tile: RowStreamTile, outputs: int, inputs: int) -> None:
    """Whose tests compare them with torch's: rows are rounded alike, and sums differ in their order alone."""
    weight = randn(2 * outputs, inputs, seed=2).to(FP8)
    scales = torch.rand(2 * outputs, 1, generator=torch.Generator().manual_seed(6)).to(DEVICE) + 0.5
    x, norm = randn(1, inputs, seed=1), 1 + randn(inputs, seed=3, scale=0.2)
    bias, residual = randn(2 * outputs, seed=4), randn(1, 2 * outputs, seed=5)
    other = Fp8OneRowTile(4, min(512, inputs), 4)  # with steps of 64 it compiles for 45 s
    for changes in (
        {"residual": residual},
        {"bias": bias, "residual": residual},
        {"norm": (norm, 1e-6), "bias": bias},
    ):
        expected = fp8_row_linear(x, weight, scales, other, rounds_inputs=True, **changes)
        assert_near(stream_row(x, weight, tile, scales=scales, **changes), expected, 4e-3)
    for is_gelu in (False, True):
        gates: dict[str, Any] = {"norm": (norm, 1e-6), "is_gated": True}
        expected = fp8_row_linear(x, weight, scales, other, rounds_inputs=True, gelu=is_gelu, **gates)
        assert_near(stream_row(x, weight, tile, scales=scales, is_gelu=is_gelu, **gates), expected, 4e-3)


@needs_hopper
@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("tile", TILES)
def test_sums_are_the_same_every_time(tile: RowStreamTile, *, is_narrow: bool) -> None:
    """Also one product after the other, of which each reads what that before has written."""
    weight, x = randn(4096, 4096, seed=2, scale=1 / 64), randn(1, 4096, seed=1)
    scales = torch.full((4096, 1), 1 / 64, device=DEVICE) if is_narrow else None
    if is_narrow:
        weight, tile = (weight * 64).to(FP8), of_fp8(tile)

    def compute() -> Tensor:
        y = x
        for _ in range(8):
            y = stream_row(y, weight, tile, scales=scales, residual=x)
        return y

    assert_replays_alike(compute, 200)


def test_what_fits_one_row() -> None:
    tile = RowStreamTile(4, 1024, 4, 6, 3, 2)
    assert tile.fits(Product("added", 4096, 4096), 1)
    assert tile.fits(Product("gated", 4096, 4096, "float16"), 1) is False, "two rows of the weight for each output"
    assert RowStreamTile(2, 1024, 4, 6, 3, 2).fits(Product("gated", 4096, 4096, "float16"), 1)
    assert not tile.fits(Product("added", 4096, 4096), 2)
    assert not tile.fits(Product("added", 4096, 4096 + 8), 1), "copies are of sixteen bytes"
    assert not tile.fits(Product("added", 4096, 32768), 1), "no thread has registers for so much of a row"
    assert of_fp8(tile).fits(Product("normed", 4096, 4096, FP8_W8A8), 1)
    assert not tile.fits(Product("normed", 4096, 4096, FP8_W8A8), 1), "eight bytes for a thread"
    assert not of_fp8(tile).fits(Product("normed", 4096, 4096, FP8_W8A16), 1)
    assert not of_fp8(tile).fits(Product("normed", 4096, 4096, FP8_GROUPS, 128), 1)


@pytest.mark.parametrize(
    "wrong", [(3, 1024, 4, 6, 3, 2), (4, 1024, 4, 0, 3, 2), (4, 1024, 4, 6, 3, 0), (4, 64, 4, 6, 3, 4)]
)
def test_tiles_that_cannot_be(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"row_stream has one program|power of two"):
        RowStreamTile(*wrong)


def launch(dtype: torch.dtype, tile: RowStreamTile, inputs: int, is_gated: bool) -> None:
    row_stream.multiprocessors = lambda *_: 132  # in the process that compiles
    weight = torch.zeros(6144, inputs).to(dtype)
    x, norm, bias = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((1, inputs), (inputs,), (6144,)))
    scales = torch.zeros(6144, 1) if dtype is FP8 else None
    stream_row(x, weight, tile, scales=scales, norm=(norm, 1e-6), bias=bias, is_gated=is_gated)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tile", "inputs"),
    [
        (torch.bfloat16, TILES[0], 4352),
        (FP8, of_fp8(TILES[1]), 4352),
        (FP8, of_fp8(TILES[1]), 20480),  # the most values that a thread holds
    ],
)
def test_a_hopper_copies_weights_without_registers(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tile: RowStreamTile, inputs: int, *, is_gated: bool
) -> None:
    assert tile.fits(Product("added", 6144, inputs, FP8_W8A8 if dtype is FP8 else BFLOAT16), 1)
    compile_for_hopper(monkeypatch, KERNEL, "cp.async.cg.shared.global", launch, dtype, tile, inputs, is_gated)
