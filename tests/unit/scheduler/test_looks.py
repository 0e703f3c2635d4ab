"""The last look for requests begins so long before a plan is due as looks take."""

import pytest

from scheduler_svc.looks import Looks

US = 1_000
MS = 1_000_000


def looks_of(*took_ns: int) -> Looks:
    looks = Looks()
    for each in took_ns:
        looks.observe(each)
    return looks


def test_a_look_begins_as_early_as_looks_have_taken() -> None:
    assert 800 * US < looks_of(*[800 * US] * 16).ns <= MS
    assert 400 * US < looks_of(*[800 * US] * 16, *[400 * US] * 16).ns <= 600 * US


def test_a_few_slow_looks_change_nothing_and_many_do() -> None:
    usual = looks_of(*[400 * US] * 16).ns
    assert looks_of(*[400 * US] * 16, *[50 * MS] * 4).ns == usual
    assert usual < looks_of(*[400 * US] * 16, *[50 * MS] * 5).ns <= 2 * MS, "no plan is made much too early for them"


def test_a_look_is_never_so_short_that_a_plan_is_late() -> None:
    assert looks_of(*[US] * 16).ns >= 300 * US


def test_while_something_is_written_a_look_goes_along_that_would_begin_meanwhile() -> None:
    looks = looks_of(*[400 * US] * 16)
    assert looks.is_near(looks.ns, is_writing=False)
    assert not looks.is_near(looks.ns + 1, is_writing=False)
    assert looks.is_near(looks.ns + 400 * US, is_writing=True)
    assert not looks.is_near(3 * looks.ns, is_writing=True)


@pytest.mark.parametrize("left_ns", [600 * US, 900 * US, 1100 * US, 1600 * US, 3 * MS, 11 * MS, 40 * MS])
@pytest.mark.parametrize("exchange_ns", [100 * US, 250 * US, 500 * US, MS, 1800 * US])
def test_every_plan_that_is_waited_for_has_its_look(exchange_ns: int, left_ns: int) -> None:
    """A scheduler pauses and has an exchange, again and again until so little time is left that it makes the plan."""
    looks, num_pauses = looks_of(*[exchange_ns] * 16), 0
    if left_ns <= looks.ns:
        return  # the plan is made at once
    while True:
        pause_ns = looks.pause_ns(left_ns)
        assert 0 < pause_ns <= 5 * MS
        left_ns -= pause_ns
        num_pauses += 1
        assert num_pauses <= 12
        if looks.is_near(left_ns, is_writing=False):
            break
        left_ns -= exchange_ns
        assert left_ns > looks.ns, "the plan is made without a look"
    assert exchange_ns <= left_ns <= exchange_ns + 300 * US
