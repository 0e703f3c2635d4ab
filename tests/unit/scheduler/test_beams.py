"""The choices of a beam search, and the search as its log tells it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.domain.beams import BeamSearch
from contract.domain.params import Stopping
from scheduler_svc.core.beams import BEGUN, BeamRules, Found, advance, choose, concluded, outcome, pack, replay

EOS = 0


def rules(width: int, search: BeamSearch | None = None, max_tokens: int = 20, min_tokens: int = 0) -> BeamRules:
    return BeamRules.of(width, search or BeamSearch(), Stopping(max_tokens, min_tokens), (EOS,))


def found(*likeliest: tuple[int, float]) -> Found:
    token_ids, logprobs = zip(*likeliest, strict=True)
    return Found(np.array(token_ids, np.uint32), np.array(logprobs, np.float32))


def test_a_choice_has_as_many_beams_as_go_on_and_the_ends_before_them() -> None:
    chosen = choose(rules(2), BEGUN, [found((7, -0.5), (EOS, -0.75), (8, -1.0), (9, -2.0))])
    assert [(each.parent, each.token_id, float(each.total)) for each in chosen] == [
        (0, 7, -0.5),
        (0, EOS, -0.75),
        (0, 8, -1.0),
    ]


def test_of_equals_the_first_beam_is_chosen() -> None:
    beams = advance(rules(2), BEGUN, choose(rules(2), BEGUN, [found((7, -1.0), (8, -1.0), (EOS, -9.0))]))
    chosen = choose(rules(2), beams, [found((1, -1.0), (2, -1.0)), found((3, -1.0), (4, -0.5))])
    assert [(each.parent, each.token_id) for each in chosen] == [(1, 4), (0, 1)]


def test_an_output_ends_only_among_the_best() -> None:
    late = choose(rules(2), BEGUN, [found((7, -0.5), (8, -1.0), (EOS, -1.5))])
    assert not advance(rules(2), BEGUN, late).finished
    ended = advance(rules(2), BEGUN, choose(rules(2), BEGUN, [found((7, -0.5), (EOS, -1.0), (8, -1.5))])).finished
    assert [each.token_ids.tolist() for each in ended] == [[EOS]]


def test_no_output_ends_before_min_tokens() -> None:
    chosen = choose(rules(1, min_tokens=1), BEGUN, [found((EOS, -0.5), (7, -1.0))])
    assert [each.token_id for each in chosen] == [7]


@pytest.mark.parametrize(("early", "ends"), [(True, True), (False, False), ("never", False)])
def test_a_search_ends_early_as_it_was_asked_to(early: bool | str, ends: bool) -> None:
    asked = rules(2, BeamSearch(early_stopping=early))
    beams = advance(asked, BEGUN, choose(asked, BEGUN, [found((7, -0.25), (EOS, -1.0), (8, -2.0))]))
    beams = advance(asked, beams, choose(asked, beams, [found((6, -0.25), (EOS, -0.5), (5, -2.0)), found((4, -9.0))]))
    assert len(beams.finished) == 2
    assert (outcome(asked, beams, 20) is not None) == ends


def test_beams_that_reach_the_length_end_with_the_finished_by_score() -> None:
    asked = rules(2, BeamSearch(length_penalty=0.0))
    beams = advance(asked, BEGUN, choose(asked, BEGUN, [found((7, -0.25), (EOS, -1.0), (8, -2.0))]))
    assert outcome(asked, beams, 2) is None
    told = outcome(asked, beams, 1)
    assert told == concluded(asked, beams)
    assert told is not None
    assert [each.token_ids.tolist() for each in told] == [[7], [EOS]]


def test_an_output_has_the_logprobs_of_its_tokens() -> None:
    asked = rules(2)
    beams = advance(asked, BEGUN, choose(asked, BEGUN, [found((7, -0.25), (EOS, -9.0), (8, -2.0))]))
    beams = advance(asked, beams, choose(asked, beams, [found((6, -0.5), (5, -4.0)), found((4, -1.0), (3, -8.0))]))
    told = {tuple(each.token_ids): each.logprobs.tolist() for each in concluded(asked, beams)}
    assert told == {(7, 6): [-0.25, -0.5], (8, 4): [-2.0, -1.0]}


STEPS = st.lists(st.lists(st.floats(-8, 0, width=32), min_size=15, max_size=15), min_size=1, max_size=6)


@given(st.integers(1, 3), STEPS)
def test_the_words_of_all_choices_give_the_same_search(width: int, steps: list[list[float]]) -> None:
    asked, beams, words = rules(width), BEGUN, []
    for values in steps:
        tops = [
            found(*sorted(enumerate(values[5 * index : 5 * index + 5]), key=lambda each: -each[1]))
            for index in range(len(beams.running))
        ]
        chosen = choose(asked, beams, tops)
        words.append(pack(chosen))
        beams = advance(asked, beams, chosen)
    assert replay(asked, np.concatenate(words)) == beams
