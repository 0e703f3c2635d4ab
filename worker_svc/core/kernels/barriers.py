"""Barriers in shared memory, of kernels in Gluon whose warps ask ahead for what others multiply."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many, each of which waits for so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(each), count=ARRIVALS)
    return barriers
