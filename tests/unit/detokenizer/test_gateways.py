"""When the requests of a gateway are given up."""

from detokenizer_svc.gateways import Gateways
from servicekit.bus.calls import SessionInfo, SessionKind

HERE, GONE, FORGOTTEN = b"h" * 16, b"g" * 16, b"f" * 16
LATE_S, GRACE_S = 3.0, 10.0
REQUESTS = [(b"1", HERE), (b"2", GONE), (b"3", FORGOTTEN)]
ROUTES = [route for _, route in REQUESTS]


def session(sid: bytes, *, alive: bool) -> SessionInfo:
    return SessionInfo(sid, SessionKind.GATEWAY, "gateway", "", alive, 0, b"")


SURVEY = [session(HERE, alive=True), session(GONE, alive=False)]


def test_text_goes_to_gateways_that_are_there_or_may_come_back() -> None:
    gateways = Gateways(LATE_S, GRACE_S)
    assert not gateways.is_gone(GONE)
    gateways.note(SURVEY, ROUTES, 0.0)
    assert [gateways.is_gone(route) for route in (HERE, GONE, FORGOTTEN, b"new")] == [False, False, True, False]
    gateways.note(SURVEY, ROUTES, LATE_S)
    assert [gateways.is_gone(route) for route in (HERE, GONE, FORGOTTEN, b"new")] == [False, True, True, False]


def test_orphans_are_named_once_and_only_after_the_grace() -> None:
    gateways = Gateways(LATE_S, GRACE_S)
    gateways.note(SURVEY, ROUTES, 100.0)
    assert gateways.orphans(REQUESTS, 100.0 + GRACE_S / 2) == []
    gateways.note(SURVEY, ROUTES, 100.0 + GRACE_S)
    assert gateways.orphans(REQUESTS, 100.0 + GRACE_S) == REQUESTS[1:]
    assert gateways.orphans([*REQUESTS, (b"4", GONE)], 101.0 + GRACE_S) == [(b"4", GONE)]


def test_a_gateway_that_came_back_keeps_its_requests() -> None:
    gateways = Gateways(LATE_S, GRACE_S)
    gateways.note(SURVEY, ROUTES, 0.0)
    gateways.note([session(GONE, alive=True)], ROUTES, GRACE_S - 1)
    gateways.note(SURVEY, ROUTES, GRACE_S)
    assert gateways.orphans([(b"2", GONE)], GRACE_S + 1) == []
