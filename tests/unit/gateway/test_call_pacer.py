"""A burst of calls: a few in each turn of the loop, in order, and none is forgotten."""

import asyncio
from collections import Counter

from gateway_svc.call_pacer import CallPacer


async def let_in(pacer: CallPacer, number: int) -> list[tuple[int, int]]:
    """The calls in the order in which they got in, each with its turn of the loop."""
    loop = asyncio.get_running_loop()
    entered: list[tuple[int, int]] = []
    turn = 0

    def count() -> None:
        nonlocal turn
        turn += 1
        if len(entered) < number:
            loop.call_soon(count)

    async def call(index: int) -> None:
        await pacer.enter()
        entered.append((index, turn))

    loop.call_soon(count)
    await asyncio.gather(*map(call, range(number)))
    return entered


def test_calls_that_come_at_once_get_in_in_order_and_a_few_in_a_turn() -> None:
    async def run() -> None:
        entered = await let_in(CallPacer(at_once=3), 20)
        assert [index for index, _ in entered] == list(range(20))
        assert max(Counter(turn for _, turn in entered).values()) == 3

    asyncio.run(run())


def test_a_call_that_comes_alone_does_not_wait() -> None:
    async def run() -> None:
        pacer = CallPacer(at_once=1)
        for _ in range(3):
            assert [index for index, _ in await let_in(pacer, 1)] == [0]
            enter = pacer.enter().__await__()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert list(enter) == []  # at once: nothing is awaited

    asyncio.run(run())


def test_a_call_that_was_given_up_takes_nobodys_place() -> None:
    async def run() -> None:
        pacer = CallPacer(at_once=1)
        calls = [asyncio.create_task(pacer.enter()) for _ in range(6)]
        await asyncio.sleep(0)
        for call in calls[1:4]:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [
            False,
            True,
            True,
            True,
            False,
            False,
        ]

    asyncio.run(run())
