"""Even shares of a product's blocks of inputs for its programs, which cut tiles into parts, and the sum of these.

Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU", 2023.
Here a kernel of its own adds the parts up, always in the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.activation import gated
from worker_svc.core.kernels.linear.ways import STREAMED_INT4_OUTPUTS

_OUTPUTS = tl.constexpr(STREAMED_INT4_OUTPUTS)  # of a tile
_PIECES = 8  # of a tile's blocks: no share ends within one, so that few tiles are cut more often than they must
_ROWS = 16  # of a program


def blocks_of_share(tiles: int, blocks: int, programs: int) -> int:
    """The blocks of each program, of so many tiles with so many blocks each; the last program may have fewer."""
    piece = blocks // _PIECES if blocks % _PIECES == 0 else 1
    return -(-tiles * blocks // (programs * piece)) * piece


def make_parts(programs: int, rows: int, device: torch.device) -> Tensor:
    """f32[programs, 2, rows of a tile, outputs of a tile]: of the first tile that a program has a part of, and of its
    last if that is another. Of gates and ups the first half are gates.
    """
    return torch.empty(programs, 2, rows, STREAMED_INT4_OUTPUTS, device=device)


# Not compiled again for a number of rows that divides by 16: steps that are no graphs have any.
@triton.jit(do_not_specialize=["M", "share"])
def _add_parts(
    parts_ptr,  # see `make_parts`
    bias_ptr,  # [N]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    M,
    N,
    tiles,  # of the outputs
    share,
    BLOCKS: tl.constexpr,  # of a tile
    TILE_ROWS: tl.constexpr,
    MOST: tl.constexpr,  # parts of a tile
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program for some rows of a tile; of a whole tile there is nothing to do."""
    item = tl.program_id(0)
    wait(DEPENDENT)
    release(DEPENDENT)
    first, last = item * BLOCKS // share, (item * BLOCKS + BLOCKS - 1) // share
    if first < last:
        COLUMNS: tl.constexpr = _OUTPUTS // 2 if GATED else _OUTPUTS
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        rows = item // tiles * TILE_ROWS + row
        is_row = (rows < M)[:, None]
        within = row[:, None] * _OUTPUTS + column[None, :]
        y = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for number in tl.static_range(MOST):
            program = first + number
            is_part = is_row & (program <= last)
            place = 2 * program + (program * share // BLOCKS != item).to(tl.int32)
            part = parts_ptr + place.to(tl.int64) * (TILE_ROWS * _OUTPUTS) + within
            y += tl.load(part, mask=is_part, other=0.0)
            if GATED:
                up += tl.load(part + COLUMNS, mask=is_part, other=0.0)
        if GATED:
            y = gated(y, up, False)
        n = item % tiles * COLUMNS + column
        offsets = rows.to(tl.int64)[:, None] * N + n[None, :]
        if BIAS:
            y += tl.load(bias_ptr + n).to(tl.float32)[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + offsets, mask=is_row, other=0.0).to(tl.float32)
        tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=is_row)


def add_parts(
    parts: Tensor,
    share: int,
    blocks: int,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """Write residual + f(sum of parts) + bias of each tile that shares of so many blocks have cut, to `out` [rows,
    outputs]: tiles with so many blocks each, those of the first rows first. f is silu(gate) * up if it is gated.
    """
    rows, outputs = out.shape
    tile_rows, tile_outputs = parts.shape[2:]
    tiles = outputs // (tile_outputs // 2 if is_gated else tile_outputs)
    dependent = has_dependent_launch(out.device)
    _add_parts[(triton.cdiv(rows, tile_rows) * tiles, triton.cdiv(min(rows, tile_rows), _ROWS))](
        parts,
        bias if bias is not None else out,
        residual if residual is not None else out,
        out,
        rows,
        outputs,
        tiles,
        share,
        BLOCKS=blocks,
        TILE_ROWS=tile_rows,
        MOST=triton.cdiv(blocks - 1, share) + 1,
        ROWS=_ROWS,
        GATED=is_gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
