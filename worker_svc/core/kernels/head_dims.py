"""Heads whose dimensions are no power of two, in tiles that are: memory has no padding, only tiles have. Where they are
one, what is written here is compiled away.
"""

import triton
import triton.language as tl

# Of a head, or of its half: as many as a tile of it has. For kernels and for who launches them.
tile_dims = triton.next_power_of_2


@triton.jit
def _inside(dims, D: tl.constexpr, mask):
    """The mask, None if there is none, of a tile's `dims` of which there are D."""
    if dims.numel != D:
        if mask is None:
            mask = dims < D
        else:
            mask &= dims < D
    return mask


@triton.jit
def load(cells, dims, D: tl.constexpr, mask=None, OF_OTHERS: tl.constexpr = False):
    """A tile of a head's `dims`, of which there are D: zeros behind these, and where a `mask` is false. What other
    programs wrote is not looked for in the first-level cache.
    """
    inside = _inside(dims, D, mask)
    if inside is None:
        tile = tl.load(cells, cache_modifier=".cg" if OF_OTHERS else "")
    else:
        tile = tl.load(cells, mask=inside, other=0.0, cache_modifier=".cg" if OF_OTHERS else "")
    return tile


@triton.jit
def store(cells, tile, dims, D: tl.constexpr, mask=None):
    """Write a tile of a head's `dims`, of which there are D, where `mask`, if there is one, says so."""
    tl.store(cells, tile, mask=_inside(dims, D, mask))


@triton.jit
def aligned(stride, D: tl.constexpr):
    """The stride of what holds heads of D alone, a multiple of 8: the compiler hears of strides only whether 16 divides
    them, and would read all others element by element.
    """
    if D % 16 != 0:
        stride = stride // 8 * 8
    return stride
