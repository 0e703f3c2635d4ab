"""The end of a tile of a batch's product: normed, gated, added to the residual or to its other parts; in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import debug_barrier


@gluon.jit
def _normed(y, squares, eps, INPUTS: gl.constexpr):
    scale = 1.0 / gl.sqrt(squares / INPUTS + eps)
    return y * gl.convert_layout(scale, gl.SliceLayout(1, y.type.layout))[:, None]


@gluon.jit
def _scaled(y, pointers, first_row, first_output, sizes, HALVES: gl.constexpr):
    """y with its rows' scales and its outputs'; of 2 halves the first are gates, and the second the ups of the same
    outputs.
    """
    _, _, _, _, row_scales_ptr, scales_ptr = pointers
    M, N, _, _ = sizes
    LAYOUT: gl.constexpr = y.type.layout
    rows = first_row + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))
    OUTPUTS: gl.constexpr = y.shape[1] // HALVES
    outputs = first_output + columns % OUTPUTS + columns // OUTPUTS * N
    y *= gl.load(row_scales_ptr + rows, mask=rows < M, other=0.0)[:, None]
    return y * gl.load(scales_ptr + outputs)[None, :]


@gluon.jit
def _gated(y):
    ROWS: gl.constexpr = y.shape[0]
    OUTPUTS: gl.constexpr = y.shape[1] // 2
    gate, up = y.reshape([ROWS, 2, OUTPUTS]).permute(0, 2, 1).split()
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _offsets(like, first_row, first_output, M, STRIDE):
    """The offsets of a tile's values, from its first row and output on, and which of its rows there are."""
    LAYOUT: gl.constexpr = like.type.layout
    rows = first_row + gl.arange(0, like.shape[0], gl.SliceLayout(1, LAYOUT))
    outputs = first_output + gl.arange(0, like.shape[1], gl.SliceLayout(0, LAYOUT))
    return rows[:, None] * STRIDE + outputs[None, :], (rows < M)[:, None] & (outputs >= 0)[None, :]


@gluon.jit
def _write(y, out_ptr, residual_ptr, first_row, first_output, sizes, RESIDUAL: gl.constexpr):
    M, N, _, residual_stride = sizes
    offsets, is_inside = _offsets(y, first_row, first_output, M, N)
    if RESIDUAL:
        added, _ = _offsets(y, first_row, first_output, M, residual_stride)
        y += gl.load(residual_ptr + added, mask=is_inside, other=0.0).to(gl.float32)
    gl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=is_inside)


@gluon.jit
def _keep(y, part_ptr, M):
    offsets, is_inside = _offsets(y, 0, 0, M, y.shape[1])
    gl.store(part_ptr + offsets, y, mask=is_inside)


