"""Products of one row by programs that stay: weights come through shared memory, tiles ahead of those that are
multiplied; for Hopper.

A program of `one_row` or `fp8_one_row` reads its row, norms it, and rounds it, for a few outputs; here it does so once
for all of its tiles. Copies ask for weights without registers, before the kernels ahead have ended and while the row
is normed. Gluon has words for that, Triton has none; Triton's interpreter knows nothing of Gluon.
"""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker_svc.core.kernels.launch import INTERPRETED, multiprocessors, options
from worker_svc.core.kernels.linear.activation import gated
from worker_svc.core.kernels.linear.fp8_rounding import rounded, scale_of
from worker_svc.core.kernels.linear.ways import RowStreamTile

_HOPPER = (9, 0)


@gluon.jit
def _places(tile, rows, N, GATED: gl.constexpr):
    """Of a tile's rows of the weight: the outputs that they are for, and where they stand in it."""
    if GATED:
        # A gate and its up, one after the other.
        output = tile * (rows.shape[0] // 2) + rows // 2
        return output, output + rows % 2 * N
    else:  # noqa: RET505  (the compiler would go on after the return)
        output = tile * rows.shape[0] + rows
        return output, output


@gluon.jit
def _ask(ring, stage, weight_ptr, tile, N, STEP: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, L: gl.constexpr):
    """Ask for a tile's weights of a step; zeros where there are none."""
    ROWS: gl.constexpr = ring.shape[1]
    BLOCK_K: gl.constexpr = ring.shape[2]
    output, row = _places(tile, gl.arange(0, ROWS, gl.SliceLayout(1, L)), N, GATED)
    columns = STEP * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, L))
    pointers = weight_ptr + row[:, None].to(gl.int64) * K + columns[None, :]
    is_there = (output < N)[:, None] & (columns < K)[None, :]
    async_copy.async_copy_global_to_shared(ring.index(stage), pointers, mask=is_there)
    async_copy.commit_group()


@gluon.jit
def _of_row(pointer, K: gl.constexpr, BLOCK_K: gl.constexpr, L: gl.constexpr):
    """A row's numbers, step by step; zeros where there are none."""
    numbers = ()
    for start in gl.static_range(0, K, BLOCK_K):
        columns = start + gl.arange(0, BLOCK_K, gl.SliceLayout(0, L))
        numbers += (gl.load(pointer + columns, mask=columns < K, other=0.0),)  # type: ignore[assignment]
    return numbers


@gluon.jit
def _of_outputs(
    pointers,
    tile,
    N,
    ROWS: gl.constexpr,
    ROUNDED: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    GATED: gl.constexpr,
    L: gl.constexpr,
):
    """What sums of a tile are scaled with, and what is added to them, f32[ROWS] each."""
    scales_ptr, bias_ptr, residual_ptr = pointers
    output, row = _places(tile, gl.arange(0, ROWS, L), N, GATED)
    is_there = output < N
    scales = gl.full((ROWS,), 1.0, gl.float32, L)
    if ROUNDED:
        scales = gl.load(scales_ptr + row, mask=is_there, other=0.0)
    added = gl.zeros((ROWS,), gl.float32, L)
    if BIAS:
        added += gl.load(bias_ptr + row, mask=is_there, other=0.0).to(gl.float32)
    if RESIDUAL:
        added += gl.load(residual_ptr + output, mask=is_there, other=0.0).to(gl.float32)
    return scales, added


@gluon.jit
def _both(sum_a, max_a, sum_b, max_b):
    return sum_a + sum_b, gl.maximum(max_a, max_b)


@gluon.jit
def _rounded(x, rms_inverse, inverse, x_ptr, NORM: gl.constexpr):
    """Normed, in the row's own precision, then rounded to 8 bits."""
    if NORM:
        x = (x * rms_inverse).to(x_ptr.dtype.element_ty).to(gl.float32)
    return rounded(x, inverse).to(gl.float32)


