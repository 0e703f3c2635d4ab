"""The loads of a batch's product: one warp asks for tiles ahead of those that multiply them; in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker_svc.core.kernels.linear.stream_k import place_of_step, steps_of_program

# Rows that are asked for at once. Those beyond the last one, which come as zeros, take long: a product of 32 rows with
# 6144 x 4096 took an H200 22 us where all 64 of a tile were asked for, and 15 without the others.
PIECE = gl.constexpr(16)


@gluon.jit
def span(item, STEPS: gl.constexpr, SPLITS: gl.constexpr):
    """The first step through an item's inputs, and the one after its last."""
    split = item % SPLITS
    return split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS


@gluon.jit
def _num_steps(items, share, STEPS: gl.constexpr, SPLITS: gl.constexpr, STREAM_K: gl.constexpr):
    """The number of a program's steps."""
    if SPLITS > 1:
        first, end = span(gl.program_id(0), STEPS, SPLITS)
        return end - first
    else:  # noqa: RET505  (the compiler would go on after the return)
        return steps_of_program(items, share, STEPS, STREAM_K)


@gluon.jit
def _place(count, share, STEPS: gl.constexpr, SPLITS: gl.constexpr, STREAM_K: gl.constexpr):
    """The tile of a program's step, and which step through its inputs it is: tiles begin at different ones, so that not
    all programs want the same rows' inputs at once. Most shares do by themselves. A program has one split at most
    (`BatchTile.fits`).
    """
    if SPLITS > 1:
        item = gl.program_id(0)
        first, end = span(item, STEPS, SPLITS)
        tile = item // SPLITS
        return tile, first + (count + tile * 5) % (end - first)
    else:  # noqa: RET505  (the compiler would go on after the return)
        tile, step = place_of_step(count, share, STEPS, STREAM_K)
        if STREAM_K:
            return tile, step
        else:  # noqa: RET505
            return tile, (step + tile * 5) % STEPS


@gluon.jit
def _ask_for_weight(weight, wide, narrow, barrier, tile, k, N, GATED: gl.constexpr, NARROW: gl.constexpr):
    wide_weight, narrow_weight = weight
    if GATED:
        # Gates, then ups of the same outputs.
        WIDE: gl.constexpr = wide.shape[0] // 2
        REST: gl.constexpr = NARROW // 2
        first = tile * (WIDE + REST)
        tma.async_copy_global_to_shared(wide_weight, [first, k], barrier, wide.slice(0, WIDE))
        tma.async_copy_global_to_shared(wide_weight, [N + first, k], barrier, wide.slice(WIDE, WIDE))
        if NARROW > 0:
            tma.async_copy_global_to_shared(narrow_weight, [first + WIDE, k], barrier, narrow.slice(0, REST))
            tma.async_copy_global_to_shared(narrow_weight, [N + first + WIDE, k], barrier, narrow.slice(REST, REST))
    else:
        first = tile * (wide.shape[0] + NARROW)
        tma.async_copy_global_to_shared(wide_weight, [first, k], barrier, wide)
        if NARROW > 0:
            tma.async_copy_global_to_shared(narrow_weight, [first + wide.shape[0], k], barrier, narrow)


@gluon.jit
def _expect(barrier, wide, rows, M, NARROW: gl.constexpr):
    """Let a barrier wait for a stage's weights, and for as many pieces of rows as there are."""
    ROW_BYTES: gl.constexpr = wide.shape[1] * wide.dtype.primitive_bitwidth // 8
    PIECES: gl.constexpr = rows.shape[0] // PIECE
    for piece in gl.static_range(PIECES):
        is_last = (piece * PIECE < M) & ((piece + 1) * PIECE >= M)
        mbarrier.expect(barrier, (wide.shape[0] + NARROW + (piece + 1) * PIECE) * ROW_BYTES, pred=is_last)


@gluon.jit
def ask(
    weight,
    x,
    tiles,
    barriers,
    M,
    N,
    items,
    share,
    STEPS: gl.constexpr,
    SPLITS: gl.constexpr,
    STREAM_K: gl.constexpr,
    GATED: gl.constexpr,
    NARROW: gl.constexpr,
):
    """The work of one warp."""
    wide, narrow, rows = tiles
    ready, free = barriers
    STAGES: gl.constexpr = wide.shape[0]
    DEPTH: gl.constexpr = wide.shape[2]
    PIECES: gl.constexpr = rows.shape[1] // PIECE
    total = _num_steps(items, share, STEPS, SPLITS, STREAM_K)
    early = gl.minimum(total, STAGES)
    for stage in range(early):
        tile, step = _place(stage, share, STEPS, SPLITS, STREAM_K)
        barrier, k = ready.index(stage), step * DEPTH
        _expect(barrier, wide.index(stage), rows.index(stage), M, NARROW)
        _ask_for_weight(weight, wide.index(stage), narrow.index(stage), barrier, tile, k, N, GATED, NARROW)
    gdc_wait()
    gdc_launch_dependents()
    for count in range(total):
        stage = count % STAGES
        tile, step = _place(count, share, STEPS, SPLITS, STREAM_K)
        barrier, k = ready.index(stage), step * DEPTH
        if count >= early:
            mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
            _expect(barrier, wide.index(stage), rows.index(stage), M, NARROW)
            _ask_for_weight(weight, wide.index(stage), narrow.index(stage), barrier, tile, k, N, GATED, NARROW)
        for piece in gl.static_range(PIECES):
            asked = rows.index(stage).slice(piece * PIECE, PIECE)
            tma.async_copy_global_to_shared(x, [piece * PIECE, k], barrier, asked, pred=piece * PIECE < M)
