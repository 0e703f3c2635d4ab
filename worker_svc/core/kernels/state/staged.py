"""The two ends of a recorded step: it reads what the host wrote for it, and says that it has."""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import options
from worker_svc.core.kernels.state.tables import SlotTables

_BLOCK = 512


@triton.jit
def _receive(
    staged_ptr,  # i64[steps, size] of the host
    turn_ptr,  # i64[1]
    words_ptr,  # i64[n]
    num_steps,
    size,
    num_words,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_word = places < num_words
    staged = staged_ptr + tl.load(turn_ptr) % num_steps * size
    tl.store(words_ptr + places, tl.load(staged + places, mask=is_word), mask=is_word)


@triton.jit
def _enter(
    runs_ptr,  # i64[runs, 3]
    values_ptr,  # i32[values]
    cells_ptr,  # i32[cells]
    BLOCK: tl.constexpr,
):
    run = runs_ptr + tl.program_id(0) * 3
    cells = cells_ptr + tl.load(run)
    values = values_ptr + tl.load(run + 1)
    length = tl.load(run + 2)
    for first in range(0, length, BLOCK):
        places = first + tl.arange(0, BLOCK)
        tl.store(cells + places, tl.load(values + places, mask=places < length), mask=places < length)


@triton.jit
def _conclude(
    slots_ptr,  # i64[rows]
    contexts_ptr,  # i64[rows]
    num_computed_ptr,  # i64[slots]
    turn_ptr,  # i64[1]
    num_done_ptr,  # i64[1] of the host
    num_rows,
    dummy_slot,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=is_row, other=dummy_slot)
    tl.store(num_computed_ptr + slots, tl.load(contexts_ptr + rows, mask=is_row), mask=slots != dummy_slot)
    if tl.program_id(0) == 0:
        turn = tl.load(turn_ptr) + 1
        tl.store(turn_ptr, turn)
        tl.store(num_done_ptr, turn)


def receive(staged: Tensor, turn: Tensor, words: Tensor) -> None:
    """The first words i64[n] of the row of `staged` i64[steps, size], which the host wrote, whose turn i64[1] it is."""
    _receive[(triton.cdiv(len(words), _BLOCK),)](
        staged,
        turn,
        words,
        len(staged),
        staged.shape[1],
        len(words),
        BLOCK=_BLOCK,
        **options(warps=4),
    )


def enter(runs: Tensor, values: Tensor, state: SlotTables) -> None:
    """Write the values i32[n] into the tables' memory: each of the runs i64[most, 3] says in which cell it starts,
    where in `values` what enters begins, and how many follow.
    """
    _enter[(len(runs),)](runs, values, state.cells, BLOCK=_BLOCK, **options(warps=4))


def conclude(turn: Tensor, num_done: Tensor, slots: Tensor, contexts: Tensor, state: SlotTables) -> None:
    """The first `contexts` i64[rows] tokens of `slots` i64[rows] are computed, but for the dummy slot, and the step's
    row has been read: it is the next one's turn i64[1], as the host sees in `num_done` i64[1].
    """
    _conclude[(triton.cdiv(len(slots), _BLOCK),)](
        slots,
        contexts,
        state.num_computed,
        turn,
        num_done,
        len(slots),
        state.dummy_slot,
        BLOCK=_BLOCK,
        **options(warps=4),
    )
