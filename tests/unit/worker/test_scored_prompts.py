"""Which rows of a batch give logprobs of prompts, and what chunks of them add up to."""

import numpy as np
import pytest

from contract.domain.errors import PenstockError
from contract.domain.params import Sampling
from contract.domain.plan import Admission, PromptLogprobs
from worker_svc.core.batch import Batch
from worker_svc.core.prompt_logprobs import PromptRows, SlotPrompts

VOCAB_SIZE = 50


def admission(
    slot: int, prompt: list[int], output: tuple[int, ...] = (), top: int | None = 2, computed: int = 0
) -> Admission:
    return Admission(
        slot=slot,
        token_ids=np.array([*prompt, *output], np.uint32),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=computed,
        block_ids=np.zeros(1, np.uint32),
        sampling=Sampling(num_prompt_logprobs=top),
        seed=0,
        request_id=bytes([slot]) * 16,
        prompt_logprobs=True,
    )


def batch(*chunks: tuple[int, int, int]) -> Batch:
    """Of (slot, start, tokens)."""
    slots, starts, lens = (np.array(column, np.int64) for column in zip(*chunks, strict=True))
    none = np.empty(0, np.int64)
    return Batch(slots, lens, np.concatenate(([0], np.cumsum(lens))), starts + lens, none, none)


def complete(rows: PromptRows | None) -> dict[bytes, PromptLogprobs]:
    """As if a token's logprob were its id, and the likeliest were those above it."""
    assert rows is not None
    own, num_top = rows.token_ids, rows.num_top
    tops = own[:, None] + np.arange(num_top)
    return dict(rows.complete(own.astype(np.float32), own + 1, tops, -tops.astype(np.float32)))


def test_chunks_of_several_prompts_add_up_beside_others() -> None:
    prompts = SlotPrompts(VOCAB_SIZE)
    prompts.admit(admission(3, [10, 11, 12, 13, 14]))
    prompts.admit(admission(1, [20, 21, 22], top=1))
    first = prompts.take(batch((0, 7, 1), (3, 0, 2), (1, 0, 3)))
    assert first is not None
    assert first.rows.tolist() == [1, 2, 3, 4]
    assert first.token_ids.tolist() == [11, 12, 21, 22]
    assert first.num_top == 2
    done = complete(first)
    assert list(done) == [bytes([1]) * 16]
    whole = done[bytes([1]) * 16]
    assert whole.token_ids.tolist() == [21, 22]
    assert (whole.logprobs.top_counts.tolist(), whole.logprobs.top_ids.tolist()) == ([1, 1], [21, 22])
    last = prompts.take(batch((3, 2, 3)))
    assert last is not None
    assert last.rows.tolist() == [0, 1]
    whole = complete(last)[bytes([3]) * 16]
    assert whole.logprobs.sampled.tolist() == [11, 12, 13, 14]
    assert whole.logprobs.ranks.tolist() == [12, 13, 14, 15]
    assert whole.logprobs.top_ids.tolist() == [11, 12, 12, 13, 13, 14, 14, 15]
    assert prompts.take(batch((3, 5, 1))) is None


def test_the_token_after_the_prompt_has_none_of_its() -> None:
    """Of a prompt that is computed again, with its output."""
    prompts = SlotPrompts(VOCAB_SIZE)
    prompts.admit(admission(0, [1, 2, 3], output=(8, 9)))
    assert complete(prompts.take(batch((0, 0, 5))))[bytes(16)].token_ids.tolist() == [2, 3]


@pytest.mark.parametrize("chunks", [[(0, 0, 2)], [(0, 0, 1), (0, 1, 1)]])
def test_a_last_token_alone_ends_nothing_that_has_ended(chunks: list[tuple[int, int, int]]) -> None:
    prompts = SlotPrompts(VOCAB_SIZE)
    prompts.admit(admission(0, [1, 2]))
    assert complete(prompts.take(batch(chunks[0])))[bytes(16)].token_ids.tolist() == [2]
    assert all(prompts.take(batch(chunk)) is None for chunk in chunks[1:])


def test_a_prompt_of_one_token_is_complete_without_a_value() -> None:
    prompts = SlotPrompts(VOCAB_SIZE)
    prompts.admit(admission(0, [1]))
    assert len(complete(prompts.take(batch((0, 0, 1))))[bytes(16)].token_ids) == 0


@pytest.mark.parametrize("ends", ["release", "clear"])
def test_who_leaves_its_slot_begins_anew(ends: str) -> None:
    prompts = SlotPrompts(VOCAB_SIZE)
    prompts.admit(admission(0, [1, 2, 3, 4]))
    launched = prompts.take(batch((0, 0, 2)))
    prompts.release(np.zeros(1, np.uint32)) if ends == "release" else prompts.clear()
    assert prompts.take(batch((0, 2, 2))) is None
    assert complete(launched) == {}
    prompts.admit(admission(0, [1, 2, 3, 4]))
    assert complete(prompts.take(batch((0, 0, 4))))[bytes(16)].token_ids.tolist() == [2, 3, 4]


def test_no_more_alternatives_than_there_are_tokens() -> None:
    prompts = SlotPrompts(3)
    prompts.admit(admission(0, [1, 2], top=20))
    rows = prompts.take(batch((0, 0, 2)))
    assert rows is not None
    assert rows.num_top == 3


@pytest.mark.parametrize("wrong", [{"computed": 1}, {"top": None}])
def test_a_prompt_that_cannot_give_them_is_a_wrong_plan(wrong: dict[str, int | None]) -> None:
    with pytest.raises(PenstockError, match="not consistent"):
        SlotPrompts(VOCAB_SIZE).admit(admission(0, [1, 2], **wrong))  # type: ignore[arg-type]
