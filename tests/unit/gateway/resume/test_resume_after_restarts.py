"""Clients that come back while the server is away or has forgotten their requests."""

import hashlib
import threading
import time

import numpy as np
import pytest
from returning_clients import Heard, begun, events, hear
from running_gateway import RunningGateway, eventually
from scripted_pipeline import Incoming

from gateway_svc import call
from servicekit.bus.calls import Attach, Fetch, Hello, Recall, Recalled, Revalidate, SessionKind, Submit, SubmitOutcome
from servicekit.pool_stats import Loss


def test_who_comes_back_while_the_server_is_away_waits_for_it(gateway: RunningGateway, other: RunningGateway) -> None:
    first = begun(gateway, "a")
    (request,) = gateway.pipeline.wait_for()
    request.afterwards.append(lambda: request.say("b"))
    gateway.bus.stop()
    eventually(lambda: not other.service.is_ready())
    threading.Timer(0.3, gateway.bus.start).start()
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.is_done) == (["b"], True)


def lose(gateway: RunningGateway, request: Incoming) -> Submit:
    """The server is restarted without a request; the submit with which it can be made again."""
    stored = gateway.pipeline.call(Fetch(request.request_id))
    recalled = gateway.pipeline.call(Recall(request.request_id, ""))
    assert stored is not None
    assert isinstance(recalled, Recalled)
    gateway.bus.stop()
    assert gateway.bus.server.store.delete(gateway.bus.keys.request(request.request_id))
    gateway.bus.start()
    digest = hashlib.blake2b(b"1:" + stored.body + stored.prompt, digest_size=16).digest()
    reply, tokens = recalled.reply, np.array(request.spoken[0].token_ids, "<u4").tobytes()
    return Submit(
        *(request.request_id, "", stored.header, stored.body, digest, stored.route, 1, reply),
        prompt=stored.prompt,
        witness=(tokens,),
    )


def test_the_gateway_to_which_a_client_came_tells_a_restarted_server_what_it_has(
    gateway: RunningGateway, second: RunningGateway
) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.wait_for()
    request.afterwards.append(lambda: request.say("c", finish=0))
    with events(second, first) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["c"])
        lost = lose(gateway, request)
        assert len(request.spoken[0].token_ids) == 3

        def is_told() -> bool:
            """By the gateway that has all of it: the other one may tell the beginning first."""
            found = gateway.pipeline.call(Fetch(request.request_id))
            return found is not None and found.witness == lost.witness

        eventually(is_told)
        found = gateway.pipeline.call(Fetch(request.request_id))
        assert found is not None
        assert (found.header, found.body, found.prompt) == (lost.header, lost.body, lost.prompt)


def test_who_comes_back_before_the_server_knows_the_request_again_waits(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "PROBE_S", 0.1)  # of requests that are silent, as this one is
    first = begun(gateway, "a")
    (request,) = gateway.pipeline.wait_for()
    # Another gateway has it, and takes its time.
    ghost = Hello(b"g" * 16, SessionKind.GATEWAY, "ghost", "", 600_000)
    assert gateway.pipeline.call(ghost).active
    now_ms = time.time_ns() // 1_000_000
    gateway.pipeline.call(Attach(request.request_id, "", ghost.sid, b"", routed_ms=now_ms))
    eventually(lambda: gateway.service.stats.num_streams == 0)
    again = lose(gateway, request)
    request.afterwards.append(lambda: request.say("b"))
    answers: list[Heard] = []

    def come_back() -> None:
        with events(gateway, first) as (heard, lines):
            answers.append(hear(heard, lines))

    client = threading.Thread(target=come_back)
    client.start()
    # Its hello suspends all sessions: the other gateway's is active again only after it.
    eventually(lambda: gateway.service.pools.all[0].pool_stats.losses[Loss.SUSPENDED] == 1)
    eventually(gateway.service.is_ready)
    assert gateway.pipeline.call(again) is SubmitOutcome.CREATED
    assert gateway.pipeline.call(Revalidate(ghost.sid, 600_000))
    client.join()
    assert [(heard.status, heard.texts, heard.is_done) for heard in answers] == [(200, ["b"], True)]
