"""A burst of calls does not bury the server: whatever else it is asked for would wait behind all of them."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from gateway_svc.link import Link
from gateway_svc.outbox import ASKING, RequestOutbox
from gateway_svc.witness import Witness
from servicekit.bus.calls import Bounds, Recalled, RequestState
from servicekit.bus.interface import BusUnavailable


class SlowLink:
    """A server that answers in the next turns of the loop; `num_lost` answers are lost."""

    connected = True

    def __init__(self, num_lost: int = 0) -> None:
        self.num_lost = num_lost
        self.num_asking = self.most_asking = 0

    async def back_within(self, _seconds: float) -> bool:
        return True

    async def execute(self, calls: Sequence[Any]) -> list[Any]:
        self.num_asking += 1
        self.most_asking = max(self.most_asking, self.num_asking)
        for _ in range(3):
            await asyncio.sleep(0)
        self.num_asking -= 1
        self.num_lost -= 1
        if self.num_lost >= 0:
            raise BusUnavailable("gone")
        return [Recalled(RequestState.PROMPT, b"form")] * len(calls)


def recall_all(link: SlowLink, number: int) -> list[list[Recalled | None]]:
    async def run() -> list[list[Recalled | None]]:
        outbox = RequestOutbox(
            cast(Link, link), Bounds(), lambda _served, _attachment: None, Witness(lambda: 0.0), patience_s=60.0
        )
        return await asyncio.gather(*(outbox.recall([bytes([each])], "tenant") for each in range(number)))

    return asyncio.run(run())


def test_few_calls_are_asked_for_at_a_time_and_all_are_answered() -> None:
    link = SlowLink()
    found = recall_all(link, 5 * ASKING)
    assert link.most_asking == ASKING
    assert found == [[Recalled(RequestState.PROMPT, b"form")]] * (5 * ASKING)


def test_lost_answers_keep_nobody_from_asking() -> None:
    link = SlowLink(num_lost=2 * ASKING)
    assert len(recall_all(link, 3 * ASKING)) == 3 * ASKING
