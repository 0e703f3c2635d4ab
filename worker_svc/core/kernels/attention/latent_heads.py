"""Heads of latent attention: queries brought to the latent, with the new key beside them; and values out of what they
attended to. For the order of a head's dimensions see `latent_tiles`. Rows whose contexts are brought to heads instead
(see `latent_expanded`) stand last, and have their keys made alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.attention.latent_shape import LatentShape
from worker_svc.core.kernels.attention.latent_tiles import padded
from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

_FEWEST_ROWS, _MOST_ROWS, _LARGE_ROWS = 16, 64, 128  # of a program; the last where there are many
_MANY_ROWS = 1024
_LATENT_DIMS = 128  # of a half that a program brings queries to
_FEW_VALUES, _MOST_VALUES = 32, 128  # of a program: of fewer rows values are split over more programs
_STEP, _STAGES = 128, 3  # latent dimensions of a step of a program that makes values


@triton.jit(do_not_specialize=["num_rows", "query_stride", "down_stride"])
def _make_heads(
    queries_ptr,  # [num_rows, H (PLAIN + ROTATED)]
    down_ptr,  # [num_rows, RANK + ROTATED]: the latent, not yet normalised, and the key's rotated dimensions
    norm_ptr,  # [RANK]
    up_ptr,  # [H, PLAIN + VALUES, RANK]
    heads_ptr,  # [num_rows, (H + 1) (RANK + ROTATED)]
    num_absorbed_ptr,  # i64[1]: rows whose queries are wanted; these are the first
    eps,
    num_rows,
    query_stride,
    down_stride,
    H: tl.constexpr,
    PLAIN: tl.constexpr,
    VALUES: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    PAIRED: tl.constexpr,
    ALL: tl.constexpr,  # rows' queries are wanted
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program for some latent dimensions of a half of a head; the first of a half has its rotated ones, too."""
    PAIRS: tl.constexpr = ROTATED // 2
    LATENT: tl.constexpr = RANK // 2
    PARTS: tl.constexpr = (LATENT + BLOCK_N - 1) // BLOCK_N
    head = tl.program_id(0)
    half, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    rows = tl.program_id(2).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    is_row = rows < num_rows
    num_wanted = num_rows if ALL else tl.load(num_absorbed_ptr)
    is_wanted = (head == H) | (tl.program_id(2) * BLOCK_M < num_wanted)
    dims = part * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    is_dim = dims < LATENT
    plain = tl.arange(0, padded(PLAIN))
    is_plain = plain < PLAIN
    weights = up_ptr + head * ((PLAIN + VALUES) * RANK) + plain[:, None] * RANK + half * LATENT + dims
    weight = tl.load(weights, mask=is_plain[:, None] & is_dim & (head < H) & is_wanted, other=0.0)
    outs = heads_ptr + rows * ((H + 1) * (RANK + ROTATED)) + head * (RANK + ROTATED) + half * (PAIRS + LATENT)
    wait(DEPENDENT)
    release(DEPENDENT)
    if not is_wanted:
        return
    if head < H:
        query = queries_ptr + rows * query_stride + head * (PLAIN + ROTATED)
        turned = query + PLAIN
        latent = tl.dot(tl.load(query + plain[None, :], mask=is_row & is_plain[None, :], other=0.0), weight)
    else:
        down = down_ptr + rows * down_stride
        turned = down + RANK
        squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.static_range(0, RANK, BLOCK_N):
            of_row = start + tl.arange(0, BLOCK_N)[None, :]
            x = tl.load(down + of_row, mask=is_row & (of_row < RANK), other=0.0).to(tl.float32)
            squares += x * x
        scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / RANK + eps)
        norm = tl.load(norm_ptr + half * LATENT + dims, mask=is_dim, other=0.0).to(tl.float32)
        latent = tl.load(down + half * LATENT + dims, mask=is_row & is_dim, other=0.0).to(tl.float32)
        latent = latent * scale[:, None] * norm
    tl.store(outs + PAIRS + dims, latent.to(heads_ptr.dtype.element_ty), mask=is_row & is_dim)
    if part == 0:
        pair = tl.arange(0, triton.next_power_of_2(PAIRS))[None, :]
        place = 2 * pair + half if PAIRED else half * PAIRS + pair
        is_pair = is_row & (pair < PAIRS)
        tl.store(outs + pair, tl.load(turned + place, mask=is_pair, other=0.0), mask=is_pair)


