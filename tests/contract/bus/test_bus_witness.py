"""After a restart of the server, which may have lost its last writes: the pool settles, and gateways are witnesses."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from bus_flow import DEAD_MS, LONG_MS, Flow, id_of, ids, seem_restarted, seem_settled, sid_of, submit
from memory_bus import MemoryBus

from servicekit.bus import open_bus
from servicekit.bus.calls import (
    NOT_YET,
    Attach,
    Attachment,
    Bounds,
    Cancel,
    Claim,
    Fetch,
    Greeting,
    Hello,
    LeaseShard,
    Leave,
    Load,
    Loaded,
    Overload,
    Recall,
    Recalled,
    RequestState,
    Retire,
    Revalidate,
    SessionKind,
    StoredRequest,
    SubmitOutcome,
    Take,
)
from servicekit.bus.keys import BODY, HEADER, PROMPT, REQUEST, SETTLE_MS

A, B, C, D = (bytes([number, 0, 13, 10]) for number in range(4))  # tokens
ROUTE = sid_of(201)


@dataclass
class Restartable:
    """A pool whose server seems to be restarted, and whose time can pass."""

    flow: Flow
    restart: Callable[[], object]  # the next hello notices it
    wait: Callable[[], object]  # as long as a pool settles at least

    def come_back(self, sid: bytes, kind: SessionKind = SessionKind.GATEWAY, ttl_ms: int = LONG_MS) -> Greeting:
        """A session's hello after an outage."""
        return self.flow.connection.call(Hello(sid, kind, "g", "", ttl_ms, create=False))

    def claim(self) -> object:
        """What a scheduler that begins now gets."""
        return self.flow.connection.call(Claim(self.flow.session(), 10, 0))

    def stored(self, request_id: bytes) -> StoredRequest:
        """A request as it is."""
        found = self.flow.connection.call(Fetch(request_id))
        assert found is not None
        return found

    def confirm(
        self, request_id: bytes, *sequences: bytes, route: bytes = ROUTE, routed_ms: int = 0
    ) -> SubmitOutcome | Overload:
        """A gateway's submit with a witness, through another session than the first one."""
        again = replace(submit(request_id), witness=sequences, route=route, routed_ms=routed_ms)
        return self.flow.connection.call(again)


@pytest.fixture(params=["memory", "valkey", "redis"])
def pool_of(request: pytest.FixtureRequest, pool: str) -> Iterator[Restartable]:
    if request.param == "memory":
        offset_ms = 0

        def wait() -> None:
            nonlocal offset_ms
            offset_ms += SETTLE_MS

        memory = MemoryBus(pool, lambda: 1_700_000_000_000 + offset_ms)
        connection = memory.connect()

        def restart() -> None:
            memory.stop()
            memory.start()
            connection.reconnect()

        yield Restartable(Flow(memory, connection), restart, wait)
        return
    url: str = request.getfixturevalue(f"{request.param}_url")
    bus = open_bus(url, pool)
    flow = Flow(bus, bus.connect())
    yield Restartable(flow, lambda: seem_restarted(url, bus.keys), lambda: seem_settled(url, bus.keys))
    flow.connection.close()


# --- settling ---------------------------------------------------------------------------------------------------------


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


# --- witnesses --------------------------------------------------------------------------------------------------------


def test_a_lost_request_is_made_again_after_what_its_client_has(pool_of: Restartable) -> None:
    flow = pool_of.flow
    request_id = id_of(77)
    assert pool_of.confirm(request_id, A + B, b"") is SubmitOutcome.CREATED
    (hint,) = flow.hints()
    stored = pool_of.stored(request_id)
    assert (hint.fields[REQUEST], hint.fields[HEADER], hint.fields[BODY]) == (request_id, stored.header, stored.body)
    assert hint.fields[PROMPT] == stored.prompt
    assert (stored.witness, stored.route, stored.state.value) == ((A + B, b""), ROUTE, "PROMPT")


def test_claim_and_load_tell_the_witness(pool_of: Restartable) -> None:
    flow = pool_of.flow
    scheduler = flow.session()
    request_id = flow.ready()
    pool_of.confirm(request_id, A, B + C)
    claimed = flow.connection.call(Claim(scheduler, 1, 0))
    loaded = flow.connection.call(Load(scheduler, (request_id,)))
    assert isinstance(claimed, list)
    assert isinstance(loaded, Loaded)
    assert claimed[0].witness == loaded.requests[0].witness == (A, B + C)


def test_a_request_without_a_witness_has_none(pool_of: Restartable) -> None:
    request_id = pool_of.flow.submitted()
    assert pool_of.stored(request_id).witness == ()
    pool_of.confirm(request_id, b"", b"")
    assert pool_of.stored(request_id).witness == ()


@pytest.mark.parametrize(
    ("known", "given", "kept"),
    [
        ((A,), (A + B,), (A + B,)),
        ((A + B,), (A,), (A + B,)),
        ((A + B,), (b"",), (A + B,)),
        ((A + B, C), (A + B + C, b""), (A + B + C, C)),
        ((A + B, C), (A, C + D), (A + B, C + D)),
        ((A + B,), (A + C + D,), (A + B,)),
        ((A,), (A, B), (A, B)),
        ((A, B), (A + C,), (A + C, B)),
    ],
    ids=["extends", "older", "empty", "one-of-two", "each-its-own", "another-history", "more", "fewer"],
)
def test_a_witness_only_ever_grows(
    pool_of: Restartable, known: tuple[bytes, ...], given: tuple[bytes, ...], kept: tuple[bytes, ...]
) -> None:
    request_id = id_of(77)
    pool_of.confirm(request_id, *known)
    assert pool_of.confirm(request_id, *given) is SubmitOutcome.EXISTS
    assert pool_of.stored(request_id).witness == kept


