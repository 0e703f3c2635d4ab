"""Calls that begin after their client, or another with the same key, has gone on elsewhere."""

import asyncio
import threading
from typing import Any

import httpx
import pytest
from returning_clients import BODY, KEY, hear, streaming
from running_gateway import RunningGateway, eventually

from gateway_svc.http_calls import CallReply
from gateway_svc.presence import Presence


class Hold:
    """Keeps one wait of a gateway for its server from ending: the `index`-th of those that begin."""

    def __init__(self, gateway: RunningGateway, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached = False
        self._released = asyncio.Event()
        self._gateway, self._left = gateway, index
        link = gateway.service.pools.all[0].link
        self._wait = link.back_within
        monkeypatch.setattr(link, "back_within", self._back_within)

    async def _back_within(self, seconds: float) -> bool:
        self._left -= 1
        if self._left == -1:
            self.is_reached = True
            await self._released.wait()
        return await self._wait(seconds)

    def release(self) -> None:
        assert self._gateway.loop is not None
        self._gateway.loop.call_soon_threadsafe(self._released.set)


class Replies:
    """Counts the replies of one gateway that have ended."""

    def __init__(self, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_ended = 0
        reply, delivery = CallReply.__call__, gateway.service.pools.all[0].delivery

        async def counted(each: CallReply, *args: Any) -> None:
            try:
                await reply(each, *args)
            finally:
                self.num_ended += each._delivery is delivery

        monkeypatch.setattr(CallReply, "__call__", counted)


@pytest.mark.parametrize("waits_before", [0, 1], ids=["before-it-began", "while-it-began"])
def test_a_client_that_has_left_takes_nothing_from_where_it_came_since(
    gateway: RunningGateway, other: RunningGateway, waits_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    hold, replies = Hold(gateway, waits_before, monkeypatch), Replies(gateway, monkeypatch)
    has_left, leave = threading.Event(), Presence.leave

    def leave_and_tell(presence: Presence) -> None:
        leave(presence)
        has_left.set()

    monkeypatch.setattr(Presence, "leave", leave_and_tell)
    with gateway.post(BODY, KEY):
        eventually(lambda: hold.is_reached)
    with streaming(other, headers=KEY) as (heard, lines):
        (request,) = gateway.pipeline.wait_for()
        hear(heard, lines, lambda: heard.texts == ["a"])
        assert has_left.wait(300)
        eventually(lambda: replies.num_ended == (1 if waits_before else 0))
        hold.release()
        eventually(lambda: replies.num_ended == 1)
        request.say("b")
        hear(heard, lines)
    assert (heard.error, heard.texts, heard.is_done) == ("", ["ab"], True)
    assert gateway.service.stats.num_resumes == 0


def test_of_two_calls_of_a_gateway_the_one_whose_client_came_last_goes_on(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    hold = Hold(gateway, 1, monkeypatch)
    answers: list[httpx.Response] = []

    def call() -> None:
        answers.append(httpx.post(f"{gateway.url}/v1/completions", json=BODY, headers=KEY, timeout=300))

    first = threading.Thread(target=call)
    first.start()
    eventually(lambda: hold.is_reached)
    with streaming(gateway, headers=KEY) as (heard, lines):
        (request,) = gateway.pipeline.wait_for()
        hear(heard, lines, lambda: heard.texts == ["a"])
        hold.release()
        first.join()
        request.say("b")
        hear(heard, lines)
    assert (heard.error, heard.texts, heard.is_done) == ("", ["ab"], True)
    assert [(each.status_code, each.json()["error"]["code"]) for each in answers] == [(409, "superseded")]
