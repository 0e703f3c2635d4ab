"""Even shares of a product's blocks, and the sums of the parts of tiles that they cut."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DEVICE, GATED_TOLERANCE, assert_near, randn
from torch.nn.functional import silu

from worker_svc.core.kernels.linear.int4_parts import add_parts, blocks_of_share, make_parts
from worker_svc.core.kernels.linear.ways import STREAMED_INT4_OUTPUTS as OUTPUTS


@given(tiles=st.integers(1, 600), blocks=st.integers(1, 300), programs=st.integers(1, 150))
def test_shares_are_even_and_leave_nothing(tiles: int, blocks: int, programs: int) -> None:
    share = blocks_of_share(tiles, blocks, programs)
    assert share * programs >= tiles * blocks
    assert share < tiles * blocks / programs + 1 + blocks / 8
    if blocks % 8 == 0:
        assert share % (blocks // 8) == 0


def drawn_parts(rows: int, tiles: int, blocks: int, share: int, tile_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts as programs leave them, NaN where they leave none, and the sum of each tile that is cut, NaN of others."""
    items = -(-rows // tile_rows) * tiles
    programs = -(-items * blocks // share)
    parts = make_parts(programs, tile_rows, DEVICE).fill_(float("nan"))
    sums = torch.full((items, tile_rows, OUTPUTS), float("nan"), dtype=torch.float64, device=DEVICE)
    for program in range(programs):
        start, end = program * share, min((program + 1) * share, items * blocks)
        for item in range(start // blocks, -(-end // blocks)):
            if max(start, item * blocks) > item * blocks or end < (item + 1) * blocks:
                part = randn(tile_rows, OUTPUTS, seed=program + 1000 * item, dtype=torch.float32)
                parts[program, int(item != start // blocks)] = part
                sums[item] = sums[item].nan_to_num(0.0) + part.double()
    by_rows = sums.unflatten(0, (-1, tiles)).transpose(1, 2).flatten(2).flatten(0, 1)
    return parts, by_rows[:rows]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "tiles", "blocks", "share"),
    [(5, 2, 6, 4), (33, 3, 8, 20), (140, 2, 10, 1), (128, 1, 5, 5), (130, 2, 3, 7)],
)
def test_parts_of_cut_tiles_are_added_up_and_whole_tiles_left_alone(
    rows: int, tiles: int, blocks: int, share: int, dtype: torch.dtype
) -> None:
    parts, sums = drawn_parts(rows, tiles, blocks, share, tile_rows=128)
    is_cut = ~sums.isnan()
    outputs = tiles * OUTPUTS
    bias, residual = randn(outputs, seed=1, dtype=dtype), randn(rows, outputs, seed=2, dtype=dtype)
    cases: list[tuple[dict[str, Any], torch.Tensor]] = [
        ({}, sums),
        ({"bias": bias}, sums + bias),
        ({"residual": residual}, sums + residual),
        ({"bias": bias, "residual": residual}, sums + bias + residual),
    ]
    for ends, expected in cases:
        before = randn(rows, outputs, seed=3, dtype=dtype)
        out = before.clone()
        add_parts(parts, share, blocks, out, **ends)
        assert torch.equal(out[~is_cut], before[~is_cut])
        if is_cut.any():
            assert_near(out[is_cut], expected[is_cut])


def test_gates_stand_before_ups() -> None:
    rows, tiles, blocks, share = 40, 2, 6, 4
    parts, sums = drawn_parts(rows, tiles, blocks, share, tile_rows=128)
    gate, up = sums.unflatten(1, (tiles, 2, OUTPUTS // 2)).unbind(2)
    out = torch.empty(rows, tiles * OUTPUTS // 2, dtype=torch.bfloat16, device=DEVICE)
    add_parts(parts, share, blocks, out, is_gated=True)
    assert_near(out, (silu(gate) * up).flatten(1), max(GATED_TOLERANCE, 1e-2))
