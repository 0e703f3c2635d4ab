"""The runner of encoders: prompts in matrices, and plans that contradict what an encoder does."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contract.domain.errors import PenstockError
from contract.domain.model_kind import ModelKind
from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan, StepResult
from contract.domain.pooling import F32, SCORED, VECTOR_KINDS, Pooling, PoolingKind
from worker_svc.core.encoder import Padded, pad, pad_all
from worker_svc.core.encoder_runner import EncoderRunner
from worker_svc.core.interface import Limits, Runner
from worker_svc.core.pretended_model import expected_score, expected_vector
from worker_svc.core.simulated import SimulatedConfig
from worker_svc.core.simulated_encoder import SimulatedEncoder
from worker_svc.core.whole_prompts import WholePrompt

LIMITS = Limits(0, 16, 4, 20, 24, 50, model_kind=ModelKind.ENCODER)
PAD, SIZE = 49, 4
MEAN = Pooling(PoolingKind.MEAN, normalize=False)


class Counting:
    """Implement `Encoder`: hidden states have their token and position, and their prompt's length and sum. A
    length is a thousand more for each token of the second type.
    """

    vocab_size = LIMITS.vocab_size
    pad_token_id = PAD

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, prompts: Padded) -> Tensor:
        token_ids, mask, types = prompts
        self.shapes.append(tuple(token_ids.shape))
        assert bool((token_ids[~mask] == PAD).all())
        lengths, sums = mask.sum(1) + 1000 * types.sum(1), (token_ids * mask).sum(1)
        positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
        whole = [each.unsqueeze(1).expand_as(token_ids) for each in (lengths, sums)]
        return torch.stack([token_ids, positions, *whole], -1).float()

    def normalized(self, hidden: Tensor) -> Tensor:
        return hidden


def expected(prompt: list[int], kind: PoolingKind) -> list[float]:
    rows = [[token, at, len(prompt), sum(prompt)] for at, token in enumerate(prompt)]
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return {PoolingKind.LAST: rows[-1], PoolingKind.CLS: rows[0], PoolingKind.MEAN: mean}[kind]


def admission(slot: int, prompt: list[int], pooling: Pooling | None = MEAN) -> Admission:
    return Admission(
        slot=slot,
        token_ids=np.array(prompt, np.uint32),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=np.empty(0, np.uint32),
        sampling=Sampling(),
        seed=0,
        request_id=slot.to_bytes(16, "big"),
        pooling=pooling,
    )


def plan_of(step: int, admissions: list[Admission], released: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(
        step=step,
        released_slots=np.array(released, np.uint32),
        admissions=tuple(admissions),
        slots=np.array([each.slot for each in admissions], np.uint32),
        num_tokens=np.array([len(each.token_ids) for each in admissions], np.uint32),
    )


def torch_runner() -> Runner:
    return EncoderRunner(Counting(), LIMITS, torch.device("cpu"), lambda: 0)


def simulated_runner() -> Runner:
    return SimulatedEncoder(LIMITS, SimulatedConfig(step_s=0.0, hidden_size=SIZE), lambda: 0, lambda _: None)


RUNNERS = pytest.mark.parametrize("make", [torch_runner, simulated_runner])


def vectors(result: StepResult) -> dict[int, F32]:
    return {int.from_bytes(request_id, "big"): vector for request_id, vector in result.vectors.items()}


def test_each_prompt_gets_its_own_vector_whatever_stands_beside_it() -> None:
    runner = torch_runner()
    kinds = VECTOR_KINDS
    prompts = [[7], [3, 4, 5, 6], list(range(11)), [8, 9]]
    admitted = [
        admission(slot, prompt, Pooling(kinds[slot % 3], normalize=False)) for slot, prompt in enumerate(prompts)
    ]
    found = vectors(runner.launch(plan_of(1, admitted)).result())
    for slot, prompt in enumerate(prompts):
        assert found[slot].tolist() == pytest.approx(expected(prompt, kinds[slot % 3]))


@RUNNERS
def test_a_slot_is_free_for_another_once_it_is_released(make: object) -> None:
    runner: Runner = make()  # type: ignore[operator]
    first = runner.launch(plan_of(1, [admission(2, [1, 2])])).result()
    assert (first.slots.tolist(), first.counts.tolist(), len(first.token_ids)) == ([2], [0], 0)
    second = runner.launch(plan_of(2, [admission(2, [3])], released=(2,))).result()
    assert second.slots.tolist() == [2]
    assert not len(runner.launch(plan_of(3, [], released=(2,))).result().slots)
    # A first step begins with empty slots.
    assert runner.launch(plan_of(1, [admission(2, [3])])).result().slots.tolist() == [2]


def test_the_simulated_one_gives_what_tests_expect_of_it() -> None:
    runner = simulated_runner()
    prompts = [[7], [3, 4, 5, 6], list(range(11))]
    pairs = enumerate(zip(prompts, VECTOR_KINDS, strict=True))
    admitted = [admission(slot, prompt, Pooling(kind)) for slot, (prompt, kind) in pairs]
    found = vectors(runner.launch(plan_of(1, admitted)).result())
    for slot, (prompt, kind) in enumerate(zip(prompts, VECTOR_KINDS, strict=True)):
        vector = expected_vector(prompt, Pooling(kind), size=SIZE, model_kind=ModelKind.ENCODER)
        np.testing.assert_allclose(found[slot], vector, atol=1e-6)


PARTIAL = replace(plan_of(1, [admission(0, [1, 2, 3])]), num_tokens=np.array([2], np.uint32))


@RUNNERS
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (PARTIAL, "computes 2 tokens of slot 0, which are not all of a prompt"),
        (plan_of(1, [admission(0, [1], None)]), "is to do what the model does not"),
        (plan_of(1, [admission(0, [1], SCORED)]), "is to do what the model does not"),
        (plan_of(1, [replace(admission(0, [1, 2]), num_computed_tokens=1)]), "of which a part is computed"),
        (plan_of(1, [replace(admission(0, [1, 2]), num_prompt_tokens=1)]), "has generated"),
        (plan_of(1, [admission(4, [1])]), "slot 4, which is taken or not there"),
        (plan_of(1, [admission(0, [1]), admission(0, [2])]), "slot 0, which is taken"),
        (plan_of(1, [admission(0, [1] * 21)]), "gets 21 tokens"),
        (plan_of(1, [admission(0, [50])]), "outside the vocabulary"),
        (plan_of(1, [admission(0, [1] * 13), admission(1, [1] * 12)]), "more tokens than a step"),
        (plan_of(1, [], released=(1,)), "releases slot 1"),
        (replace(plan_of(1, []), slots=np.zeros(1, np.uint32), num_tokens=np.ones(1, np.uint32)), "slot 0, which are"),
    ],
)
def test_a_plan_that_contradicts_the_slots_or_an_encoder_is_refused(make: object, plan: StepPlan, why: str) -> None:
    runner: Runner = make()  # type: ignore[operator]
    with pytest.raises(PenstockError, match=why):
        runner.launch(plan)


def test_of_a_pair_the_tokens_of_its_second_text_have_another_type() -> None:
    runner = EncoderRunner(Counting(), LIMITS, torch.device("cpu"), lambda: 0)
    pair = replace(admission(0, [5, 6, 7]), num_first_tokens=1)
    found = vectors(runner.launch(plan_of(1, [pair, admission(1, [5, 6, 7])])).result())
    assert found[0].tolist() == pytest.approx([6, 1, 2003, 18])
    assert found[1].tolist() == pytest.approx([6, 1, 3, 18])


def test_the_simulated_cross_encoder_scores_pairs_and_nothing_else() -> None:
    limits = replace(LIMITS, model_kind=ModelKind.CROSS_ENCODER)
    runner = SimulatedEncoder(limits, SimulatedConfig(step_s=0.0), lambda: 0, lambda _: None)
    pairs = [replace(admission(slot, [5, 6, 7], SCORED), num_first_tokens=slot) for slot in range(3)]
    found = vectors(runner.launch(plan_of(1, pairs)).result())
    assert [found[slot].tolist() for slot in range(3)] == [[expected_score([5, 6, 7], slot)] for slot in range(3)]
    assert len({float(each[0]) for each in found.values()}) == 3
    with pytest.raises(PenstockError, match="does not"):
        runner.launch(plan_of(1, [admission(0, [5])]))


@RUNNERS
def test_no_prompt_is_computed_twice(make: object) -> None:
    runner: Runner = make()  # type: ignore[operator]
    runner.launch(plan_of(1, [admission(0, [1])]))
    again = replace(plan_of(2, []), slots=np.zeros(1, np.uint32), num_tokens=np.ones(1, np.uint32))
    with pytest.raises(PenstockError, match="not all of a prompt"):
        runner.launch(again)


@given(st.lists(st.integers(1, 600), min_size=1, max_size=40))
def test_matrices_have_each_prompt_once_and_waste_little(lengths: list[int]) -> None:
    prompts = [WholePrompt(np.full(length, place % PAD, np.int64), length // 2) for place, length in enumerate(lengths)]
    groups = pad(prompts, PAD)
    assert sorted(np.concatenate([group.places for group in groups]).tolist()) == list(range(len(lengths)))
    for group in groups:
        longest = int(group.lengths.max())
        assert longest - int(group.lengths.min()) <= max(16, longest // 4)
        columns = (torch.from_numpy(each) for each in (group.token_ids, group.lengths, group.firsts))
        types = group.on(*columns).types.sum(1).tolist()
        assert types == [lengths[place] - (lengths[place] // 2 or lengths[place]) for place in group.places.tolist()]
        for row, place in zip(group.token_ids.reshape(-1, longest), group.places.tolist(), strict=True):
            assert row[: lengths[place]].tolist() == prompts[place].token_ids.tolist()
            assert (row[lengths[place] :] == PAD).all()
    # Neighbours in length are apart only where they must be.
    for one, other in pairwise(groups):
        longest = int(one.lengths.max())
        assert longest - int(other.lengths.max()) > max(16, longest // 4)
    assert len(pad_all(prompts, PAD).token_ids) == len(lengths) * max(lengths)