@triton.jit(do_not_specialize=["num_rows"])
def _make_values(
    attended_ptr,  # [num_rows, H (RANK + ROTATED)]
    up_ptr,  # [H, PLAIN + VALUES, RANK]
    out_ptr,  # [num_rows, H VALUES]
    num_absorbed_ptr,  # i64[1]: rows that are wanted; these are the first
    num_rows,
    H: tl.constexpr,
    PLAIN: tl.constexpr,
    VALUES: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    ALL: tl.constexpr,  # rows are wanted
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program for some values of a head."""
    PAIRS: tl.constexpr = ROTATED // 2
    LATENT: tl.constexpr = RANK // 2
    STEPS: tl.constexpr = (LATENT + BLOCK_K - 1) // BLOCK_K  # of a half
    head = tl.program_id(0)
    values = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    rows = tl.program_id(2).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    num_wanted = num_rows if ALL else tl.minimum(tl.load(num_absorbed_ptr), num_rows)
    is_row, is_value = rows < num_wanted, values < VALUES
    attended = attended_ptr + rows * (H * (RANK + ROTATED)) + head * (RANK + ROTATED)
    weights = up_ptr + (head * (PLAIN + VALUES) + PLAIN + values) * RANK
    wait(DEPENDENT)
    release(DEPENDENT)
    if tl.program_id(2) * BLOCK_M >= num_wanted:
        return
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, 2 * STEPS, num_stages=STAGES):
        half = step // STEPS
        dims = step % STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
        is_dim = dims < LATENT
        places = half * (PAIRS + LATENT) + PAIRS + dims
        x = tl.load(attended + places[None, :], mask=is_row & is_dim[None, :], other=0.0)
        weight = tl.load(weights + (half * LATENT + dims)[:, None], mask=is_dim[:, None] & is_value, other=0.0)
        acc = tl.dot(x, weight, acc)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * (H * VALUES) + head * VALUES + values, out, mask=is_row & is_value)


def make_heads(
    queries: Tensor,
    down: Tensor,
    norm: tuple[Tensor, float],
    up: Tensor,
    shape: LatentShape,
    num_absorbed: Tensor | None = None,
) -> Tensor:
    """The query heads and the key of each row, as `LatentKernels` reads them, [rows, (num_heads + 1) * (rank +
    rotated)]; of rows from `num_absorbed` i64[1] on, if it is given, query heads may be anything.

    queries [rows, num_heads * (plain + rotated)] and down [rows, rank + rotated], the latent and the key's rotated
    dimensions, of any strides but the last; norm: weight [rank] and eps of the latent's; up [num_heads, plain + values,
    rank].
    """
    count, num_heads = len(queries), len(up)
    heads = queries.new_empty(count, (num_heads + 1) * (shape.rank + shape.rotated))
    dims = min(_LATENT_DIMS, padded(shape.rank // 2))
    rows, dependent = _rows(count), has_dependent_launch(queries.device)
    parts = 2 * triton.cdiv(shape.rank // 2, dims)
    _make_heads[(num_heads + 1, parts, triton.cdiv(count, rows))](
        queries,
        down,
        norm[0],
        up,
        heads,
        num_absorbed if num_absorbed is not None else queries,
        norm[1],
        count,
        queries.stride(0),
        down.stride(0),
        H=num_heads,
        PLAIN=shape.plain,
        VALUES=shape.values,
        RANK=shape.rank,
        ROTATED=shape.rotated,
        PAIRED=shape.is_paired,
        ALL=num_absorbed is None,
        BLOCK_M=rows,
        BLOCK_N=dims,
        DEPENDENT=dependent,
        **options(warps=_warps(rows), dependent=dependent),
    )
    return heads


def make_values(
    attended: Tensor, up: Tensor, shape: LatentShape, out: Tensor, num_absorbed: Tensor | None = None
) -> None:
    """The values of what heads attended to: attended [rows, num_heads * (rank + rotated)], contiguous, of which
    rotated dimensions are not read, into `out` [rows, num_heads * values], of which rows from `num_absorbed` i64[1] on,
    if it is given, stay as they are.
    """
    count, num_heads = len(attended), len(up)
    rows, dependent = _rows(count), has_dependent_launch(attended.device)
    values = min(_FEW_VALUES if rows < _LARGE_ROWS else _MOST_VALUES, padded(shape.values))
    _make_values[(num_heads, triton.cdiv(shape.values, values), triton.cdiv(count, rows))](
        attended,
        up,
        out,
        num_absorbed if num_absorbed is not None else attended,
        count,
        H=num_heads,
        PLAIN=shape.plain,
        VALUES=shape.values,
        RANK=shape.rank,
        ROTATED=shape.rotated,
        ALL=num_absorbed is None,
        BLOCK_M=rows,
        BLOCK_N=values,
        BLOCK_K=min(_STEP, padded(shape.rank // 2)),
        STAGES=_STAGES,
        DEPENDENT=dependent,
        **options(warps=_warps(rows), dependent=dependent),
    )


def _rows(count: int) -> int:
    if count >= _MANY_ROWS:
        return _LARGE_ROWS
    return min(max(_FEWEST_ROWS, int(triton.next_power_of_2(count))), _MOST_ROWS)


def _warps(rows: int) -> int:
    return 8 if rows == _LARGE_ROWS else 4
