"""Plans and results on the wire: what the worker reads and writes, and what it calls poison."""

import numpy as np
import pytest

from contract.domain.errors import ErrorCode, PenstockError, PoisonMessageError
from contract.domain.params import Sampling
from contract.domain.plan import Logprobs, StepResult
from contract.v1 import results_pb2, steps_pb2
from worker_svc import wire
from worker_svc.core.interface import Limits

SESSION, INCARNATION = b"s" * 16, b"i" * 16


def column(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def message(**fields: object) -> steps_pb2.StepPlan:
    plan = steps_pb2.StepPlan(incarnation=INCARNATION, step=7, **fields)  # type: ignore[arg-type]
    plan.origin.session, plan.origin.sent_unix_ns = SESSION, 123
    return plan


def test_a_plan_is_read_column_by_column() -> None:
    sent = message(
        released_slots=column(9),
        append_slots=column(1, 1),
        append_blocks=column(4, 5),
        copy_sources=column(7),
        copy_targets=column(8),
        slots=column(1, 2),
        num_tokens=column(3, 1),
    )
    received = wire.decode_plan(sent.SerializeToString())
    assert (received.session, received.incarnation, received.sent_unix_ns) == (SESSION, INCARNATION, 123)
    plan = received.plan
    assert plan.step == 7
    columns = {
        "released_slots": [9],
        "append_slots": [1, 1],
        "append_blocks": [4, 5],
        "copy_sources": [7],
        "copy_targets": [8],
        "slots": [1, 2],
        "num_tokens": [3, 1],
    }
    assert {name: getattr(plan, name).tolist() for name in columns} == columns


def test_an_admission_is_read_with_its_sampling() -> None:
    sent = message()
    admission = sent.admissions.add(
        slot=3,
        token_ids=column(5, 6, 7),
        num_prompt_tokens=2,
        num_computed_tokens=1,
        block_ids=column(11),
        seed=2**64 - 1,
        min_output_tokens=4,
        stop_token_ids=column(0, 2),
        prompt_logprobs=True,
    )
    sampling = admission.sampling
    sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p = 0.0, 7, 0.5, 0.25
    sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty = 1.5, -0.5, 0.75
    sampling.logit_bias_ids, sampling.logit_bias_values = column(8, 9), np.array([1.5, -2], "<f4").tobytes()
    sampling.num_logprobs = 0
    sampling.num_prompt_logprobs = 3
    (read,) = wire.decode_plan(sent.SerializeToString()).plan.admissions
    assert read.token_ids.tolist() == [5, 6, 7]
    assert (read.slot, read.num_prompt_tokens, read.num_computed_tokens, read.seed) == (3, 2, 1, 2**64 - 1)
    assert (read.block_ids.tolist(), read.min_output_tokens, read.stop_token_ids) == ([11], 4, (0, 2))
    assert read.sampling == Sampling(
        temperature=0.0,
        top_k=7,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias=((8, 1.5), (9, -2.0)),
        num_logprobs=0,
        num_prompt_logprobs=3,
    )
    assert read.prompt_logprobs


def test_absent_sampling_fields_have_their_defaults() -> None:
    sent = message()
    sent.admissions.add(slot=0, token_ids=column(5), num_prompt_tokens=1, block_ids=column(1))
    assert wire.decode_plan(sent.SerializeToString()).plan.admissions[0].sampling == Sampling()


def test_an_admission_whose_kinds_do_not_add_up_to_its_blocks_is_poison() -> None:
    for counts, firsts, why in ((column(1), column(0), "3 blocks"), (column(1, 2), column(0), "different lengths")):
        sent = message()
        sent.admissions.add(slot=0, block_ids=column(1, 2, 3), block_counts=counts, first_blocks=firsts)
        with pytest.raises(PoisonMessageError, match=why):
            wire.decode_plan(sent.SerializeToString())


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"\xff\xff\xff", "not a StepPlan"),
        (b"", "without a session"),
        (message(slots=b"abc").SerializeToString(), "slots has 3 bytes"),
        (message(slots=column(1)).SerializeToString(), "slots have different lengths"),
        (message(append_slots=column(1)).SerializeToString(), "append have different lengths"),
        (
            message(append_slots=column(1), append_blocks=column(1), append_kinds=column(1, 0)).SerializeToString(),
            "append have different lengths",
        ),
        (message(copy_sources=column(1, 2), copy_targets=column(1)).SerializeToString(), "copy have different"),
        (steps_pb2.StepPlan(step=1, incarnation=INCARNATION).SerializeToString(), "without a session"),
    ],
)
def test_what_cannot_be_read_is_poison_and_says_why(payload: bytes, why: str) -> None:
    with pytest.raises(PoisonMessageError, match=why):
        wire.decode_plan(payload)


def test_a_result_is_written_with_its_columns() -> None:
    logprobs = Logprobs(
        np.array([np.nan, -0.5], np.float32),
        np.array([0, 3], np.uint32),
        np.array([0, 2], np.uint32),
        np.array([8, 9], np.uint32),
        np.array([-0.5, -1], np.float32),
    )
    slots, counts, token_ids = (np.array(values, np.uint32) for values in ([4, 1], [1, 1], [30, 31]))
    result = StepResult(5, slots, counts, token_ids, logprobs, step_ns=77, idle_ns=3)
    sent = results_pb2.StepResult.FromString(wire.encode_result(result, SESSION, INCARNATION, 99))
    assert (sent.origin.session, sent.origin.sent_unix_ns, sent.scheduler_session) == (INCARNATION, 99, SESSION)
    assert (sent.step, sent.slots, sent.counts, sent.token_ids) == (5, column(4, 1), column(1, 1), column(30, 31))
    assert (sent.step_ns, sent.idle_ns, sent.HasField("error")) == (77, 3, False)
    assert np.frombuffer(sent.logprobs.sampled, "<f4").tolist()[1] == -0.5
    assert sent.logprobs.ranks == column(0, 3)
    assert (sent.logprobs.top_counts, sent.logprobs.top_ids) == (column(0, 2), column(8, 9))
    assert np.frombuffer(sent.logprobs.top_logprobs, "<f4").tolist() == [-0.5, -1]


def test_a_failure_says_that_the_epoch_is_over() -> None:
    error = PenstockError(ErrorCode.INTERNAL, "broken", param="x")
    sent = results_pb2.StepResult.FromString(wire.encode_failure(3, error, SESSION, INCARNATION, 1))
    assert (sent.step, sent.scheduler_session, sent.error.message, sent.error.param) == (3, SESSION, "broken", "x")
    assert sent.error.code == ErrorCode.INTERNAL


def test_a_worker_says_what_it_is() -> None:
    limits = Limits(100, 16, 8, 512, 1024, 32000)
    info = wire.worker_info(limits, model="m", home_shard=3, world_size=2, device="cpu", model_digest=b"model---")
    assert (info.num_blocks, info.block_size, info.max_num_seqs, info.max_model_len) == (100, 16, 8, 512)
    assert info.model_digest == b"model---"
    assert (info.max_num_batched_tokens, info.home_shard, info.world_size) == (1024, 3, 2)
