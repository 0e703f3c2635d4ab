"""What stands still, and what only seems to because everybody did."""

import asyncio

import pytest

from servicekit.stall import RunningTimeout, StallWatch


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


class SuspendedLoop(asyncio.SelectorEventLoop):
    """Sees the time jump, as a process does that was stopped, and no other time pass."""

    lost_s = 0.0

    def time(self) -> float:
        return self.lost_s


async def suspend(loop: SuspendedLoop) -> None:
    loop.lost_s += 100.0
    for _ in range(4):  # turns of the loop: whatever is due by now has been done
        await asyncio.sleep(0)


async def wait_for_an_answer(loop: SuspendedLoop, suspensions: int) -> str:
    answer: asyncio.Future[str] = loop.create_future()

    async def ask() -> str:
        try:
            async with RunningTimeout(2.5):
                return await answer
        except TimeoutError:
            return "timeout"

    asked = loop.create_task(ask())
    await asyncio.sleep(0)
    for _ in range(suspensions):
        await suspend(loop)
    if not asked.done():
        answer.set_result("answer")
    return await asked


@pytest.mark.parametrize(("suspensions", "said"), [(0, "answer"), (1, "answer"), (2, "answer"), (3, "timeout")])
def test_time_in_which_a_process_did_not_run_is_one_tick_of_its_patience(suspensions: int, said: str) -> None:
    loop = SuspendedLoop()
    try:
        assert loop.run_until_complete(wait_for_an_answer(loop, suspensions)) == said
        assert not [handle for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
    finally:
        loop.close()


def test_what_is_raised_within_it_goes_through() -> None:
    async def fail() -> None:
        async with RunningTimeout(60.0):
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        asyncio.run(fail())
