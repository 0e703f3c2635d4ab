"""Heads whose dimensions are no power of two, in tiles that are: memory has no padding, only tiles have. Where they are
one, what is written here is compiled away.
"""

import triton
import triton.language as tl

# Of a head, or of its half: as many as a tile of it has. For kernels and for who launches them.
tile_dims = triton.next_power_of_2


@triton.jit
def load(pointers, dims, D: tl.constexpr, mask=None, OF_OTHERS: tl.constexpr = False):
    """A tile of a head's `dims`, of which there are D: zeros after these, and where a `mask` is false. What other
    programs wrote is not looked for in the first-level cache.
    """
    CACHE: tl.constexpr = ".cg" if OF_OTHERS else ""
    if dims.numel != D:
        inside = (dims < D) if mask is None else (mask & (dims < D))
        tile = tl.load(pointers, mask=inside, other=0.0, cache_modifier=CACHE)
    elif mask is None:
        tile = tl.load(pointers, cache_modifier=CACHE)
    else:
        tile = tl.load(pointers, mask=mask, other=0.0, cache_modifier=CACHE)
    return tile


@triton.jit
def store(pointers, tile, dims, D: tl.constexpr, mask=None):
    """Write a tile of a head's `dims`, of which there are D, where `mask`, if there is one, says so."""
    if dims.numel != D:
        inside = (dims < D) if mask is None else (mask & (dims < D))
        tl.store(pointers, tile, mask=inside)
    else:
        tl.store(pointers, tile, mask=mask)


@triton.jit
def kept(x, pointers, scale):
    """x as it is kept where `pointers` lead: of 8-bit floats x / scale, of which the largest stands for all beyond."""
    if pointers.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32) / scale, -448.0, 448.0)
    return x.to(pointers.dtype.element_ty)


@triton.jit
def widened(sums, pointers, scale):
    """Sums of numbers that were read where `pointers` lead, as they are meant: see `kept`."""
    if pointers.dtype.element_ty == tl.float8e4nv:
        sums *= scale
    return sums


@triton.jit
def aligned(stride, D: tl.constexpr):
    """The stride of what holds heads of D alone, a multiple of 8: the compiler hears of strides only whether 16 divides
    them, and would read all others element by element.
    """
    if D % 16 != 0:
        stride = stride // 8 * 8
    return stride
