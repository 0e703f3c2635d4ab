"""The tables that hold the state of sequences on the device, as kernels read them."""

from typing import Protocol

from torch import Tensor

from contract.domain.parameter import Column, Part
from contract.domain.params import PARTS

# Columns of `SlotTables.floats` and, before two of the sequence itself, of `SlotTables.integers`.
FLOATS, INTEGERS = (
    tuple(each.field for each in PARTS[Part.SAMPLING] if each.column is column)
    for column in (Column.FLOATS, Column.INTEGERS)
)
TEMPERATURE, TOP_P, MIN_P = map(FLOATS.index, ("temperature", "top_p", "min_p"))
REPETITION, PRESENCE, FREQUENCY = (FLOATS.index(f"{each}_penalty") for each in ("repetition", "presence", "frequency"))
TOP_K, SEED, NUM_PROMPT = INTEGERS.index("top_k"), len(INTEGERS), len(INTEGERS) + 1
NUM_FLOATS, NUM_INTEGERS = len(FLOATS), len(INTEGERS) + 2


class SlotTables(Protocol):
    """Of sequences, each in a slot; that of `dummy_slot`, which pads batches, stays as it is."""

    tokens: Tensor  # i32[slots, tokens]: every token that is known so far
    num_computed: Tensor  # i64[slots]: tokens whose KV is written once what is launched is done
    block_tables: tuple[Tensor, ...]  # i32[slots, blocks] of each kind of layers, one after the other in `cells`
    floats: Tensor  # f32[slots, NUM_FLOATS]
    integers: Tensor  # i64[slots, NUM_INTEGERS]
    cells: Tensor  # i32: the memory of all of these
    dummy_slot: int
