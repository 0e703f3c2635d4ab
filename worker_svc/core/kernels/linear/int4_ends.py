"""The end of a tile of `int4_stream`: gated, added to, and written, or kept as a part of it; in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_WARPS = gl.constexpr(4)
_PIECE = gl.constexpr(64)  # rows that are written at a time


@gluon.jit
def _write(
    y,
    pointers,
    output,
    row,
    M,
    N,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
):
    """Writes four warps' outputs, from `output` on, of rows from `row` on, with what is added to them: f32[outputs,
    rows], as `decode` had the outputs.
    """
    out_ptr, bias_ptr, residual_ptr = pointers
    WRITTEN: gl.constexpr = y.shape[0] // 2 if GATED else y.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [WRITTEN // 8, 256 // WRITTEN], [1, _WARPS], [0, 1])
    # Warp, half, row of eight.
    y = y.reshape([_WARPS, 2, 8, _PIECE])
    if GATED:
        gate, up = y.permute(0, 2, 3, 1).split()
        y = gate / (1.0 + gl.exp(-gate)) * up
    else:
        y = y.permute(1, 0, 2, 3)
    y = gl.convert_layout(y.reshape([WRITTEN, _PIECE]), LAYOUT)
    n = output + gl.arange(0, WRITTEN, gl.SliceLayout(1, LAYOUT))
    rows = row + gl.arange(0, _PIECE, gl.SliceLayout(0, LAYOUT))
    offsets = rows.to(gl.int64)[None, :] * N + n[:, None]
    is_row = (rows < M)[None, :]
    if BIAS:
        y += gl.load(bias_ptr + n).to(gl.float32)[:, None]
    if RESIDUAL:
        y += gl.load(residual_ptr + offsets, mask=is_row, other=0.0).to(gl.float32)
    gl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=is_row)


@gluon.jit
def _halved(y):
    """The first and the last half of rows."""
    return y.reshape([y.shape[0], 2, y.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def end_tile(acc, pointers, output, row, M, N, GATED: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr):
    """Writes four warps' outputs, from `output` on, of 128 or 256 rows from `row` on."""
    low, high = _halved(acc)
    if acc.shape[1] == 2 * _PIECE:
        _write(low, pointers, output, row, M, N, GATED, BIAS, RESIDUAL)
        _write(high, pointers, output, row + _PIECE, M, N, GATED, BIAS, RESIDUAL)
    else:
        first, second = _halved(low)
        third, fourth = _halved(high)
        _write(first, pointers, output, row, M, N, GATED, BIAS, RESIDUAL)
        _write(second, pointers, output, row + _PIECE, M, N, GATED, BIAS, RESIDUAL)
        _write(third, pointers, output, row + 2 * _PIECE, M, N, GATED, BIAS, RESIDUAL)
        _write(fourth, pointers, output, row + 3 * _PIECE, M, N, GATED, BIAS, RESIDUAL)


@gluon.jit
def keep_part(acc, part_ptr, NTH: gl.constexpr, GATED: gl.constexpr):
    """Writes the `NTH` four warps' outputs to a part of a tile, f32[rows, outputs] of `int4_parts`."""
    OUTPUTS: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = OUTPUTS // 2
    place = gl.arange(0, OUTPUTS, gl.SliceLayout(1, acc.type.layout))
    row = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    # Warp, half, row of eight, as in `_write`.
    half, column = place // 8 % 2, place // 16 * 8 + place % 8
    if GATED:
        column += half * OUTPUTS + NTH * HALF
    else:
        column += NTH * OUTPUTS + half * HALF
    gl.store(part_ptr + row[None, :] * (2 * OUTPUTS) + column[:, None], acc)
