"""The ends of what `stream_shares` attended to: a whole context, or a part of one that is added up; in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import debug_barrier


@gluon.jit
def end_context(
    outs,
    row,
    place,
    is_whole,
    most,
    sums,
    acc,
    H: gl.constexpr,
    G: gl.constexpr,
):
    """Writes what was attended [kv heads, D, queries] of a whole context, or keeps it as a part."""
    out_ptr, partial_ptr, weight_ptr, _ = outs
    LAYOUT: gl.constexpr = acc.type.layout
    HK: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    kv_head = gl.arange(0, HK, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    dims = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    group = gl.arange(0, acc.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    offsets = (kv_head * G + group) * D + dims
    is_inside = (group < G) & (kv_head >= 0) & (dims >= 0)
    attended = acc / gl.expand_dims(sums, 1)
    if is_whole:
        gl.store(out_ptr + row * (H * D) + offsets, attended.to(out_ptr.dtype.element_ty), mask=is_inside)
    else:
        gl.store(partial_ptr + place * (H * D) + offsets, attended, mask=is_inside)
        FLAT: gl.constexpr = sums.type.layout
        heads = gl.arange(0, HK, gl.SliceLayout(1, FLAT))[:, None]
        queries = gl.arange(0, acc.shape[2], gl.SliceLayout(0, FLAT))[None, :]
        weights = weight_ptr + place * H + heads * G + queries
        gl.store(weights, most + gl.log2(sums), mask=(queries < G) & (heads >= 0))


@gluon.jit
def _part(outs, place, is_part, H: gl.constexpr, D: gl.constexpr, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """A part's attended heads [HEADS, D] and their weights [HEADS]; of none, weights of zero."""
    _, partial_ptr, weight_ptr, _ = outs
    head = gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
    is_head = is_part & (head < H)
    # Rows after H would be -inf - -inf, which is NaN; they are never stored.
    weight = gl.load(weight_ptr + place * H + head, mask=is_head, other=0.0, cache_modifier=".cg")
    pointers = partial_ptr + (place * H + head[:, None]) * D + dims
    partial = gl.load(pointers, mask=is_head[:, None] & (dims >= 0), other=0.0, cache_modifier=".cg")
    return gl.where(is_part & (head >= 0), weight, float("-inf")), partial


@gluon.jit
def add_up(
    outs,
    sequence,
    row,
    first_place,
    first_share,
    last_share,
    H: gl.constexpr,
    D: gl.constexpr,
    HEADS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Of a context that others have parts of, too, the program that ends last adds these up: one at `first_place` of
    the first share, then the first of each share; two at a time.
    """
    out_ptr, _, _, done_ptr = outs
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [WARPS, 1], [1, 0])
    debug_barrier()
    ended = gl.atomic_add(done_ptr + sequence, 1, sem="acq_rel")
    if ended == last_share - first_share:
        top, attended = _part(outs, first_place, first_place >= 0, H, D, HEADS, LAYOUT)
        mass = gl.full([HEADS], 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))
        for share in range(first_share + 1, last_share + 1, 2):
            weight_1, part_1 = _part(outs, share * 2, share >= 0, H, D, HEADS, LAYOUT)
            weight_2, part_2 = _part(outs, share * 2 + 2, share < last_share, H, D, HEADS, LAYOUT)
            higher = gl.maximum(top, gl.maximum(weight_1, weight_2))
            kept, p_1, p_2 = gl.exp2(top - higher), gl.exp2(weight_1 - higher), gl.exp2(weight_2 - higher)
            attended = attended * kept[:, None] + part_1 * p_1[:, None] + part_2 * p_2[:, None]
            mass = mass * kept + p_1 + p_2
            top = higher
        head = gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))[:, None]
        dims = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
        pointers = out_ptr + row * (H * D) + head * D + dims
        gl.store(pointers, (attended / mass[:, None]).to(out_ptr.dtype.element_ty), mask=(head < H) & (dims >= 0))
        gl.store(done_ptr + sequence, 0)
