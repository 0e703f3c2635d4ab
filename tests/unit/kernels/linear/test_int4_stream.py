"""Products of many rows with weights of 4 bits that are decoded ahead, on a Hopper; that they compile for one."""

from typing import Any

import pytest
import torch
from hopper import compile_for_hopper
from kernel_inputs import DEVICE, assert_near, randn
from torch.nn.functional import silu

from worker_svc.core.formats.int4 import Int4
from worker_svc.core.kernels.linear.int4_stream import has_int4_stream, multiply_int4_stream
from worker_svc.core.kernels.linear.ways import INT4, Int4StreamTile, Product

KERNEL = "worker_svc.core.kernels.linear.int4_stream._int4_stream"
needs_hopper = pytest.mark.skipif(not has_int4_stream(DEVICE), reason="needs a Hopper GPU")


def drawn(outputs: int, inputs: int, group: int | None) -> Int4:
    generator = torch.Generator().manual_seed(outputs + inputs)
    numbers = torch.randint(-(1 << 31), 1 << 31, (outputs, inputs // 128, 16), generator=generator).to(torch.int32)
    groups = 1 if group is None else inputs // group
    scales = (torch.rand(groups, outputs, generator=generator) * 0.02 + 0.001).view(torch.int32)
    zeros = torch.randint(0, 16, scales.shape, generator=generator, dtype=torch.int32)
    return Int4(numbers.to(DEVICE), ((scales & -16) | zeros).view(torch.float32).to(DEVICE), inputs, group)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [128, 256, None])
@pytest.mark.parametrize("of_tile", [128, 256])
@pytest.mark.parametrize("rows", [1, 63, 129, 256, 257, 700])
def test_products_are_torch_s(rows: int, of_tile: int, group: int | None, dtype: torch.dtype) -> None:
    outputs, inputs = 384, 1280
    weight, tile = drawn(outputs, inputs, group), Int4StreamTile(of_tile)
    x, residual = randn(rows, inputs, seed=1, dtype=dtype), randn(rows, outputs, seed=2, dtype=dtype)
    bias = randn(outputs, seed=3, dtype=dtype)
    product = x.double() @ weight.widen(torch.float64).t()
    assert_near(multiply_int4_stream(x, weight, tile), product)
    assert_near(multiply_int4_stream(x, weight, tile, bias=bias, residual=residual), product + bias + residual)
    gate, up = product.chunk(2, 1)
    assert_near(multiply_int4_stream(x, weight, tile, is_gated=True), silu(gate) * up)


@needs_hopper
def test_programs_take_several_tiles() -> None:
    weight, x = drawn(8192, 1024, 128), randn(3000, 1024, seed=1)
    for tile in (Int4StreamTile(128), Int4StreamTile(256)):
        assert_near(multiply_int4_stream(x, weight, tile), x.double() @ weight.widen(torch.float64).t())


def test_it_is_for_whole_blocks_and_tiles() -> None:
    assert Int4StreamTile(128).fits(Product("added", 4096, 4096, INT4, 128), 256)
    assert Int4StreamTile().fits(Product("gated", 24576, 4096, INT4, None), 8192)
    assert not Int4StreamTile().fits(Product("plain", 4096, 4096, INT4, 64), 256)
    assert not Int4StreamTile().fits(Product("plain", 4096 + 64, 4096, INT4, 128), 256)


def launch_stream(dtype: torch.dtype, tile: Int4StreamTile, changes: dict[str, Any]) -> None:
    weight = Int4(torch.zeros(512, 8, 16, dtype=torch.int32), torch.zeros(8, 512), 1024, 128)
    multiply_int4_stream(torch.zeros(300, 1024, dtype=dtype), weight, tile, **changes)


@pytest.mark.parametrize(
    ("dtype", "tile", "is_gated"),
    [
        (torch.bfloat16, Int4StreamTile(), False),
        (torch.bfloat16, Int4StreamTile(128), True),
        (torch.float16, Int4StreamTile(128), False),
    ],
)
def test_matrix_units_take_decoded_numbers_from_registers_on_a_hopper(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tile: Int4StreamTile, *, is_gated: bool
) -> None:
    kind = "bf16" if dtype is torch.bfloat16 else "f16"
    instruction = f"wgmma.mma_async.sync.aligned.m64n{tile.rows}k16.f32.{kind}.{kind}"
    compile_for_hopper(monkeypatch, KERNEL, instruction, launch_stream, dtype, tile, {"is_gated": is_gated})
