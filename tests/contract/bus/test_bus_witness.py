"""After a restart of the server, which may have lost its last writes: gateways are witnesses of what clients have."""

from dataclasses import replace

import pytest
from bus_flow import LONG_MS, id_of, sid_of, submit
from restartable import ROUTE, A, B, C, D, Restartable

from servicekit.bus.calls import (
    Attach,
    Bounds,
    Cancel,
    Claim,
    LeaseShard,
    Load,
    Loaded,
    Overload,
    Retire,
    Revalidate,
    SessionKind,
    SubmitOutcome,
)
from servicekit.bus.keys import BODY, HEADER, PROMPT, REQUEST


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


def test_a_server_that_was_restarted_may_have_another_clock(pool_of: Restartable) -> None:
    flow = pool_of.flow
    flow.session(SessionKind.GATEWAY)  # who said hello to the run before
    request_id = flow.submitted()
    flow.connection.call(Attach(request_id, "tenant", sid_of(201), b"", routed_ms=50_000))
    pool_of.restart()
    flow.session(SessionKind.GATEWAY)
    assert not flow.connection.call(Attach(request_id, "tenant", sid_of(202), b"", routed_ms=10)).is_elsewhere
    assert pool_of.stored(request_id).route == sid_of(202)


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
