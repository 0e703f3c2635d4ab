"""After a restart of the server: nothing is given out until the pool has settled."""

import pytest
from bus_flow import DEAD_MS, LONG_MS, id_of, ids, sid_of
from restartable import ROUTE, A, Restartable

from servicekit.bus.calls import (
    NOT_YET,
    Attach,
    Attachment,
    Claim,
    Greeting,
    Leave,
    Load,
    Recall,
    Recalled,
    RequestState,
    Revalidate,
    SessionKind,
    Take,
)


def test_a_pool_whose_server_was_not_restarted_gives_requests_out_at_once(pool_of: Restartable) -> None:
    flow = pool_of.flow
    request_id = flow.ready()
    claimed = pool_of.claim()
    assert isinstance(claimed, list)
    assert ids(claimed) == [request_id]


def test_while_a_pool_settles_nothing_is_given_out(pool_of: Restartable) -> None:
    flow = pool_of.flow
    dead = flow.session()
    running, waiting = flow.running(dead), flow.ready()
    pool_of.restart()
    scheduler = flow.session()
    flow.connection.call(Leave(dead))
    calls = [Claim(scheduler, 10, 0), Take(scheduler, dead), Load(scheduler, (running,))]
    assert flow.connection.execute(calls) == [NOT_YET] * 3
    assert len(flow.entries(flow.bus.keys.requests)) == 1

    pool_of.wait()
    claimed, taken, loaded = flow.connection.execute(calls)
    assert ids(claimed) == [waiting]
    assert taken == [running]
    assert ids(loaded.requests) == [running]


def test_a_pool_waits_for_gateways_that_have_not_confirmed_their_requests(pool_of: Restartable) -> None:
    flow = pool_of.flow
    gateway, other = flow.session(SessionKind.GATEWAY), flow.session(SessionKind.GATEWAY)
    pool_of.restart()
    assert pool_of.come_back(gateway) == Greeting(new_run=True, active=False)
    pool_of.wait()
    assert flow.connection.call(Revalidate(gateway, LONG_MS))
    assert pool_of.claim() is NOT_YET, "of the other one is not known what its clients have"
    assert flow.connection.call(Revalidate(other, LONG_MS))
    assert pool_of.claim() == []


def test_a_gateway_that_stays_away_is_waited_for_until_its_lease_runs_out(pool_of: Restartable) -> None:
    flow = pool_of.flow
    gateway = flow.session(SessionKind.GATEWAY)
    pool_of.restart()
    pool_of.come_back(gateway)
    pool_of.wait()
    assert pool_of.claim() is NOT_YET
    pool_of.come_back(gateway, ttl_ms=DEAD_MS)
    assert pool_of.claim() == []


def test_other_sessions_are_not_waited_for(pool_of: Restartable) -> None:
    flow = pool_of.flow
    for kind in set(SessionKind) - {SessionKind.GATEWAY}:
        flow.session(kind)
    pool_of.restart()
    flow.session()
    pool_of.wait()
    assert pool_of.claim() == []


def test_a_gateway_that_left_is_not_waited_for(pool_of: Restartable) -> None:
    flow = pool_of.flow
    flow.connection.call(Leave(flow.session(SessionKind.GATEWAY)))
    pool_of.restart()
    flow.session()
    pool_of.wait()
    assert pool_of.claim() == []


def test_a_gateway_whose_session_was_lost_is_waited_for_once_it_shows_itself(pool_of: Restartable) -> None:
    flow = pool_of.flow
    flow.session()
    pool_of.restart()
    flow.session()
    lost = sid_of(99)
    assert not pool_of.come_back(lost).active
    pool_of.wait()
    assert pool_of.claim() is NOT_YET
    assert flow.connection.call(Revalidate(lost, LONG_MS))
    assert pool_of.come_back(lost).active
    assert pool_of.claim() == []


def test_a_server_that_lost_everything_waits_for_gateways_that_come_back(pool_of: Restartable) -> None:
    first, second = sid_of(98), sid_of(99)
    assert pool_of.come_back(first) == Greeting(new_run=True, active=False)
    assert pool_of.come_back(second) == Greeting(new_run=False, active=False)
    pool_of.wait()
    assert pool_of.flow.connection.call(Revalidate(first, LONG_MS))
    assert pool_of.claim() is NOT_YET
    assert pool_of.flow.connection.call(Revalidate(second, LONG_MS))
    assert pool_of.claim() == []


@pytest.mark.parametrize("kind", [kind for kind in SessionKind if kind is not SessionKind.GATEWAY])
def test_other_sessions_that_were_lost_stay_so(pool_of: Restartable, kind: SessionKind) -> None:
    pool_of.flow.session()
    pool_of.restart()
    pool_of.flow.session()
    assert not pool_of.come_back(sid_of(99), kind).active
    assert not pool_of.flow.connection.call(Revalidate(sid_of(99), LONG_MS))


def test_a_pool_that_has_settled_stays_so(pool_of: Restartable) -> None:
    flow = pool_of.flow
    late = flow.session(SessionKind.GATEWAY)
    pool_of.restart()
    pool_of.come_back(late, ttl_ms=DEAD_MS)
    pool_of.wait()
    assert pool_of.claim() == []
    assert not pool_of.come_back(late).active
    assert not pool_of.come_back(sid_of(99)).active
    assert pool_of.claim() == []
    assert flow.connection.execute([Revalidate(late, LONG_MS), Revalidate(sid_of(99), LONG_MS)]) == [True, False]


def test_a_second_restart_begins_it_again(pool_of: Restartable) -> None:
    flow = pool_of.flow
    pool_of.restart()
    flow.session()
    pool_of.wait()
    assert pool_of.claim() == []
    pool_of.restart()
    assert pool_of.claim() is NOT_YET


def test_a_request_that_is_not_there_may_yet_come_while_a_pool_settles(pool_of: Restartable) -> None:
    flow = pool_of.flow
    flow.session(SessionKind.GATEWAY)
    ask = Recall(id_of(77), "tenant"), Attach(id_of(77), "tenant", ROUTE, b"")
    unknown = [None, Attachment(known=False)]
    assert flow.connection.execute(ask) == unknown
    pool_of.restart()
    flow.session()
    assert flow.connection.execute(ask) == [NOT_YET, Attachment(known=False, is_settling=True)]
    pool_of.confirm(id_of(77), A)
    assert flow.connection.execute(ask) == [
        Recalled(RequestState.PROMPT, b""),
        Attachment(known=True, state=RequestState.PROMPT),
    ]
    others = Recall(id_of(77), "another"), Attach(id_of(77), "another", ROUTE, b"")
    assert flow.connection.execute(others) == unknown, "another tenant's is not known, settled or not"
