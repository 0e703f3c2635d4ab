"""The states that a worker has saved, by their prefix, and where prompts are to save theirs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.saved_states import SavedStates, save_points

HASHES = [bytes([number]) * 16 for number in range(8)]


def test_a_state_is_found_after_the_most_blocks() -> None:
    states = SavedStates(4, 3)
    assert states.longest(HASHES, 8) == 0
    assert [states.save(HASHES[number]) for number in (1, 4)] == [4, 5]
    assert [states.longest(HASHES, count) for count in range(9)] == [0, 0, 2, 2, 2, 5, 5, 5, 5]


def test_one_that_is_known_is_not_saved_again() -> None:
    states = SavedStates(0, 2)
    assert states.save(HASHES[0]) == 0
    assert states.save(HASHES[0]) is None
    assert states.num_used == 1


def test_the_one_that_was_used_least_recently_is_forgotten() -> None:
    states = SavedStates(10, 2)
    states.save(HASHES[0])
    states.save(HASHES[1])
    states.use(states.found[HASHES[0]])
    assert states.save(HASHES[2]) == 11
    assert states.longest(HASHES[1:2], 1) == 0
    assert states.longest(HASHES[:1], 1) == states.longest(HASHES[2:3], 1) == 1


@pytest.mark.parametrize(
    ("num_begun", "num_found", "points"),
    [
        (0, 0, [992]),  # nothing is known: its last whole block
        (0, 480, [480, 992]),  # others begin otherwise from there on
        (480, 480, [992]),
        (480, 512, [992]),  # too near to what it begins with
        (0, 960, [960]),  # its own end is too near
        (960, 960, []),
    ],
)
def test_states_are_saved_where_blocks_ended_and_at_the_prompt_s_end(
    num_begun: int, num_found: int, points: list[int]
) -> None:
    assert points == save_points(num_tokens=1000, num_begun=num_begun, num_found=num_found, step=16, least=64)


def test_short_prompts_save_none() -> None:
    assert save_points(num_tokens=64, num_begun=0, num_found=0, step=16, least=64) == []
    assert save_points(num_tokens=65, num_begun=0, num_found=0, step=16, least=64) == [64]


@given(st.integers(1, 200), st.integers(0, 12), st.integers(0, 12), st.integers(1, 6), st.integers(1, 40))
def test_points_are_whole_blocks_of_the_prompt_apart_from_each_other(
    num_tokens: int, begun: int, more: int, step: int, least: int
) -> None:
    num_begun = min(begun, (num_tokens - 1) // step) * step
    num_found = min(begun + more, (num_tokens - 1) // step) * step
    points = save_points(num_tokens=num_tokens, num_begun=num_begun, num_found=num_found, step=step, least=least)
    assert all(point % step == 0 and point < num_tokens for point in points)
    assert all(after - before >= least for before, after in zip([num_begun, *points], points, strict=False))
