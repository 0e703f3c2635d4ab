"""Which plans are carried out."""

from worker_svc.core.epoch import EpochTracker

ME, OTHER = b"m" * 16, b"o" * 16
FIRST, SECOND = b"1" * 16, b"2" * 16


def verdicts(tracker: EpochTracker, *plans: tuple[bytes, bytes, int]) -> str:
    return " ".join(tracker.admit(*plan).value for plan in plans)


def test_plans_of_an_epoch_run_once_and_in_order() -> None:
    tracker = EpochTracker(ME)
    plans = [(FIRST, ME, step) for step in (1, 2, 2, 3, 1, 2)]
    assert verdicts(tracker, *plans) == "start run drop run start run"


def test_plans_for_another_incarnation_are_dropped() -> None:
    assert verdicts(EpochTracker(ME), (FIRST, OTHER, 1), (FIRST, OTHER, 2)) == "drop drop"


def test_another_session_begins_another_epoch_with_its_first_step() -> None:
    plans = [(FIRST, ME, 1), (FIRST, ME, 2), (SECOND, ME, 1), (SECOND, ME, 2)]
    assert verdicts(EpochTracker(ME), *plans) == "start run start run"


def test_a_gap_ends_the_incarnation_for_good() -> None:
    plans = [(FIRST, ME, 1), (FIRST, ME, 3), (FIRST, ME, 4), (SECOND, ME, 1)]
    assert verdicts(EpochTracker(ME), *plans) == "start gap drop drop"


def test_an_epoch_that_does_not_begin_with_step_one_is_a_gap() -> None:
    assert verdicts(EpochTracker(ME), (FIRST, ME, 2)) == "gap"


def test_a_follower_takes_any_incarnation_that_has_not_failed() -> None:
    tracker = EpochTracker(None)
    plans = [(FIRST, ME, 1), (FIRST, ME, 3), (FIRST, ME, 1), (SECOND, OTHER, 1), (SECOND, OTHER, 2)]
    assert verdicts(tracker, *plans) == "start gap drop start run"
    tracker.end()
    assert verdicts(tracker, (SECOND, OTHER, 3), (SECOND, ME, 1)) == "drop drop"


def test_the_end_of_an_epoch_that_is_told_late_leaves_the_next_one_alone() -> None:
    tracker = EpochTracker(None)
    plans = [(FIRST, ME, 1), (FIRST, ME, 3), (SECOND, OTHER, 1)]
    assert verdicts(tracker, *plans) == "start gap start"
    tracker.end(ME)
    assert tracker.step == 1
    assert verdicts(tracker, (SECOND, OTHER, 2), (SECOND, OTHER, 3), (FIRST, ME, 1)) == "run run drop"
    tracker.end(OTHER)
    assert verdicts(tracker, (SECOND, OTHER, 4)) == "drop"