def test_the_state_decides_which_hint_is_written_again(pool_of: Restartable) -> None:
    flow, keys = pool_of.flow, pool_of.flow.bus.keys
    waiting = flow.submitted()
    (first,) = flow.hints()
    pool_of.confirm(waiting, A)
    assert [hint.fields for hint in flow.hints()] == [first.fields]

    ready = flow.ready()
    (before,) = flow.fields(keys.requests)
    pool_of.confirm(ready, A)
    assert flow.fields(keys.requests) == [before, before | {b"t": b"1"}]

    scheduler = flow.session()
    assert len(flow.connection.call(Claim(scheduler, 10, 0)) or ()) == 1, "a doubled hint claims once"
    log = flow.entries(keys.tokens(0))
    pool_of.confirm(ready, A + B)
    assert flow.entries(keys.tokens(0)) == log
    assert flow.fields(keys.requests) == []
    assert pool_of.stored(ready).witness == (A + B,)


def test_an_ended_request_stays_as_it_is(pool_of: Restartable) -> None:
    flow = pool_of.flow
    request_id = flow.ended()
    before = pool_of.stored(request_id)
    assert pool_of.confirm(request_id, A) is SubmitOutcome.EXISTS
    assert pool_of.stored(request_id) == before
    assert flow.hints() == []


def test_the_end_of_a_request_drops_its_witness(pool_of: Restartable) -> None:
    flow = pool_of.flow
    request_id = flow.running(flow.session())
    pool_of.confirm(request_id, A)
    detokenizer = flow.session(SessionKind.DETOKENIZER)
    retire = Retire(detokenizer, 0, request_id, b"result", LONG_MS)
    assert flow.connection.execute([LeaseShard(detokenizer, 0), retire]) == [True, True]
    assert pool_of.stored(request_id).witness == ()


def test_the_first_gateway_that_confirms_a_request_in_a_run_gets_its_text(pool_of: Restartable) -> None:
    flow = pool_of.flow
    flow.session(SessionKind.GATEWAY)  # who said hello to the run before
    request_id = flow.submitted()
    before = pool_of.stored(request_id).route
    pool_of.confirm(request_id, A)
    assert pool_of.stored(request_id).route == before, "there was no restart"

    pool_of.restart()
    flow.session(SessionKind.GATEWAY)
    pool_of.confirm(request_id, A)
    assert pool_of.stored(request_id).route == ROUTE
    flow.connection.call(replace(submit(request_id), witness=(A,)))
    assert pool_of.stored(request_id).route == ROUTE, "the other one may have slept while its client went elsewhere"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["it_tells_last", "it_tells_first"])
def test_the_gateway_to_which_a_client_came_last_gets_its_text_though_the_attachment_was_lost(
    pool_of: Restartable, order: tuple[int, int]
) -> None:
    flow = pool_of.flow
    flow.session(SessionKind.GATEWAY)  # who said hello to the run before
    request_id = flow.submitted()
    flow.connection.call(Attach(request_id, "tenant", sid_of(201), b"", routed_ms=10))
    pool_of.restart()
    routes = [flow.session(SessionKind.GATEWAY) for _ in range(2)]
    for each in order:
        pool_of.confirm(request_id, A, route=routes[each], routed_ms=(10, 20)[each])
        assert flow.connection.call(Revalidate(routes[each], LONG_MS))
    assert pool_of.stored(request_id).route == routes[1]
    # The other one asks again, and learns it.
    told = [flow.fields(flow.bus.keys.text(route)) for route in routes]
    assert told == [[{REQUEST: request_id}] if order == (0, 1) else [], []]
    answer = flow.connection.call(Attach(request_id, "tenant", routes[0], b"", held=routes[0], routed_ms=10))
    assert answer.is_elsewhere


def test_a_witness_takes_no_request_from_a_gateway_that_was_attached_since_the_restart(pool_of: Restartable) -> None:
    flow = pool_of.flow
    request_id = flow.submitted()
    pool_of.restart()
    flow.session(SessionKind.GATEWAY)
    attached = sid_of(202)
    flow.connection.call(Attach(request_id, "tenant", attached, b""))
    pool_of.confirm(request_id, A)
    assert pool_of.stored(request_id).route == attached


def test_a_witness_of_another_tenant_or_body_is_refused(pool_of: Restartable) -> None:
    request_id = pool_of.flow.submitted()
    for changed in (submit(request_id, tenant="other"), submit(request_id, digest=b"other")):
        outcome = pool_of.flow.connection.call(replace(changed, witness=(A,)))
        assert outcome is SubmitOutcome.CONFLICT
    assert pool_of.stored(request_id).witness == ()


def test_no_bound_refuses_a_request_that_was_accepted_before(pool_of: Restartable) -> None:
    flow = pool_of.flow
    flow.submitted()
    bounded = submit(id_of(77), bounds=Bounds(requests=1))
    assert isinstance(flow.connection.call(bounded), Overload)
    assert flow.connection.call(replace(bounded, witness=(A,))) is SubmitOutcome.CREATED


def test_a_cancel_that_came_before_counts(pool_of: Restartable) -> None:
    request_id = id_of(77)
    pool_of.flow.connection.call(Cancel(request_id, 1, 1, "tenant"))
    pool_of.confirm(request_id, A)
    assert pool_of.stored(request_id).cancel_reason == 1