@gluon.jit
def _as_multiplied(
    loaded,
    norm,
    x_ptr,
    eps,
    K: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NORM: gl.constexpr,
    WEIGHTED: gl.constexpr,
    ROUNDED: gl.constexpr,
    L: gl.constexpr,
):
    """The row as it is multiplied, step by step, and what sums are multiplied with: of floats 1 / rms, which is not
    waited for until then; else what the row has been divided by to be rounded.
    """
    squares = gl.zeros((BLOCK_K,), gl.float32, gl.SliceLayout(0, L))
    largest = squares
    weighted = ()
    for step in gl.static_range(len(loaded)):
        x = loaded[step].to(gl.float32)
        squares += x * x
        if WEIGHTED:
            x *= norm[step].to(gl.float32)
        largest = gl.maximum(largest, gl.abs(x))
        weighted += (x,)  # type: ignore[assignment]
    if not ROUNDED:
        scale = 1.0
        if NORM:
            scale = 1.0 / gl.sqrt(gl.sum(squares, 0) / K + eps)
        return weighted, scale
    total, most = gl.reduce((squares, largest), 0, _both)
    rms_inverse = 1.0
    if NORM:
        # A norm keeps the order of magnitudes, and so does its rounding.
        rms_inverse = 1.0 / gl.sqrt(total / K + eps)
        most = (most * rms_inverse).to(x_ptr.dtype.element_ty).to(gl.float32)
    scale, inverse = scale_of(most)
    xs = ()
    for step in gl.static_range(len(loaded)):
        xs += (_rounded(weighted[step], rms_inverse, inverse, x_ptr, NORM),)  # type: ignore[assignment]
    return xs, scale


