"""A bound on what a model thinks: the token that closes a thought comes once it is so long, and nothing else."""

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.domain.params import Sampling
from contract.domain.plan import Admission
from worker_svc.core.grammars import SlotGrammars, allowed_ids

OPENS, CLOSES, VOCAB = 40, 41, 50
TOKENS = st.sampled_from([1, 2, 3, OPENS, CLOSES])


def admission(prompt: list[int], output: list[int], budget: int | None) -> Admission:
    sampling = Sampling(thinking_token_budget=budget, thinking_token_ids=(OPENS, CLOSES))
    ids = np.array([*prompt, *output], np.uint32)
    return Admission(0, ids, len(prompt), 0, np.array([0], np.uint32), sampling, 0)


def entered(prompt: list[int], output: list[int], budget: int | None = 3) -> SlotGrammars:
    grammars = SlotGrammars(None, VOCAB)
    assert grammars.remember(admission(prompt, output, budget)) == (budget is not None)
    return grammars


def allowed(grammars: SlotGrammars) -> list[int]:
    return allowed_ids(grammars.masks(grammars.of(np.array([0]))).words[0], VOCAB).tolist()


def must_close(prompt: list[int], output: list[int], budget: int) -> bool:
    """The definition: since the last mark, which opens a thought, the output has so many tokens."""
    marks = [token for token in [*prompt, *output] if token in (OPENS, CLOSES)]
    since = len(list(takewhile(lambda token: token not in (OPENS, CLOSES), reversed(output))))
    return bool(marks) and marks[-1] == OPENS and since >= budget


@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=6),
    output=st.lists(TOKENS, max_size=20),
    budget=st.integers(0, 6),
    begun=st.integers(0, 20),
)
def test_only_the_closing_token_may_come_where_a_thought_is_as_long_as_it_may_be(
    prompt: list[int], output: list[int], budget: int, begun: int
) -> None:
    grammars = entered(prompt, output[:begun], budget)
    for token in output[begun:]:
        grammars.follow([(follower, token) for _, follower in grammars.of(np.array([0]))])
    everything = list(range(VOCAB))
    assert allowed(grammars) == ([CLOSES] if must_close(prompt, output, budget) else everything)


def test_nothing_is_bound_without_a_budget() -> None:
    assert not entered([OPENS], [1, 2], budget=None)


@pytest.mark.parametrize("output", [[], [1, 2]])
def test_a_thought_may_be_closed_before(output: list[int]) -> None:
    assert allowed(entered([OPENS], output)) == list(range(VOCAB))
    assert allowed(entered([OPENS], [*output, CLOSES, 1, 2, 3, 1])) == list(range(VOCAB))
