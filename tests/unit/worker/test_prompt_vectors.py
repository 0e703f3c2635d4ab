"""The rows of a batch that count for vectors of prompts, and the sums of their chunks."""

import numpy as np
import pytest

from contract.domain.errors import PenstockError
from contract.domain.params import Sampling
from contract.domain.plan import NO_TOKENS, Admission
from contract.domain.pooling import VECTOR_KINDS, Pooling
from worker_svc.core.batch import Batch
from worker_svc.core.prompt_vectors import SlotVectors, VectorRows
from worker_svc.core.slots import F32

LAST, MEAN, CLS = (Pooling(kind, normalize=False) for kind in VECTOR_KINDS)


def admission(slot: int, num_tokens: int, pooling: Pooling | None, computed: int = 0) -> Admission:
    return Admission(
        slot=slot,
        token_ids=np.arange(num_tokens, dtype=np.uint32),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=computed,
        block_ids=NO_TOKENS,
        sampling=Sampling(),
        seed=0,
        request_id=bytes([slot]) * 16,
        pooling=pooling,
    )


def batch(*chunks: tuple[int, int, int]) -> Batch:
    """Of (slot, start, tokens)."""
    slots, starts, lens = (np.array(column, np.int64) for column in zip(*chunks, strict=True))
    none = np.empty(0, np.int64)
    return Batch(slots, lens, np.concatenate(([0], np.cumsum(lens))), starts + lens, none, none)


def complete(rows: VectorRows | None, values: list[float]) -> dict[int, list[float]]:
    """By slot, where the batch's rows have these hidden states, and twice them."""
    assert rows is not None
    hidden: F32 = np.array([[value, 2 * value] for value in values], np.float32)
    sums = np.zeros((len(rows.shares), 2), np.float32)
    np.add.at(sums, rows.owners, hidden[rows.rows])
    return {request_id[0]: vector.tolist() for request_id, vector in rows.complete(sums).items()}


def test_chunks_of_every_kind_add_up_beside_each_other_and_beside_others() -> None:
    slots = SlotVectors()
    for slot, pooling in ((1, LAST), (2, MEAN), (3, CLS), (4, None)):
        slots.admit(admission(slot, 5, pooling))
    first = slots.take(batch((4, 0, 2), (1, 0, 3), (2, 0, 3), (3, 0, 3)))
    assert first is not None
    assert first.rows.tolist() == [5, 6, 7, 8]
    assert first.finished_slots.tolist() == []
    assert complete(first, [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]) == {}
    last = slots.take(batch((3, 3, 2), (2, 3, 2), (1, 3, 2)))
    assert last is not None
    assert last.finished_slots.tolist() == [3, 2, 1]
    assert complete(last, [1, 2, 10, 15, 30, 40]) == {3: [7, 14], 2: [8, 16], 1: [40, 80]}
    assert slots.take(batch((1, 5, 1))) is None


def test_a_prompt_of_which_a_part_is_found_computed_has_its_last_state_and_no_other() -> None:
    slots = SlotVectors()
    slots.admit(admission(1, 9, LAST, computed=8))
    assert complete(slots.take(batch((1, 8, 1))), [3]) == {1: [3, 6]}
    for pooling in (MEAN, CLS):
        with pytest.raises(PenstockError, match="a part is computed"):
            slots.admit(admission(1, 9, pooling, computed=8))


def test_dimensions_are_cut_before_the_length_is_one_and_a_vector_of_zeros_stays() -> None:
    slots = SlotVectors()
    slots.admit(admission(1, 1, Pooling()))
    slots.admit(admission(2, 1, Pooling(dimensions=1)))
    slots.admit(admission(3, 1, Pooling()))
    told = complete(slots.take(batch((1, 0, 1), (2, 0, 1), (3, 0, 1))), [3, 5, 0])
    assert told[1] == pytest.approx([5**-0.5, 2 * 5**-0.5])
    assert (told[2], told[3]) == ([1], [0, 0])


def test_what_leaves_its_slot_begins_anew() -> None:
    slots = SlotVectors()
    slots.admit(admission(1, 4, MEAN))
    complete(slots.take(batch((1, 0, 2))), [100, 100])
    slots.release(np.array([1], np.uint32))
    assert slots.take(batch((1, 2, 2))) is None
    slots.admit(admission(1, 4, MEAN))
    assert complete(slots.take(batch((1, 0, 4))), [1, 2, 3, 6]) == {1: [3, 6]}
    slots.admit(admission(1, 4, MEAN))
    slots.clear()
    assert slots.take(batch((1, 0, 4))) is None
