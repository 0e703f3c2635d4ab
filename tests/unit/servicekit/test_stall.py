"""What stands still, and what only seems to because everybody did."""

from servicekit.stall import StallWatch


def looks(watch: StallWatch, progress_s: float, until_s: float, from_s: float) -> list[bool]:
    """One look every quarter of a second."""
    return [watch.is_stalled(progress_s, from_s + tick / 4) for tick in range(int((until_s - from_s) * 4))]


def test_no_progress_for_too_long_is_a_stall() -> None:
    watch = StallWatch(8.0)
    assert not any(looks(watch, 100.0, 108.0, from_s=100.0))
    assert looks(watch, 100.0, 110.0, from_s=108.25) == [True] * 7


def test_progress_ends_it() -> None:
    watch = StallWatch(8.0)
    looks(watch, 100.0, 110.0, from_s=100.0)
    assert not watch.is_stalled(110.0, 110.0)


def test_a_process_that_was_suspended_has_not_stalled() -> None:
    watch = StallWatch(8.0)
    looks(watch, 100.0, 101.0, from_s=100.0)
    assert not any(looks(watch, 100.0, 161.0, from_s=160.0))
    assert not watch.is_stalled(160.9, 161.0)


def test_but_it_has_if_it_does_not_go_on_afterwards() -> None:
    watch = StallWatch(8.0)
    looks(watch, 100.0, 101.0, from_s=100.0)
    assert looks(watch, 100.0, 162.0, from_s=160.0)[-1]