@gluon.jit
def _row_stream(
    x_ptr,  # [K]
    weight_ptr,  # [N, K]; GATED: [2 N, K], gates then ups
    scales_ptr,  # f32[N], of ROUNDED; GATED: 2 N, as biases
    norm_ptr,  # [K]
    bias_ptr,  # [N]
    residual_ptr,  # [N]
    out_ptr,  # [N]
    eps,
    N,
    tiles,
    K: gl.constexpr,
    ROWS: gl.constexpr,  # of the weight, of a tile
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,  # steps that are on their way
    EARLY: gl.constexpr,  # of these: ahead of the row
    NORM: gl.constexpr,
    WEIGHTED: gl.constexpr,  # its weights are read
    ROUNDED: gl.constexpr,  # weights are 8-bit floats, and the row becomes such
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    SOONER: gl.constexpr,  # of those with RESIDUAL: the next kernel starts before this waits
    GATED: gl.constexpr,
    GELU: gl.constexpr,
    WARPS: gl.constexpr,
):
    VECTOR: gl.constexpr = 128 // weight_ptr.dtype.element_ty.primitive_bitwidth
    L: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [1, WARPS], [1, 0])
    # The layouts of sums within threads, and of a tile's outputs.
    SUMS: gl.constexpr = gl.SliceLayout(2, gl.BlockedLayout([1, 1, VECTOR], [1, 32, 1], [1, WARPS, 1], [2, 1, 0]))
    OUTPUTS: gl.constexpr = gl.SliceLayout(1, SUMS)
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    pointers = (scales_ptr, bias_ptr, residual_ptr)
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring = gl.allocate_shared_memory(weight_ptr.dtype.element_ty, [STAGES, ROWS, BLOCK_K], shared)
    first, programs = gl.program_id(0), gl.num_programs(0)
    # What no kernel before writes is asked for before they have ended.
    norm = _of_row(norm_ptr, K, BLOCK_K, L) if WEIGHTED else ()
    for stage in gl.static_range(EARLY):
        _ask(ring, stage, weight_ptr, first + programs * (stage // STEPS), N, stage % STEPS, K, GATED, L)
    if SOONER:
        # What goes on from a sum asks for nothing but weights before it waits: it need not find what is ahead of this.
        gdc_launch_dependents()
    gdc_wait()
    if not SOONER:
        gdc_launch_dependents()
    # The row stands in line after weights that have been asked for, and others after it.
    loaded = _of_row(x_ptr, K, BLOCK_K, L)
    scales, added = _of_outputs(pointers, first, N, ROWS, ROUNDED, BIAS, RESIDUAL, GATED, OUTPUTS)
    for stage in gl.static_range(EARLY, STAGES):
        _ask(ring, stage, weight_ptr, first + programs * (stage // STEPS), N, stage % STEPS, K, GATED, L)
    xs, scale = _as_multiplied(loaded, norm, x_ptr, eps, K, BLOCK_K, NORM, WEIGHTED, ROUNDED, L)
    stage = 0
    for tile in range(first, tiles, programs):
        # A tile ahead, as they would be waited for.
        next_scales, next_added = _of_outputs(
            pointers, tile + programs, N, ROWS, ROUNDED, BIAS, RESIDUAL, GATED, OUTPUTS
        )
        acc = gl.zeros((ROWS, BLOCK_K // VECTOR), gl.float32, SUMS)
        for step in gl.static_range(STEPS):
            async_copy.wait_group(STAGES - 1)
            w = ring.index(stage).load(L)
            ahead = tile + programs * ((step + STAGES) // STEPS)
            _ask(ring, stage, weight_ptr, ahead, N, (step + STAGES) % STEPS, K, GATED, L)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            products = w.to(gl.float32) * xs[step][None, :]
            acc += gl.sum(products.reshape([ROWS, BLOCK_K // VECTOR, VECTOR]), 2)
        y = gl.sum(acc, 1) * scale * scales + added
        if GATED:
            gate, up = y.reshape([ROWS // 2, 2]).split()
            y = gated(gate, up, GELU)
        output = tile * y.shape[0] + gl.arange(0, y.shape[0], y.type.layout)
        gl.store(out_ptr + output, y.to(out_ptr.dtype.element_ty), mask=output < N)
        scales, added = next_scales, next_added
    async_copy.wait_group(0)


@cache
def has_row_stream(device: torch.device) -> bool:
    """Return whether `stream_row` can multiply there: a Hopper."""
    is_there = device.type == "cuda" and not INTERPRETED
    return is_there and torch.cuda.get_device_capability(device) == _HOPPER


def stream_row(
    x: Tensor,
    weight: Tensor,
    tile: RowStreamTile,
    *,
    scales: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    is_folded: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> Tensor:
    """residual + f(norm(x) @ (weight * scales).T + bias) for one row.

    x [1, inputs], weight [outputs, inputs]; norm: weight [inputs], all ones if it is folded, and eps of an RMS norm;
    bias [outputs], residual [1, outputs] -> [1, outputs]. With scales f32[outputs, 1] the weight is of 8-bit floats,
    and the row is rounded to these after the norm. Gated: of the weight's rows the first half are gates, the second
    ups; f is silu(gate) * up, or with GELU by tanh, after the bias, and the result, to which nothing can be added, has
    half as many columns.
    """
    assert residual is None or not is_gated, "what is gated is not added to"
    inputs = x.shape[1]
    outputs = len(weight) // 2 if is_gated else len(weight)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    tiles = triton.cdiv(outputs, tile.outputs)
    _row_stream[(min(tiles, tile.programs * multiprocessors(x.device, 0)),)](
        x,
        weight,
        scales if scales is not None else x,
        norm_weight,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        eps,
        outputs,
        tiles,
        K=inputs,
        ROWS=tile.outputs * (2 if is_gated else 1),
        BLOCK_K=tile.inputs,
        STAGES=tile.stages,
        EARLY=tile.early,
        NORM=norm is not None,
        WEIGHTED=norm is not None and not is_folded,
        ROUNDED=scales is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        # Drawn from three measures on an H200: a layer of Qwen3-8B in 8-bit floats took 0.3 us less so for its downs
        # and up to 0.3 more for attention's output, one of Qwen3-30B-A3B 0.7 less for the latter.
        SOONER=residual is not None and inputs > outputs,
        GATED=is_gated,
        GELU=is_gelu,
        WARPS=tile.warps,
        **options(warps=tile.warps, dependent=True),
    )
    return out
