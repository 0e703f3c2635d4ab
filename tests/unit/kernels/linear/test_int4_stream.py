"""Products of many rows with weights of 4 bits that are decoded ahead, on a Hopper; that they compile for one."""

import re
from typing import Any

import pytest
import torch
from hopper import Disassembled, NotLaunched, compile_for_hopper, on_hopper
from kernel_inputs import DEVICE, assert_near, randn
from torch.nn.functional import silu

from worker_svc.core.formats.int4 import Int4
from worker_svc.core.kernels.linear import int4_parts, int4_stream
from worker_svc.core.kernels.linear.int4_stream import has_int4_stream, multiply_int4_stream
from worker_svc.core.kernels.linear.product import INT4, Product
from worker_svc.core.kernels.linear.ways import Int4StreamTile

TILES = [Int4StreamTile(rows, stream_k) for rows in (128, 256) for stream_k in (False, True)]
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
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("rows", [1, 63, 129, 256, 257, 700])
def test_products_are_torch_s(rows: int, tile: Int4StreamTile, group: int | None, dtype: torch.dtype) -> None:
    outputs, inputs = 384, 1280
    weight = drawn(outputs, inputs, group)
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
    for tile in TILES:
        assert_near(multiply_int4_stream(x, weight, tile), x.double() @ weight.widen(torch.float64).t())


@needs_hopper
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_sums_are_the_same_every_time(tile: Int4StreamTile, *, is_gated: bool) -> None:
    weight, x = drawn(6144, 4096, 128), randn(1000, 4096, seed=1)
    for rows in (192, 1000):
        expected = multiply_int4_stream(x[:rows], weight, tile, is_gated=is_gated)
        again = [multiply_int4_stream(x[:rows], weight, tile, is_gated=is_gated) for _ in range(100)]
        assert all(torch.equal(each, expected) for each in again)


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


_PRODUCT = re.compile(r"HGMMA\S+ R\d+, R(\d+), gdesc")
_WRITTEN = re.compile(r"(?:@!?U?P\w+ )?(?P<name>[A-Z]\S*) (?:P\w+, )*R(?P<register>\d+)\b")
_WRITES_NOTHING = ("ST", "SYNCS", "RED", "BAR")


def written_while_read(loop: list[str]) -> list[str]:
    """Instructions of a loop's body that write registers out of which matrix units may still read."""
    read: list[set[int]] = [set()]  # of groups of products, the last of which is not whole
    found = []
    for line in loop * 2:
        if product := _PRODUCT.search(line):
            first = int(product[1])
            read[-1] |= set(range(first, first + 4))
            if "gsb0" in line:
                read.append(set())
        elif ended := re.search(r"DEPBAR\.LE gsb0, 0x(\w)", line):
            read = read[len(read) - 1 - int(ended[1], 16) :]
        elif (written := _WRITTEN.match(line)) and not written["name"].startswith(_WRITES_NOTHING):
            wide = 4 if ".128" in written["name"] else 2 if ".64" in written["name"] or "WIDE" in written["name"] else 1
            first = int(written["register"])
            if any(register in group for group in read for register in range(first, first + wide)):
                found.append(line)
    return found


def look_at_loops(lines: list[str]) -> None:
    labels = {line.rstrip(":").removeprefix("."): number for number, line in enumerate(lines) if line.endswith(":")}
    # Where a kernel is longer than 64 KiB, labels after these are not told.
    spans = [
        (first, number)
        for number, line in enumerate(lines)
        if (jump := re.search(r"@!?U?P\d+ BRA (LBB\d+);", line)) and (first := labels.get(jump[1], number)) < number
    ]
    spans = [(first, last) for first, last in spans if sum("HGMMA" in line for line in lines[first:last]) == 8]
    loops = [
        lines[first:last]
        for first, last in spans
        if not any(first <= other and end < last for other, end in spans)  # the loop of tiles has that of blocks in it
    ]
    assert len(loops) == 2, "each half of the outputs has a loop with the products of a block"
    for loop in loops:
        ended = [number for number, line in enumerate(loop) if "DEPBAR.LE gsb0" in line]
        assert len(ended) == 1, "products wait for each other"
        assert not any("SYNCS.ARRIVE" in line for line in loop[: ended[0]]), "asked for what may still be read"
        assert not written_while_read(loop)


def look_at_stream(dtype: torch.dtype, tile: Int4StreamTile, changes: dict[str, Any]) -> None:
    int4_stream._int4_stream = Disassembled(int4_stream._int4_stream, look_at_loops)
    int4_parts._add_parts = NotLaunched()
    launch_stream(dtype, tile, changes)


@pytest.mark.parametrize(
    ("tile", "is_gated"),
    [
        (Int4StreamTile(), True),
        (Int4StreamTile(), False),
        (Int4StreamTile(128), False),
        (Int4StreamTile(stream_k=True), True),
        (Int4StreamTile(128, stream_k=True), False),
    ],
)
def test_no_register_is_written_while_matrix_units_read_it_on_a_hopper(
    monkeypatch: pytest.MonkeyPatch, tile: Int4StreamTile, *, is_gated: bool
) -> None:
    on_hopper(monkeypatch, look_at_stream, torch.bfloat16, tile, {"is_gated": is_gated})


def test_what_is_written_before_products_have_ended_is_found() -> None:
    loop = ["HGMMA.64x256x16.F32.BF16 R24, R152, gdesc[UR8], R24, gsb0;", "IMAD.U32 R153, RZ, RZ, UR8;"]
    assert written_while_read([*loop, "WARPGROUP.DEPBAR.LE gsb0, 0x0;"]) == [loop[1]] * 2
    assert written_while_read([loop[0], "WARPGROUP.DEPBAR.LE gsb0, 0x0;", loop[1]]) == []
    assert written_while_read([*loop, "WARPGROUP.DEPBAR.LE gsb0, 0x1;"]) == [loop[1]] * 2
