"""A request's end, once, by the holder of its shard."""

from bus_flow import AWKWARD, LONG_MS, Flow, id_of, sid_of, submit

from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Attach,
    Attachment,
    Compact,
    Fetch,
    LeaseShard,
    Length,
    Owned,
    ReadCheckpoints,
    Reject,
    ReleaseShard,
    RequestState,
    Retire,
    SessionKind,
    SubmitOutcome,
    Take,
)


def test_retire_ends_a_request_once_and_keeps_its_result(flow: Flow) -> None:
    scheduler, detokenizer, gateway = flow.session(), flow.session(SessionKind.DETOKENIZER), sid_of(77)
    request_id = flow.running(scheduler, shard=4)
    flow.connection.call(LeaseShard(detokenizer, 4))
    retire = Retire(detokenizer, 4, request_id, b"result" + AWKWARD, LONG_MS, gateway)
    assert flow.connection.execute([retire, retire]) == [True, False]
    assert flow.connection.call(Owned(scheduler)) == []
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    assert not stored.prompt
    assert (stored.state, stored.owner, stored.body, stored.header, stored.meta) == (
        RequestState.ENDED,
        None,
        b"",
        b"",
        b"",
    )
    assert flow.connection.call(Attach(request_id, "tenant", gateway, b"")) == Attachment(
        known=True, state=RequestState.ENDED, result=b"result" + AWKWARD
    )


def test_retire_tells_a_gateway_that_was_attached_while_it_was_decided(flow: Flow) -> None:
    before, now = flow.session(SessionKind.GATEWAY), flow.session(SessionKind.GATEWAY)
    detokenizer, request_id = flow.session(SessionKind.DETOKENIZER), flow.running(flow.session())
    flow.connection.execute([Attach(request_id, "tenant", now, b""), LeaseShard(detokenizer, 0)])
    assert flow.connection.call(Retire(detokenizer, 0, request_id, b"result", LONG_MS, before))
    assert flow.fields(flow.bus.keys.text(before)) == []
    assert flow.fields(flow.bus.keys.text(now)) == [{k.REQUEST: request_id}]


def test_requests_end_together(flow: Flow) -> None:
    scheduler, other, detokenizer = flow.session(), flow.session(), flow.session(SessionKind.DETOKENIZER)
    gateway, now = sid_of(77), flow.session(SessionKind.GATEWAY)
    first, second, third = flow.running(scheduler), flow.running(other), flow.running(scheduler)
    flow.connection.execute([LeaseShard(detokenizer, 0), Attach(second, "tenant", now, b"")])
    others = ((second, b"two"), (third, b"three"))
    retire = Retire(detokenizer, 0, first, b"one", LONG_MS, gateway, others)
    assert flow.connection.execute([retire, retire]) == [True, False]
    assert flow.fields(flow.bus.keys.text(gateway)) == []
    assert flow.fields(flow.bus.keys.text(now)) == [{k.REQUEST: second}]
    assert flow.connection.execute([Owned(scheduler), Owned(other)]) == [[], []]
    found = [flow.connection.call(Attach(each, "tenant", gateway, b"")).result for each in (first, second, third)]
    assert found == [b"one", b"two", b"three"]


def test_what_ended_before_does_not_keep_the_others_from_ending(flow: Flow) -> None:
    scheduler, detokenizer, gateway = flow.session(), flow.session(SessionKind.DETOKENIZER), sid_of(77)
    first, second = flow.running(scheduler), flow.running(scheduler)
    flow.connection.execute([LeaseShard(detokenizer, 0), Retire(detokenizer, 0, first, b"before", LONG_MS)])
    retire = Retire(detokenizer, 0, first, b"one", LONG_MS, gateway, ((second, b"two"),))
    assert not flow.connection.call(retire)
    found = [flow.connection.call(Attach(each, "tenant", gateway, b"")).result for each in (first, second)]
    assert found == [b"before", b"two"]


def test_checkpoints_of_all_that_end_together_are_dropped(flow: Flow) -> None:
    scheduler, detokenizer = flow.session(), flow.session(SessionKind.DETOKENIZER)
    first, second, goes_on = flow.running(scheduler), flow.running(scheduler), flow.running(scheduler)
    checkpoints = tuple((each, b"checkpoint") for each in (first, second, goes_on))
    retire = Retire(detokenizer, 0, first, b"one", LONG_MS, others=((second, b"two"),))
    flow.connection.execute([LeaseShard(detokenizer, 0), Compact(detokenizer, 0, b"0-0", checkpoints), retire])
    found = flow.connection.call(ReadCheckpoints(detokenizer, 0, b"", 10))
    assert found is not None
    assert [each.request.request_id for each in found] == [goes_on]


def test_a_result_is_gone_after_its_time(flow: Flow) -> None:
    request_id = flow.ended(ttl_ms=0)
    assert flow.connection.call(Fetch(request_id)) is None
    assert flow.connection.call(Attach(request_id, "tenant", sid_of(77), b"")) == Attachment(known=False)
    assert flow.connection.call(submit(request_id)) is SubmitOutcome.CREATED


def test_only_the_holder_of_the_shard_retires(flow: Flow) -> None:
    scheduler, holder, other = flow.session(), flow.session(), flow.session()
    request_id = flow.running(scheduler, shard=0)
    waiting = flow.ready()
    assert flow.connection.execute(
        [
            LeaseShard(holder, 0),
            LeaseShard(other, 1),
            Retire(other, 0, request_id, b"r", LONG_MS),
            Retire(other, 1, request_id, b"r", LONG_MS),
            Retire(holder, 0, waiting, b"r", LONG_MS),
            Retire(holder, 0, id_of(250), b"r", LONG_MS),
            ReleaseShard(holder, 0),
            Retire(holder, 0, request_id, b"r", LONG_MS, sid_of(77)),
        ]
    ) == [True, True, False, False, False, False, None, False]
    assert flow.connection.call(Length(flow.bus.keys.text(sid_of(77)))) == 0


def test_a_detokenizer_whose_shard_went_to_another_cannot_retire(flow: Flow) -> None:
    scheduler, late, holder = flow.session(), flow.session(), flow.session()
    request_id = flow.running(scheduler)
    flow.connection.call(LeaseShard(late, 0))
    flow.expire(late)
    assert flow.connection.call(LeaseShard(holder, 0))
    assert not flow.connection.call(Retire(late, 0, request_id, b"late", LONG_MS))
    assert flow.connection.call(Retire(holder, 0, request_id, b"result", LONG_MS))


def test_a_rejected_request_is_retired_like_any_other(flow: Flow) -> None:
    detokenizer = flow.session()
    request_id = flow.submitted()
    flow.connection.execute([Reject(request_id, b"", 0, b"finish"), LeaseShard(detokenizer, 0)])
    assert flow.connection.call(Retire(detokenizer, 0, request_id, b"result", LONG_MS))


def test_an_ended_request_is_not_taken_over(flow: Flow) -> None:
    dead, living, detokenizer = flow.session(), flow.session(), flow.session()
    request_id = flow.running(dead)
    flow.connection.call(LeaseShard(detokenizer, 0))
    flow.connection.call(Retire(detokenizer, 0, request_id, b"result", LONG_MS))
    flow.expire(dead)
    assert flow.connection.call(Take(living, dead)) == []
