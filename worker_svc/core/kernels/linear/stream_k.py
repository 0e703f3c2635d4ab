"""What a program multiplies: whole tiles by turns, or an even share of all tiles' steps, which cuts tiles; in Gluon.

Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU", 2023.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tiles_of_program(tiles, share, STEPS: gl.constexpr, STREAM_K: gl.constexpr):
    """Of a program: its first tile, where its tiles end, and from one to the next. A share is of so many steps."""
    if STREAM_K:
        start = gl.program_id(0) * share
        end = gl.minimum(start + share, tiles * STEPS)
        return start // STEPS, (end + STEPS - 1) // STEPS, 1
    else:  # noqa: RET505  (the compiler would go on after the return)
        return gl.program_id(0), tiles, gl.num_programs(0)


@gluon.jit
def steps_of_tile(tile, tiles, share, STEPS: gl.constexpr, STREAM_K: gl.constexpr):
    """Of a tile: the first step that is a program's, and where these end."""
    if STREAM_K:
        start = gl.program_id(0) * share
        end = gl.minimum(start + share, tiles * STEPS)
        return gl.maximum(start - tile * STEPS, 0), gl.minimum(end - tile * STEPS, STEPS)
    else:  # noqa: RET505  (the compiler would go on after the return)
        return 0, STEPS


@gluon.jit
def steps_of_program(tiles, share, STEPS: gl.constexpr, STREAM_K: gl.constexpr):
    """The steps of all tiles that are a program's."""
    if STREAM_K:
        return gl.minimum(share, tiles * STEPS - gl.program_id(0) * share)
    else:  # noqa: RET505  (the compiler would go on after the return)
        return (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * STEPS


@gluon.jit
def place_of_step(count, share, STEPS: gl.constexpr, STREAM_K: gl.constexpr):
    """Of a program's steps, whose first is number 0: the tile, and which of its steps it is."""
    if STREAM_K:
        step = gl.program_id(0) * share + count
        return step // STEPS, step % STEPS
    else:  # noqa: RET505  (the compiler would go on after the return)
        return gl.program_id(0) + count // STEPS * gl.num_programs(0), count % STEPS
