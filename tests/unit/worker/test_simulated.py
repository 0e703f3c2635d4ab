"""The simulated runner: its tokens are those expected of the sequence alone, and any mistake with blocks shows."""

import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import Drive, drive

from contract.domain.kv_kinds import KVKind, Reach
from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan, StepResult
from worker_svc.core.interface import Limits
from worker_svc.core.pretended_model import chosen_logprobs, expected_tokens
from worker_svc.core.simulated import SimulatedConfig, SimulatedRunner

LIMITS = Limits(
    num_blocks=60,
    block_size=4,
    max_num_seqs=4,
    max_model_len=80,
    max_num_batched_tokens=400,
    vocab_size=1000,
    eos_token_ids=(2,),
)
GREEDY = Sampling(temperature=0.0)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


@dataclass
class Clock:
    """Time that only passes while someone sleeps, or when told to."""

    now_ns: int = 0

    def read(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


def make_runner(clock: Clock | None = None, step_s: float = 0.0, **changes: int) -> SimulatedRunner:
    clock = clock or Clock()
    return SimulatedRunner(LIMITS, SimulatedConfig(step_s, **changes), clock.read, clock.sleep)


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def admission(slot: int = 0, tokens: list[int] = PROMPT, computed: int = 0, first_block: int = 0, **rest) -> Admission:
    blocks = np.arange(first_block, first_block + -(-len(tokens) // 4), dtype=np.uint32)
    fields = {"sampling": GREEDY, "seed": 0, "block_ids": blocks, "num_prompt_tokens": len(tokens), **rest}
    return Admission(slot=slot, token_ids=u32(*tokens), num_computed_tokens=computed, **fields)


def expect(num: int, prompt: list[int] = PROMPT, sampling: Sampling = GREEDY, seed: int = 0, **rest) -> list[int]:
    return list(islice(expected_tokens(prompt, sampling, seed, LIMITS, **rest), num))


def decode(runner: SimulatedRunner, step: int, *slots: int, **changes) -> StepResult:
    """One step for each of `slots`, which get a block each: 40 + 5 * slot on, one every step."""
    return runner.launch(StepPlan(step, slots=u32(*slots), num_tokens=u32(*[1] * len(slots)), **changes)).result()


@given(
    prompts=st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=30), min_size=1, max_size=4),
    chunk=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1.0]),
    counts=st.tuples(st.integers(0, 1), st.integers(1, 4)),
    blocks_seed=st.integers(0, 5),
)
@settings(max_examples=80)
def test_tokens_are_the_expected_ones_in_any_chunks_batch_blocks_and_counts(
    prompts: list[list[int]], chunk: int, temperature: float, counts: tuple[int, int], blocks_seed: int
) -> None:
    least, most = counts
    runner = make_runner(min_tokens_per_step=least, max_tokens_per_step=most)
    blocks = np.random.default_rng(blocks_seed).permutation(60).astype(np.uint32).reshape(4, 15)
    sampling = Sampling(temperature=temperature)
    admissions = tuple(
        admission(slot, prompt, block_ids=blocks[slot], sampling=sampling, seed=slot)
        for slot, prompt in enumerate(prompts)
    )
    outputs: list[list[int]] = [[] for _ in prompts]
    left = [len(prompt) for prompt in prompts]
    step = 0
    while min(len(output) for output in outputs) < 10:
        step += 1
        going = [slot for slot in range(len(prompts)) if len(outputs[slot]) < 10]
        num = [min(chunk, left[slot]) if left[slot] > 1 else most for slot in going]
        plan = StepPlan(step, admissions=admissions if step == 1 else (), slots=u32(*going), num_tokens=u32(*num))
        result = runner.launch(plan).result()
        first = 0
        for slot, count in zip(result.slots.tolist(), result.counts.tolist(), strict=True):
            assert count <= most
            outputs[slot] += result.token_ids[first : first + count].tolist()
            first += count
        assert first == len(result.token_ids)
        for slot, advanced in zip(going, num, strict=True):
            left[slot] = max(1, left[slot] - advanced)
    for slot, prompt in enumerate(prompts):
        assert outputs[slot] == expect(len(outputs[slot]), prompt, sampling, slot)


def test_counts_between_none_and_several_occur() -> None:
    runner = make_runner(min_tokens_per_step=0, max_tokens_per_step=3)
    runner.launch(StepPlan(1, admissions=(admission(block_ids=np.arange(20, dtype=np.uint32)),)))
    plans = (StepPlan(step, slots=u32(0), num_tokens=u32(12 if step == 2 else 3)) for step in range(2, 22))
    counts = [int(runner.launch(plan).result().counts[0]) for plan in plans]
    assert set(counts) == {0, 1, 2, 3}


def prefilled(second_block: int = 1) -> SimulatedRunner:
    """Slot 0 has computed the prompt in blocks 0, 1 and 2, with `second_block` named in place of block 1."""
    runner = make_runner()
    entering = admission(block_ids=u32(0, second_block, 2, 3))
    runner.launch(StepPlan(1, admissions=(entering,), slots=u32(0), num_tokens=u32(len(PROMPT))))
    return runner


