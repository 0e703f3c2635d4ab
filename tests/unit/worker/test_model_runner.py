"""The model runner as a state machine: what stays on the device, and that nothing but a sequence decides its tokens."""

from collections.abc import Sequence

import numpy as np
import pytest
from tiny_models import LIMITS, make_runner

from contract.domain.errors import PenstockError
from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan
from worker_svc.core.runner import ModelRunner

PROMPT = list(range(10, 21))
DRAWN = Sampling(temperature=0.9, top_k=40, top_p=0.95)
BLOCKS_EACH = 8


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def entering(slot: int, tokens: Sequence[int] = PROMPT, sampling: Sampling = DRAWN, **rest) -> Admission:
    fields = {
        "seed": 7,
        "num_prompt_tokens": len(tokens),
        "num_computed_tokens": 0,
        "block_ids": np.arange(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH, dtype=np.uint32),
        **rest,
    }
    return Admission(slot=slot, token_ids=u32(*tokens), sampling=sampling, **fields)


def generate(runner: ModelRunner, admissions: Sequence[Admission], num: int, window: int = 1) -> list[list[int]]:
    """`num` tokens of each sequence, all in every step, `window` plans in flight."""
    slots = u32(*(admission.slot for admission in admissions))
    lengths = u32(*(len(admission.token_ids) - admission.num_computed_tokens for admission in admissions))
    pending = [runner.launch(StepPlan(1, admissions=tuple(admissions), slots=slots, num_tokens=lengths))]
    columns = []
    for step in range(2, num + 1):
        pending.append(runner.launch(StepPlan(step, slots=slots, num_tokens=np.ones_like(slots))))
        if len(pending) >= window:
            columns.append(pending.pop(0).result().token_ids)
    columns += [step.result().token_ids for step in pending]
    return np.stack(columns, axis=1).tolist()


def test_seeded_tokens_are_the_same_alone_in_a_batch_at_any_window_and_after_a_recompute() -> None:
    (alone,) = generate(make_runner(), [entering(0)], 12)
    others = [entering(slot, range(30, 30 + 3 * slot), Sampling(temperature=slot / 4), seed=slot) for slot in (1, 2, 5)]
    together = generate(make_runner(), [*others, entering(3)], 12, window=4)
    assert together[3] == alone
    again = entering(6, [*PROMPT, *alone[:5]], num_prompt_tokens=len(PROMPT))
    assert generate(make_runner(), [again], 7) == [alone[5:]]
    (other_seed,) = generate(make_runner(), [entering(0, seed=8)], 12)
    assert other_seed != alone


def test_penalties_see_prompt_and_output_across_a_recompute() -> None:
    for sampling in (
        Sampling(temperature=0.0, repetition_penalty=1.8),
        Sampling(temperature=0.0, presence_penalty=2.0),
        Sampling(temperature=0.0, frequency_penalty=2.0),
    ):
        (plain,) = generate(make_runner(), [entering(0, sampling=Sampling(temperature=0.0))], 20)
        (alone,) = generate(make_runner(), [entering(0, sampling=sampling)], 20)
        assert len(set(alone)) > len(set(plain))
        again = entering(2, [*PROMPT, *alone[:9]], sampling, num_prompt_tokens=len(PROMPT))
        beside = entering(1, range(5), Sampling(temperature=0.0))
        assert generate(make_runner(), [beside, again], 11)[1] == alone[9:]


