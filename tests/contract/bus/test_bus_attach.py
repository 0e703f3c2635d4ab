"""Gateways that take a request's text over, and what is told of it."""

from dataclasses import replace

import pytest
from bus_flow import AWKWARD, LONG_MS, Flow, id_of, sid_of, submit

from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Attach,
    Attachment,
    Claim,
    Fetch,
    LeaseShard,
    Leave,
    Length,
    Recall,
    Recalled,
    Reject,
    RequestState,
    Retire,
    SessionKind,
    Tokenized,
)
from servicekit.bus.keys import CAME_TOGETHER_MS


def test_attach_of_a_running_request_moves_its_text_and_tells_the_detokenizer(flow: Flow) -> None:
    request_id = flow.running(flow.session(), shard=6)
    gateway = sid_of(78)
    attach = Attach(request_id, "tenant", gateway, b"offsets" + AWKWARD)
    assert flow.connection.call(attach) == Attachment(known=True, state=RequestState.RUNNING)
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    assert stored.route == gateway
    assert flow.fields(flow.bus.keys.attach(6)) == [
        {k.REQUEST: request_id, k.ROUTE: gateway, k.OFFSETS: b"offsets" + AWKWARD}
    ]


def test_attach_before_a_request_runs_only_moves_its_text(flow: Flow) -> None:
    scheduler, gateway = flow.session(), sid_of(78)
    request_id = flow.submitted()
    assert flow.connection.call(Attach(request_id, "tenant", gateway, b"")) == Attachment(
        known=True, state=RequestState.PROMPT
    )
    (hint,) = flow.hints()
    flow.connection.execute([Tokenized(request_id, hint.entry_id, b"meta", 1), Claim(scheduler, 1, 0)])
    assert flow.fields(flow.bus.keys.tokens(0))[0][k.ROUTE] == gateway


@pytest.mark.parametrize("ended", [False, True])
def test_attach_of_another_tenants_request_finds_nothing(flow: Flow, ended: bool) -> None:
    request_id = flow.ended() if ended else flow.running(flow.session())
    assert flow.connection.call(Attach(request_id, "other", sid_of(78), b"")) == Attachment(known=False)
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    assert stored.route == sid_of(200)
    assert flow.connection.call(Length(flow.bus.keys.attach(0))) == 0


def text_hints(flow: Flow, gateway: bytes) -> list[bytes]:
    return [fields[k.REQUEST] for fields in flow.fields(flow.bus.keys.text(gateway))]


def test_an_active_gateway_is_told_that_another_took_its_request(flow: Flow) -> None:
    gateway, other = flow.session(SessionKind.GATEWAY), flow.session(SessionKind.GATEWAY)
    request_id = flow.running(flow.session())
    flow.connection.execute([Attach(request_id, "tenant", gateway, b""), Attach(request_id, "tenant", gateway, b"")])
    assert text_hints(flow, gateway) == []
    flow.connection.call(Attach(request_id, "tenant", other, b""))
    assert text_hints(flow, gateway) == [request_id]
    assert text_hints(flow, other) == []


def test_a_gateway_that_left_gets_no_stream_without_a_reader(flow: Flow) -> None:
    gateway = flow.session(SessionKind.GATEWAY)
    request_id = flow.running(flow.session())
    flow.connection.execute([Attach(request_id, "tenant", gateway, b""), Leave(gateway)])
    flow.connection.call(Attach(request_id, "tenant", sid_of(79), b""))
    assert text_hints(flow, gateway) == []


def test_a_gateway_that_lost_its_request_does_not_get_it_back_by_asking(flow: Flow) -> None:
    request_id = flow.running(flow.session(), shard=6)
    mine, renamed, other = sid_of(78), sid_of(79), sid_of(80)
    flow.connection.call(Attach(request_id, "tenant", mine, b"taken"))
    assert not flow.connection.call(Attach(request_id, "tenant", renamed, b"fenced", held=mine)).is_elsewhere
    assert not flow.connection.call(Attach(request_id, "tenant", renamed, b"again", held=mine)).is_elsewhere
    assert flow.connection.call(Attach(request_id, "tenant", other, b"late", held=mine)) == Attachment(
        known=True, state=RequestState.RUNNING, is_elsewhere=True
    )
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    assert stored.route == renamed
    assert [fields[k.OFFSETS] for fields in flow.fields(flow.bus.keys.attach(6))] == [b"taken", b"fenced", b"again"]


@pytest.mark.parametrize("late_ms", [0, CAME_TOGETHER_MS, CAME_TOGETHER_MS + 1])
def test_an_attachment_for_a_client_that_has_gone_on_is_too_late(flow: Flow, late_ms: int) -> None:
    request_id = flow.running(flow.session(), shard=6)
    left, now = sid_of(78), sid_of(79)
    flow.connection.call(Attach(request_id, "tenant", now, b"now", routed_ms=50_000 + late_ms))
    is_late = late_ms > CAME_TOGETHER_MS
    attached = flow.connection.call(Attach(request_id, "tenant", left, b"left", routed_ms=50_000))
    assert attached == Attachment(known=True, state=RequestState.RUNNING, is_elsewhere=is_late)
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    assert stored.route == (now if is_late else left)
    assert len(flow.fields(flow.bus.keys.attach(6))) == (1 if is_late else 2)


def test_a_gateway_asks_again_for_a_client_that_came_long_ago(flow: Flow) -> None:
    request_id = flow.running(flow.session(), shard=6)
    gateway = sid_of(78)
    flow.connection.call(Attach(request_id, "tenant", gateway, b"", routed_ms=50_000))
    again = Attach(request_id, "tenant", gateway, b"", held=gateway, routed_ms=10_000)
    assert not flow.connection.call(again).is_elsewhere
    assert not flow.connection.call(replace(again, held=b"")).is_elsewhere


def test_recall_tells_how_a_request_is_answered_and_its_result(flow: Flow) -> None:
    request_id = id_of(1)
    assert flow.connection.call(Recall(request_id, "tenant")) is None
    flow.connection.call(replace(submit(request_id), reply=b"reply" + AWKWARD))
    assert flow.connection.call(Recall(request_id, "other")) is None
    assert flow.connection.call(Recall(request_id, "tenant")) == Recalled(RequestState.PROMPT, b"reply" + AWKWARD)
    detokenizer = flow.session()
    flow.connection.execute([Reject(request_id, b"", 0, b"finish"), LeaseShard(detokenizer, 0)])
    assert flow.connection.call(Retire(detokenizer, 0, request_id, b"result" + AWKWARD, LONG_MS))
    assert flow.connection.call(Recall(request_id, "other")) is None
    assert flow.connection.call(Recall(request_id, "tenant")) == Recalled(
        RequestState.ENDED, b"reply" + AWKWARD, b"result" + AWKWARD
    )