def test_an_undisturbed_decode_is_as_expected() -> None:
    assert decode(prefilled(), 2, 0).token_ids.tolist() == expect(2)[1:]


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("how", ["reassigned", "overwritten", "copied over"])
def test_a_disturbed_block_changes_the_output(block: int, how: str) -> None:
    runner = prefilled()
    others = admission(1, [1, 2, 3, 4], block_ids=u32(block))
    plans = {
        "reassigned": StepPlan(2, admissions=(others,), slots=u32(0), num_tokens=u32(1)),
        "overwritten": StepPlan(2, admissions=(others,), slots=u32(1, 0), num_tokens=u32(4, 1)),
        "copied over": StepPlan(2, copy_sources=u32(8), copy_targets=u32(block), slots=u32(0), num_tokens=u32(1)),
    }
    result = runner.launch(plans[how]).result()
    assert result.token_ids[list(result.slots).index(0)] != expect(2)[1]


def test_the_order_of_blocks_matters() -> None:
    runner = prefilled()
    swapped = admission(1, [*PROMPT, *expect(1)], computed=8, block_ids=u32(1, 0, 7))
    result = runner.launch(StepPlan(2, admissions=(swapped,), slots=u32(1), num_tokens=u32(3))).result()
    assert result.token_ids[0] != expect(2)[1]


def test_a_cached_prefix_is_used_and_must_be_the_right_one() -> None:
    runner = prefilled()
    longer = [*PROMPT[:8], 70, 71]
    right = admission(1, longer, computed=8, block_ids=u32(0, 1, 7))
    wrong = admission(2, [99, *longer[1:]], computed=8, block_ids=u32(0, 1, 8))
    plan = StepPlan(2, admissions=(right, wrong), slots=u32(1, 2), num_tokens=u32(2, 2))
    token_ids = runner.launch(plan).result().token_ids
    assert token_ids[0] == expect(1, longer)[0]
    assert token_ids[1] != expect(1, [99, *longer[1:]])[0]


def test_copy_on_write_of_a_shared_last_block() -> None:
    runner = prefilled()
    sibling = admission(1, block_ids=u32(0, 1, 11), computed=9, sampling=Sampling(), seed=4)
    plan = StepPlan(
        2,
        admissions=(sibling,),
        copy_sources=u32(2),
        copy_targets=u32(11),
        slots=u32(0, 1),
        num_tokens=u32(1, 1),
    )
    token_ids = runner.launch(plan).result().token_ids.tolist()
    assert token_ids == [expect(2)[1], expect(1, sampling=Sampling(), seed=4)[0]]
    token_ids = decode(runner, 3, 0, 1).token_ids.tolist()
    assert token_ids == [expect(3)[2], expect(2, sampling=Sampling(), seed=4)[1]]


def test_recompute_after_a_preemption_goes_on_as_before() -> None:
    runner = prefilled()
    so_far = [*PROMPT, *expect(3)]
    again = admission(2, so_far, num_prompt_tokens=len(PROMPT), first_block=20)
    plan = StepPlan(2, released_slots=u32(0), admissions=(again,), slots=u32(2), num_tokens=u32(len(so_far)))
    assert runner.launch(plan).result().token_ids.tolist() == expect(4)[3:]


def test_step_one_starts_from_empty_slots_and_forgets_the_cache() -> None:
    runner = prefilled()
    stale = admission(0, [*PROMPT, 1], computed=8)
    result = runner.launch(StepPlan(1, admissions=(stale,), slots=u32(0), num_tokens=u32(3))).result()
    assert result.token_ids[0] != expect(1, [*PROMPT, 1])[0]


def test_drawn_tokens_depend_on_the_seed_and_greedy_ones_do_not() -> None:
    drawn = Sampling(temperature=1.0)
    assert expect(5, sampling=drawn, seed=1) != expect(5, sampling=drawn, seed=2)
    assert expect(5, seed=1) == expect(5, seed=2)


def test_eos_comes_only_when_asked_for_and_not_before_min_tokens() -> None:
    assert 2 not in expect(2000)
    often = expect(400, eos_every=4)
    assert 50 < often.count(2) < 150
    held = expect(100, eos_every=4, min_output_tokens=60, stop_token_ids=(2, 3))
    assert 2 not in held[:60]
    assert 2 in held[60:]
    runner = make_runner(eos_every=4)
    entering = admission(block_ids=np.arange(20, dtype=np.uint32), min_output_tokens=20, stop_token_ids=(2, 3))
    first = runner.launch(StepPlan(1, admissions=(entering,), slots=u32(0), num_tokens=u32(10))).result()
    output = [*first.token_ids.tolist(), *(int(decode(runner, step, 0).token_ids[0]) for step in range(2, 41))]
    assert output == expect(40, eos_every=4, min_output_tokens=20, stop_token_ids=(2, 3))