def test_bias_forces_and_forbids_tokens_in_its_own_slot_only() -> None:
    forced = Sampling(temperature=1.0, logit_bias=((33, 100.0), (5_000_000, 100.0)))
    outputs = generate(make_runner(), [entering(0), entering(1, sampling=forced), entering(2)], 5)
    assert outputs[1] == [33] * 5
    assert outputs[0] == outputs[2]
    assert 33 not in outputs[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_tokens_never_come_whatever_their_bias(temperature: float) -> None:
    liked = ((33, 100.0), (34, 90.0))
    free = Sampling(temperature=temperature, logit_bias=liked)
    held = Sampling(temperature=temperature, logit_bias=liked, suppress_token_ids=(33, 5_000_000))
    outputs = generate(make_runner(), [entering(0, sampling=held), entering(1, sampling=free)], 5)
    assert outputs == [[34] * 5, [33] * 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_come_and_of_them_those_that_are_not_suppressed(temperature: float) -> None:
    free = Sampling(temperature=temperature)
    limited = Sampling(temperature=temperature, allowed_token_ids=(8, 9, 10, 5_000_000), suppress_token_ids=(9,))
    alone, beside = (generate(make_runner(), [entering(0, sampling=free)], 20)[0] for _ in range(2))
    tokens, others = generate(make_runner(), [entering(1, sampling=limited), entering(0, sampling=free)], 20)
    assert set(tokens) <= {8, 10}
    assert others == alone == beside
    (one,) = generate(make_runner(), [entering(0, sampling=Sampling(allowed_token_ids=(33,)))], 5)
    assert one == [33] * 5


def test_stop_ids_cannot_come_before_min_tokens() -> None:
    wants_eos = Sampling(temperature=0.0, logit_bias=((2, 100.0), (3, 60.0)))
    held = entering(0, sampling=wants_eos, min_output_tokens=4, stop_token_ids=(2, 3))
    output = generate(make_runner(), [held, entering(1, sampling=wants_eos)], 6)
    assert not {2, 3} & set(output[0][:4])
    assert output[0][4:] == [2, 2]
    assert output[1] == [2] * 6


def test_copied_blocks_continue_as_the_originals() -> None:
    runner = make_runner()
    (alone,) = generate(make_runner(), [entering(0)], 6)
    runner.launch(StepPlan(1, admissions=(entering(0),), slots=u32(0), num_tokens=u32(10)))
    # All but the last prompt token are computed: a sibling shares two full blocks and copies the third.
    sibling = entering(1, num_computed_tokens=10, block_ids=u32(0, 1, 50))
    plan = StepPlan(
        2,
        admissions=(sibling,),
        append_slots=u32(1),
        append_blocks=u32(51),
        copy_sources=u32(2),
        copy_targets=u32(50),
        slots=u32(0, 1),
        num_tokens=u32(1, 1),
    )
    steps = [runner.launch(plan).result()]
    # From here on the first one's tokens differ, in the block that was shared.
    steps += [runner.launch(StepPlan(step, slots=u32(0, 1), num_tokens=u32(1, 1))).result() for step in range(3, 8)]
    assert [int(step.token_ids[1]) for step in steps] == alone


@pytest.mark.parametrize("left", [float("nan"), float("inf"), float("-inf")])
def test_what_a_broken_request_leaves_in_its_blocks_is_nothing_to_those_that_get_them(left: float) -> None:
    admissions = [entering(slot, range(20, 20 + num), seed=slot) for slot, num in enumerate((1, 5, 11, 17))]
    expected = generate(make_runner(), admissions, 12)
    runner = make_runner()
    generate(runner, admissions, 12)
    runner._cache.keys.fill_(left)
    runner._cache.values.fill_(left)
    assert generate(runner, admissions, 12) == expected


def test_a_plan_without_tokens_gives_an_empty_result() -> None:
    result = make_runner().launch(StepPlan(1)).result()
    assert (result.step, len(result.slots), len(result.token_ids), result.logprobs) == (1, 0, 0, None)


def test_a_chunk_that_stays_behind_samples_nothing() -> None:
    runner = make_runner()
    result = runner.launch(StepPlan(1, admissions=(entering(0),), slots=u32(0), num_tokens=u32(5))).result()
    assert len(result.slots) == 0


def test_only_step_one_mends_a_plan_that_was_refused() -> None:
    runner = make_runner()
    expected = generate(make_runner(), [entering(0)], 3)
    runner.launch(StepPlan(1, admissions=(entering(0),)))
    with pytest.raises(PenstockError, match="not consistent"):
        runner.launch(StepPlan(2, admissions=(entering(0),)))
    assert generate(runner, [entering(0)], 3) == expected


def test_a_sequence_may_fill_the_whole_context_and_get_one_more_token() -> None:
    whole = entering(0, [3] * (LIMITS.max_model_len - 1), block_ids=np.arange(16, dtype=np.uint32))
    assert len(generate(make_runner(), [whole], 2)[0]) == 2


def test_logprobs_stand_beside_the_slots_that_asked() -> None:
    asked = [None, 2, 0]
    admissions = [
        entering(slot, sampling=Sampling(temperature=0.0, num_logprobs=wanted)) for slot, wanted in enumerate(asked)
    ]
    plan = StepPlan(1, admissions=tuple(admissions), slots=u32(0, 1, 2), num_tokens=u32(11, 11, 11))
    result = make_runner().launch(plan).result()
    assert result.logprobs is not None
    assert np.isnan(result.logprobs.sampled).tolist() == [True, False, False]
    assert result.logprobs.sampled[1] == pytest.approx(result.logprobs.sampled[2])
    assert result.logprobs.ranks.tolist() == [0, 1, 1]
    assert result.logprobs.top_counts.tolist() == [0, 2, 0]
    assert result.logprobs.top_ids[0] == result.token_ids[1]
    assert result.logprobs.top_logprobs[0] == pytest.approx(result.logprobs.sampled[1])
