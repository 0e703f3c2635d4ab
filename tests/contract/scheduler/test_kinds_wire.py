"""The kinds of a worker's layers, and blocks of each, between worker and scheduler."""

from dataclasses import replace

import numpy as np
import pytest

from contract.domain.errors import PoisonMessageError
from contract.domain.kv_kinds import KVKind, Reach
from contract.domain.params import Sampling
from contract.domain.plan import U32, Admission, StepPlan
from contract.v1 import steps_pb2
from scheduler_svc.wire import decode_worker_info, encode_plan
from worker_svc.core.interface import Limits
from worker_svc.wire import decode_plan, worker_info

SESSION, INCARNATION = b"s" * 16, b"i" * 16


def column(values: list[int]) -> U32:
    return np.array(values, np.uint32)


def test_a_worker_tells_the_kinds_of_its_layers() -> None:
    kinds = KVKind(12), KVKind(4, Reach(6))
    limits = Limits(9, 4, 3, 30, 64, 5, kinds=kinds)
    info = worker_info(limits, model="m", home_shard=0, world_size=1, device="cpu", model_digest=b"")
    offer = decode_worker_info(info.SerializeToString())
    assert offer.limits.kinds == kinds
    assert offer.limits.capacity == 24  # 2 blocks and 6: one token more would need 3 and 7
    for size, window in ((6, 6), (0, 6), (4, 0)):
        info.kinds[1].block_size, info.kinds[1].window = size, window
        with pytest.raises(PoisonMessageError, match="kinds of layers do not fit"):
            decode_worker_info(info.SerializeToString())
    cut = KVKind(12), KVKind(4, Reach(chunk=6))
    info = worker_info(
        replace(limits, kinds=cut), model="m", home_shard=0, world_size=1, device="cpu", model_digest=b""
    )
    assert decode_worker_info(info.SerializeToString()).limits.kinds == cut
    del info.kinds[:]  # a worker of which all layers see all tokens need not say so
    assert decode_worker_info(info.SerializeToString()).limits.kinds == (KVKind(4),)


@pytest.mark.parametrize(("has_state", "saved"), [(False, 0), (True, 0), (True, 7)])
def test_a_worker_tells_whether_layers_keep_a_state_and_how_many_it_saves(has_state: bool, saved: int) -> None:
    limits = Limits(9, 4, 3, 30, 64, 5, has_state=has_state, num_saved_states=saved)
    info = worker_info(limits, model="m", home_shard=0, world_size=1, device="cpu", model_digest=b"")
    read = decode_worker_info(info.SerializeToString()).limits
    assert (read.has_state, read.num_saved_states) == (has_state, saved)
    info.has_state, info.num_saved_states = False, 7
    with pytest.raises(PoisonMessageError, match="saves states of layers that keep none"):
        decode_worker_info(info.SerializeToString())
    assert read.finds_prefixes is (saved > 0 or not has_state)


def test_states_to_be_saved_are_read_by_the_worker_as_they_were_planned() -> None:
    plan = StepPlan(1, slots=column([2]), num_tokens=column([4]), save_slots=column([2]), save_states=column([9]))
    read = decode_plan(encode_plan(plan, SESSION, INCARNATION, 0)).plan
    assert (read.save_slots.tolist(), read.save_states.tolist()) == ([2], [9])
    message = steps_pb2.StepPlan.FromString(encode_plan(plan, SESSION, INCARNATION, 0))
    message.save_states = b""
    with pytest.raises(PoisonMessageError, match="columns save have different lengths"):
        decode_plan(message.SerializeToString())


@pytest.mark.parametrize("slot", [None, 0, 3])
def test_the_state_that_a_sequence_begins_with_is_read_by_the_worker_as_it_was_planned(slot: int | None) -> None:
    admission = Admission(1, column([1, 2]), 1, 1, column([7]), Sampling(), 0, source_state=slot)
    read = decode_plan(encode_plan(StepPlan(1, admissions=(admission,)), SESSION, INCARNATION, 0)).plan
    assert read.admissions[0].source_state == slot


def test_blocks_by_kinds_are_read_by_the_worker_as_they_were_planned() -> None:
    counts, firsts = column([2, 1]), column([0, 3])
    admission = Admission(
        0, column([1]), 1, 0, column([7, 8, 9]), Sampling(), 0, block_counts=counts, first_blocks=firsts
    )
    plan = StepPlan(
        1,
        admissions=(admission,),
        append_slots=column([0, 0]),
        append_blocks=column([5, 6]),
        append_kinds=column([1, 0]),
    )
    read = decode_plan(encode_plan(plan, SESSION, INCARNATION, 0)).plan
    appended = (each.tolist() for each in (read.append_slots, read.append_blocks, read.append_kinds))
    assert list(appended) == [[0, 0], [5, 6], [1, 0]]
    assert [(first, blocks.tolist()) for first, blocks in read.admissions[0].tables] == [(0, [7, 8]), (3, [9])]