def test_logprobs_come_for_the_slots_that_asked() -> None:
    runner = make_runner()
    asked = (None, 0, 3)
    admissions = tuple(
        admission(slot, first_block=5 * slot, sampling=replace(GREEDY, num_logprobs=wanted))
        for slot, wanted in enumerate(asked)
    )
    plan = StepPlan(1, admissions=admissions, slots=u32(0, 1, 2), num_tokens=u32(10, 10, 10))
    result = runner.launch(plan).result()
    assert result.logprobs is not None
    assert np.isnan(result.logprobs.sampled).tolist() == [True, False, False]
    assert result.logprobs.top_counts.tolist() == [0, 0, 3]
    assert result.logprobs.top_ids[0] == result.token_ids[2]
    assert result.logprobs.top_logprobs[0] == result.logprobs.sampled[2]
    assert np.exp(result.logprobs.top_logprobs).sum() < 1


def test_steps_follow_each_other_without_a_bubble_when_launched_ahead() -> None:
    clock = Clock()
    runner = make_runner(clock, step_s=0.002)
    entering = admission(block_ids=np.arange(20, dtype=np.uint32))
    plan = StepPlan(1, admissions=(entering,), slots=u32(0), num_tokens=u32(10))
    pending = [runner.launch(plan)]
    pending += [runner.launch(StepPlan(step, slots=u32(0), num_tokens=u32(1))) for step in (2, 3)]
    assert clock.now_ns == 0
    results = [step.result() for step in pending]
    assert clock.now_ns == 6_000_000
    assert [result.idle_ns for result in results] == [0, 0, 0]
    clock.sleep(0.001)
    late = decode(runner, 4, 0)
    assert late.idle_ns == 1_000_000
    assert clock.now_ns == 9_000_000


def test_simulating_does_not_import_torch() -> None:
    code = "import sys, worker_svc.core.simulated; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_chosen_tokens_have_their_logprobs_beside_the_likeliest_of_others() -> None:
    asked = [replace(GREEDY, num_logprobs=0, logprob_token_ids=(3, 9)), replace(GREEDY, num_logprobs=1)]
    drives = [Drive([5, 6, 7], 3, sampling) for sampling in asked]
    drive(make_runner(), drives)
    for top in drives[0].tops:
        assert top == dict(zip((3, 9), chosen_logprobs(np.array([3, 9], np.uint32)).tolist(), strict=True))
    assert [len(top) for top in drives[1].tops] == [1, 1, 1]
    assert [next(iter(top)) for top in drives[1].tops] == drives[1].output


WINDOWED = replace(LIMITS, kinds=(KVKind(8), KVKind(4, Reach(6))))


def windowed(
    computed: int, full: list[int], window: list[int], first: int = 0, tokens: list[int] = PROMPT
) -> Admission:
    kinds = {"block_counts": u32(len(full), len(window)), "first_blocks": u32(0, first)}
    return admission(tokens=tokens, computed=computed, block_ids=u32(*full, *window), **kinds)


def test_blocks_that_no_token_sees_may_be_anybodys_and_those_that_one_sees_may_not() -> None:
    clock = Clock()
    runner = SimulatedRunner(WINDOWED, SimulatedConfig(0.0), clock.read, clock.sleep)
    longer = [*PROMPT, *expect(1)]
    plan = StepPlan(1, admissions=(windowed(0, [0, 1], [2, 3, 4]),), slots=u32(0), num_tokens=u32(10))
    assert runner.launch(plan).result().token_ids.tolist() == expect(1)
    rest = {"slots": u32(0), "num_tokens": u32(1), "released_slots": u32(0)}
    known = windowed(10, [0, 1], [3, 4], first=1, tokens=longer)  # the token at 10 sees those from 5 on
    assert runner.launch(StepPlan(2, admissions=(known,), **rest)).result().token_ids.tolist() == expect(2)[1:]
    wrong = windowed(10, [0, 1], [9, 4], first=1, tokens=longer)
    assert runner.launch(StepPlan(3, admissions=(wrong,), **rest)).result().token_ids.tolist() != expect(2)[1:]


@pytest.mark.parametrize(
    "kinds",
    [
        (KVKind(4, Reach(6)),),
        (KVKind(12), KVKind(4, Reach(1))),
        (KVKind(4, Reach(9)), KVKind(8, Reach(3))),
        (KVKind(8), KVKind(4, Reach(chunk=6))),
    ],
)
def test_tokens_do_not_hang_on_the_kinds_of_layers(kinds: tuple[KVKind, ...]) -> None:
    clock = Clock()
    runner = SimulatedRunner(replace(LIMITS, kinds=kinds), SimulatedConfig(0.0), clock.read, clock.sleep)
    drives = [Drive(list(range(3, 3 + length)), 12) for length in (1, 17, 30)]
    drive(runner, drives, chunk=7, window=2)
    assert [each.output for each in drives] == [expect(12, each.token_ids) for each in drives]
