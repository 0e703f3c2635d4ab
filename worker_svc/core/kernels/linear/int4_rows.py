"""Products of a batch's rows with a weight of 4 bits, which is read once and decoded in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.ahead import ask
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait
from worker_svc.core.kernels.linear.int4_numbers import Int4Weight, decode, scale_of, unit
from worker_svc.core.kernels.linear.ways import MOST_INT4_TILES, Int4Tile
from worker_svc.core.kernels.words import BLOCK, WORDS, in_order

_BLOCK, _WORDS = tl.constexpr(BLOCK), tl.constexpr(WORDS)


@triton.jit
def groups_of(scales_ptr, n, N, block, ODD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Scales and zeros of a block of inputs, for each word of rows n: i32[ROWS, 1], or [ROWS, 16]. ODD: of the word's
    last 16 inputs.
    """
    if GROUP >= _BLOCK:
        packed = tl.load(scales_ptr + (block * _BLOCK // GROUP) * N + n)[:, None]
    else:
        # A word has numbers of two sixteens of inputs, 32 apart from the next word's.
        groups = block * (_BLOCK // GROUP) + (tl.arange(0, 4) * 32 + (16 if ODD else 0)) // GROUP
        packed = tl.load(scales_ptr + groups[None, :] * N + n[:, None])
        packed = tl.reshape(tl.broadcast_to(packed[:, None, :], (ROWS, 4, 4)), (ROWS, _WORDS))
    return packed


@triton.jit
def _tile(
    acc,
    words,
    x,
    scales_ptr,
    n,
    N,
    block,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """acc + the product of a block of inputs."""
    packed = groups_of(scales_ptr, n, N, block, False, GROUP, OUTPUTS)
    packed_odd = packed
    if GROUP < 32:
        packed_odd = groups_of(scales_ptr, n, N, block, True, GROUP, OUTPUTS)
    numbers = decode(words, packed, packed_odd, x.dtype, OUTPUTS, WARPS, SCALED)
    if SCALED:
        acc = tl.dot(numbers, x, acc)
    else:
        scales = scale_of(tl.load(scales_ptr + (block * _BLOCK // GROUP) * N + in_order(n, OUTPUTS, WARPS)))
        acc += tl.dot(numbers, x) * scales[:, None]
    return acc


@triton.jit
def _keep(
    partial_ptr,
    squares_ptr,
    acc,
    up_acc,
    squares,
    mine,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
):
    """Writes the part of one split."""
    HALVES: tl.constexpr = 2 if GATED else 1
    offsets = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    parts = partial_ptr + mine.to(tl.int64) * (HALVES * OUTPUTS * ROWS) + offsets
    tl.store(parts, acc)
    if GATED:
        tl.store(parts + OUTPUTS * ROWS, up_acc)
    if NORM:
        tl.store(squares_ptr + mine * ROWS + tl.arange(0, ROWS), squares)


@triton.jit
def _totals(
    partial_ptr,
    squares_ptr,
    up_acc,
    squares,
    first,
    SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
):
    """The sums of all splits' parts, always in the same order; of ups and squares where there are any."""
    HALVES: tl.constexpr = 2 if GATED else 1
    offsets = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    parts = partial_ptr + first.to(tl.int64) * (HALVES * OUTPUTS * ROWS) + offsets
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + part * (HALVES * OUTPUTS * ROWS), cache_modifier=".cg")
    if GATED:
        up_acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for part in tl.static_range(SPLITS):
            up_acc += tl.load(parts + (part * HALVES + 1) * (OUTPUTS * ROWS), cache_modifier=".cg")
    if NORM:
        squares = tl.zeros((ROWS,), tl.float32)
        for part in tl.static_range(SPLITS):
            squares += tl.load(squares_ptr + (first + part) * ROWS + tl.arange(0, ROWS), cache_modifier=".cg")
    return total, up_acc, squares


@triton.jit
def _end(
    acc,
    up_acc,
    squares,
    bias_ptr,
    residual_ptr,
    out_ptr,
    eps,
    n,
    rows,
    M,
    N,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Writes a tile: outputs n of these rows."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if not SCALED:
        acc *= 1.0 / unit(dtype)
        if GATED:
            up_acc *= 1.0 / unit(dtype)
    if NORM:
        scales = (1.0 / tl.sqrt(squares / K + eps))[None, :]
        acc *= scales
        if GATED:
            up_acc *= scales
    if GATED:
        acc = acc * tl.sigmoid(acc) * up_acc
    is_row = rows[None, :] < M
    offsets = rows[None, :].to(tl.int64) * N + n[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + n).to(tl.float32)[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + offsets, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, acc.to(dtype), mask=is_row)


# Not compiled again for a number of rows that divides by 16: steps that are no graphs have any.
@triton.jit(do_not_specialize=["M"])
def _int4_rows(
    x_ptr,  # [M, K]
    numbers_ptr,  # i32[N, K / 128, 16]; GATED: [2 N, ...], gates then ups
    scales_ptr,  # i32[groups, N]; GATED: [groups, 2 N]
    norm_ptr,  # [K]
    bias_ptr,  # [N]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    partial_ptr,  # f32[tiles, SPLITS, 2 if GATED else 1, OUTPUTS, ROWS]
    squares_ptr,  # f32[tiles, SPLITS, ROWS]
    done_ptr,  # i32[tiles]: splits that have ended, 0 between launches
    eps,
    M,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a step
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,  # blocks of each row that are asked for before the kernels ahead have ended
    SCALED: tl.constexpr,  # scales are multiplied with numbers, else with sums
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The weight is the tall operand of the product, so that the rows need not be padded to its height."""
    tile, split = tl.program_id(0), tl.program_id(1)
    COUNT: tl.constexpr = K // _BLOCK
    HALVES: tl.constexpr = 2 if GATED else 1
    first, last = split * COUNT // SPLITS, (split + 1) * COUNT // SPLITS
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row = rows[None, :] < M
    inputs = tl.arange(0, _BLOCK)
    row_ptrs = numbers_ptr + n.to(tl.int64) * (COUNT * _WORDS)
    ups = N.to(tl.int64) * (COUNT * _WORDS)
    if AHEAD:
        ask(row_ptrs + first * _WORDS, AHEAD * _WORDS * 4)
        if GATED:
            ask(row_ptrs + ups + first * _WORDS, AHEAD * _WORDS * 4)
    wait(DEPENDENT)
    release(DEPENDENT)
    word_ptrs = row_ptrs[:, None] + tl.arange(0, _WORDS)[None, :]
    x_ptrs = x_ptr + rows[None, :].to(tl.int64) * K + inputs[:, None]
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up_acc = acc
    squares = tl.zeros((ROWS,), tl.float32)
    stride = N * HALVES
    for step in tl.range(first, last, BLOCKS, num_stages=STAGES):
        for each in tl.static_range(BLOCKS):
            block = step + each
            words = tl.load(word_ptrs + block * _WORDS)
            x = tl.load(x_ptrs + block * _BLOCK, mask=is_row, other=0.0)
            if NORM:
                # The root mean square is divided by last: no product waits for it.
                hidden = x.to(tl.float32)
                squares += tl.sum(hidden * hidden, 0)
                norm = tl.load(norm_ptr + block * _BLOCK + inputs).to(tl.float32)
                x = (hidden * norm[:, None]).to(x.dtype)
            acc = _tile(acc, words, x, scales_ptr, n, stride, block, GROUP, SCALED, OUTPUTS, WARPS)
            if GATED:
                words = tl.load(word_ptrs + ups + block * _WORDS)
                up_acc = _tile(up_acc, words, x, scales_ptr, n + N, stride, block, GROUP, SCALED, OUTPUTS, WARPS)
    outputs = in_order(n, OUTPUTS, WARPS)
    if SPLITS == 1:
        _end(
            acc, up_acc, squares, bias_ptr, residual_ptr, out_ptr, eps, outputs, rows, M, N,
            K, SCALED, NORM, GATED, BIAS, RESIDUAL,
        )  # fmt: skip
    else:
        # The split that ends last adds the parts up.
        place = tl.program_id(2) * tl.num_programs(0) + tile
        mine = place * SPLITS + split
        _keep(partial_ptr, squares_ptr, acc, up_acc, squares, mine, OUTPUTS, ROWS, NORM, GATED)
        tl.debug_barrier()
        ended = tl.atomic_add(done_ptr + place, 1, sem="acq_rel")
        if ended == SPLITS - 1:
            acc, up_acc, squares = _totals(
                partial_ptr, squares_ptr, up_acc, squares, place * SPLITS, SPLITS, OUTPUTS, ROWS, NORM, GATED
            )
            _end(
                acc, up_acc, squares, bias_ptr, residual_ptr, out_ptr, eps, outputs, rows, M, N,
                K, SCALED, NORM, GATED, BIAS, RESIDUAL,
            )  # fmt: skip
            tl.store(done_ptr + place, 0)


class Int4Rows:
    """Multiplies by tiles of at most `MOST_INT4_TILES`, on one stream."""

    def __init__(self) -> None:
        self._done: Tensor | None = None

    def multiply(
        self,
        x: Tensor,
        weight: Int4Weight,
        tile: Int4Tile,
        *,
        norm: tuple[Tensor, float] | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        """residual + f(norm(x) @ weight.T) + bias.

        x [rows, inputs], norm: weight [inputs] and eps of an RMS norm, bias [outputs], residual [rows, outputs] ->
        [rows, outputs]. Gated: as by `row_linear`.
        """
        rows, inputs = x.shape
        outputs = weight.outputs // 2 if is_gated else weight.outputs
        tiles = outputs // tile.outputs
        row_tiles = triton.cdiv(rows, tile.rows)
        if self._done is None:
            self._done = torch.zeros(MOST_INT4_TILES, dtype=torch.int32, device=x.device)
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        partial = squares = out
        if tile.splits > 1:
            parts, halves = row_tiles * tiles * tile.splits, 2 if is_gated else 1
            partial = torch.empty(parts, halves, tile.outputs, tile.rows, device=x.device)
            squares = torch.empty(parts, tile.rows, device=x.device) if norm is not None else out
        norm_weight, eps = norm if norm is not None else (x, 0.0)
        dependent = has_dependent_launch(x.device)
        _int4_rows[(tiles, tile.splits, row_tiles)](
            x,
            weight.numbers,
            weight.scales.view(torch.int32),
            norm_weight,
            bias if bias is not None else x,
            residual if residual is not None else x,
            out,
            partial,
            squares,
            self._done,
            eps,
            rows,
            outputs,
            K=inputs,
            GROUP=weight.group or inputs,
            OUTPUTS=tile.outputs,
            ROWS=tile.rows,
            BLOCKS=tile.blocks,
            SPLITS=tile.splits,
            STAGES=tile.stages,
            WARPS=tile.warps,
            AHEAD=tile.ahead if dependent else 0,
            SCALED=tile.scaled,
            NORM=norm is not None,
            GATED=is_gated,
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            DEPENDENT=dependent,
            **options(warps=tile.warps, dependent=dependent),
        )
        return out