@gluon.jit
def _total(
    parts_ptr,
    first_row,
    M,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    SPLITS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Some rows of all splits' parts, added up in their order: [ROWS, OUTPUTS]."""
    LANES: gl.constexpr = 32 if OUTPUTS >= 128 else OUTPUTS // 4
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    total = gl.zeros([ROWS, OUTPUTS], gl.float32, LAYOUT)
    offsets, is_inside = _offsets(total, first_row, 0, M, OUTPUTS)
    for part in gl.static_range(SPLITS):
        total += gl.load(parts_ptr + part * SIZE + offsets, mask=is_inside, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def _meet(ended_ptr, split, SPLITS: gl.constexpr):
    """Wait until all splits of a tile have come here: together they add 2 to the power of 31, which turns the counter's
    sign when the last one comes, and leaves it as it was for the next launch, of any number of splits.
    """
    debug_barrier()
    OF_FIRST: gl.constexpr = 2**31 - (SPLITS - 1)
    added = (split == 0).to(gl.int32) * (OF_FIRST - 1) + 1
    before = gl.atomic_add(ended_ptr, added, sem="acq_rel")
    # All programs run at once, so whoever is waited for comes.
    while (gl.atomic_add(ended_ptr, 0, sem="acquire") ^ before) >= 0:
        pass


@gluon.jit
def end_whole(
    y,
    z,
    squares,
    pointers,
    eps,
    sizes,
    tile,
    INPUTS: gl.constexpr,
    GATED: gl.constexpr,
    RESIDUAL: gl.constexpr,
    NORMED: gl.constexpr,
    SCALED: gl.constexpr,
    NARROW: gl.constexpr,
):
    """Writes a tile, wide part and narrow part."""
    out_ptr, residual_ptr, _, _, _, _ = pointers
    HALVES: gl.constexpr = 2 if GATED else 1
    WIDE: gl.constexpr = y.shape[1] // HALVES
    REST: gl.constexpr = NARROW // HALVES
    output = tile * (WIDE + REST)
    if NORMED:
        y = _normed(y, squares, eps, INPUTS)
    if SCALED:
        y = _scaled(y, pointers, 0, output, sizes, HALVES)
    if GATED:
        y = _gated(y)
    _write(y, out_ptr, residual_ptr, 0, output, sizes, RESIDUAL)
    if NARROW > 0:
        if NORMED:
            z = _normed(z, squares, eps, INPUTS)
        if SCALED:
            z = _scaled(z, pointers, 0, output + WIDE, sizes, HALVES)
        if GATED:
            z = _gated(z)
        _write(z, out_ptr, residual_ptr, 0, output + WIDE, sizes, RESIDUAL)


@gluon.jit
def _end_share(
    parts,
    pointers,
    row,
    sizes,
    output,
    ROWS: gl.constexpr,
    SHARE: gl.constexpr,
    WIDE: gl.constexpr,
    SPLITS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    SCALED: gl.constexpr,
    NARROW: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Adds up SHARE rows of a tile's parts, from `row` on, and writes them."""
    out_ptr, residual_ptr, _, _, _, _ = pointers
    M, _, _, _ = sizes
    SIZE: gl.constexpr = ROWS * (WIDE + NARROW)
    total = _total(parts, row, M, SHARE, WIDE, SIZE, SPLITS, WARPS)
    if SCALED:
        total = _scaled(total, pointers, row, output, sizes, 1)
    _write(total, out_ptr, residual_ptr, row, output, sizes, RESIDUAL)
    if NARROW > 0:
        total = _total(parts + ROWS * WIDE, row, M, SHARE, NARROW, SIZE, SPLITS, WARPS)
        if SCALED:
            total = _scaled(total, pointers, row, output + WIDE, sizes, 1)
        _write(total, out_ptr, residual_ptr, row, output + WIDE, sizes, RESIDUAL)


@gluon.jit
def end_split(
    y,
    z,
    pointers,
    sizes,
    tile,
    split,
    SPLITS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    SCALED: gl.constexpr,
    NARROW: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Waits for the tile's other splits; then each adds up some rows."""
    _, _, parts_ptr, ended_ptr, _, _ = pointers
    M, _, _, _ = sizes
    ROWS: gl.constexpr = y.shape[0]
    WIDE: gl.constexpr = y.shape[1]
    SIZE: gl.constexpr = ROWS * (WIDE + NARROW)
    # Rows are shared out in a power of two of shares, of which some splits have two.
    SHARES: gl.constexpr = 2 if SPLITS <= 2 else 4 if SPLITS <= 4 else 8
    SHARE: gl.constexpr = ROWS // SHARES
    output = tile * (WIDE + NARROW)
    parts = parts_ptr + tile * SPLITS * SIZE
    _keep(y, parts + split * SIZE, M)
    if NARROW > 0:
        _keep(z, parts + split * SIZE + ROWS * WIDE, M)
    _meet(ended_ptr + tile, split, SPLITS)
    row = split * SHARE
    _end_share(parts, pointers, row, sizes, output, ROWS, SHARE, WIDE, SPLITS, RESIDUAL, SCALED, NARROW, WARPS)
    if SHARES > SPLITS:
        row += SPLITS * SHARE
        if row < ROWS:
            _end_share(parts, pointers, row, sizes, output, ROWS, SHARE, WIDE, SPLITS, RESIDUAL, SCALED, NARROW, WARPS)


@gluon.jit
def keep_part(y, squares, pointers, sizes):
    """Writes a program's part of its first tile, whose first steps are another's, and raises its flag."""
    _, _, parts_ptr, ended_ptr, _, _ = pointers
    M, _, _, _ = sizes
    ROWS: gl.constexpr = y.shape[0]
    WIDE: gl.constexpr = y.shape[1]
    part = parts_ptr + gl.program_id(0) * ROWS * (WIDE + 1)
    _keep(y, part, M)
    gl.store(part + ROWS * WIDE + gl.arange(0, ROWS, squares.type.layout), squares)
    debug_barrier()
    gl.atomic_xchg(ended_ptr + gl.program_id(0), 1, sem="release")


@gluon.jit
def add_parts(y, squares, pointers, sizes, last):
    """y and the sums of squares with those of the programs after this one up to `last`, which have the tile's other
    steps: it is the first tile of each of them, in which none waits. Their flags are 0 again, for the next launch.
    """
    _, _, parts_ptr, ended_ptr, _, _ = pointers
    M, _, _, _ = sizes
    ROWS: gl.constexpr = y.shape[0]
    WIDE: gl.constexpr = y.shape[1]
    offsets, is_inside = _offsets(y, 0, 0, M, WIDE)
    for program in range(gl.program_id(0) + 1, last + 1):
        # All programs run at once, so whoever is waited for comes.
        while gl.atomic_add(ended_ptr + program, 0, sem="acquire") == 0:
            pass
        part = parts_ptr + program * ROWS * (WIDE + 1)
        y += gl.load(part + offsets, mask=is_inside, other=0.0, cache_modifier=".cg")
        rows = gl.arange(0, ROWS, squares.type.layout)
        squares += gl.load(part + ROWS * WIDE + rows, cache_modifier=".cg")
        gl.store(ended_ptr + program, 0)
    return y, squares
