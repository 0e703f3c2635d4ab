"""The last look for requests begins so long before a plan is due as looks take."""

import pytest

from scheduler_svc.looks import Looks

US = 1_000
MS = 1_000_000


def test_a_look_begins_as_early_as_looks_have_taken() -> None:
    looks = Looks()
    for _ in range(20):
        looks.observe(800 * US)
    assert 800 * US < looks.ns <= MS
    for _ in range(20):
        looks.observe(400 * US)
    assert 400 * US < looks.ns <= 600 * US


def test_one_slow_look_changes_nothing_and_two_do() -> None:
    looks = Looks()
    for _ in range(20):
        looks.observe(400 * US)
    before_ns = looks.ns
    looks.observe(50 * MS)
    assert looks.ns == before_ns
    looks.observe(50 * MS)
    assert before_ns < looks.ns <= 2 * MS, "no plan is made much too early for them"


def test_a_look_is_never_so_short_that_a_plan_is_late() -> None:
    looks = Looks()
    for _ in range(20):
        looks.observe(US)
    assert looks.ns >= 300 * US


@pytest.mark.parametrize("left_ns", [0, 100 * US, 600 * US, 3 * MS, 11 * MS, 40 * MS])
def test_pauses_end_when_the_look_begins(left_ns: int) -> None:
    """Also if nothing were read between them, which takes time, too."""
    looks, num_pauses = Looks(), 0
    while pause_ns := looks.pause_ns(left_ns):
        assert pause_ns <= 5 * MS
        left_ns -= pause_ns
        num_pauses += 1
    assert left_ns <= looks.ns
    assert left_ns in (0, 100 * US, looks.ns)
    assert num_pauses <= 12
