"""Compaction: what a log loses is in checkpoints, for its next reader and for the next owner alike."""

from dataclasses import replace

from bus_flow import AWKWARD, LONG_MS, Flow, id_of, sid_of

from servicekit.bus.calls import (
    Append,
    Attach,
    Checkpoint,
    Commit,
    Compact,
    Fetch,
    LastId,
    LeaseShard,
    Length,
    Load,
    ReadCheckpoints,
    Reject,
    ReleaseShard,
    Retire,
)
from servicekit.bus.keys import PAYLOAD

ROWS = b"rows" + AWKWARD


def test_a_compaction_keeps_checkpoints_and_drops_the_log_that_they_cover(flow: Flow) -> None:
    scheduler, holder = flow.session(), flow.session()
    first, second = flow.running(scheduler, 3), flow.running(scheduler, 3)
    log = flow.bus.keys.tokens(3)
    assert flow.connection.execute([LeaseShard(holder, 3), Commit(scheduler, ((3, b"row"),))]) == [True, True]
    last = flow.connection.call(LastId(log))
    assert flow.connection.call(Compact(holder, 3, last, ((first, ROWS), (second, b""))))
    assert flow.fields(log) == [{PAYLOAD: b"row"}]
    found = [flow.connection.call(Fetch(request_id)) for request_id in (first, second)]
    stored = [replace(each, prompt=b"") for each in found if each is not None]
    assert flow.connection.call(ReadCheckpoints(holder, 3)) == [
        Checkpoint(stored[0], ROWS),
        Checkpoint(stored[1], b""),
    ]
    assert flow.connection.call(Compact(holder, 3, last, ((first, b"more"),)))
    checkpoints = flow.connection.call(ReadCheckpoints(holder, 3))
    assert checkpoints is not None
    assert [each.rows for each in checkpoints] == [b"more", b""], "the newest of each request counts"


def test_the_next_owner_loads_checkpoint_and_log_together(flow: Flow) -> None:
    scheduler, holder = flow.session(), flow.session()
    old, new = flow.running(scheduler), flow.running(scheduler)
    flow.connection.execute([LeaseShard(holder, 0), Compact(holder, 0, b"9999999999999-0", ((old, ROWS),))])
    flow.connection.call(Commit(scheduler, ((0, b"later"),)))
    loaded = flow.connection.call(Load(scheduler, (new, old)))
    assert loaded is not None
    assert [request.request_id for request in loaded.requests] == [new, old]
    assert loaded.checkpoints == {old: ROWS}
    assert [entry.fields for entry in loaded.log[0]] == [{PAYLOAD: b"later"}]


def test_without_checkpoints_a_compaction_only_drops(flow: Flow) -> None:
    holder = flow.session()
    log = flow.bus.keys.tokens(0)
    _, second, third = (flow.connection.call(Append(log, {PAYLOAD: b"%d" % i})) for i in range(3))
    flow.connection.call(LeaseShard(holder, 0))
    assert flow.connection.call(Compact(holder, 0, b"0-0"))
    assert flow.connection.call(Length(log)) == 3
    assert flow.connection.call(Compact(holder, 0, second))
    assert [entry.entry_id for entry in flow.entries(log)] == [second, third]
    assert flow.connection.call(Compact(holder, 0, b"9999999999999-0"))
    assert flow.connection.call(Length(log)) == 0
    assert flow.connection.call(LastId(log)) == third


def test_a_late_holder_can_neither_compact_nor_read_checkpoints(flow: Flow) -> None:
    scheduler, late, holder = flow.session(), flow.session(), flow.session()
    request_id = flow.running(scheduler)
    flow.connection.execute([LeaseShard(late, 0), Compact(late, 0, b"0-0", ((request_id, b"first"),))])
    flow.expire(late)
    flow.connection.execute([LeaseShard(holder, 0), Compact(holder, 0, b"0-0", ((request_id, b"second"),))])
    calls = [Compact(late, 0, b"9999999999999-0", ((request_id, b"late"),)), ReadCheckpoints(late, 0)]
    assert flow.connection.execute(calls) == [False, None]
    flow.connection.call(ReleaseShard(holder, 0))
    assert flow.connection.execute(calls) == [False, None], "free again is not its own again"
    assert flow.connection.execute([Compact(sid_of(99), 0, b"0-0"), ReadCheckpoints(sid_of(99), 0)]) == [False, None]
    loaded = flow.connection.call(Load(scheduler, (request_id,)))
    assert loaded is not None
    assert loaded.checkpoints == {request_id: b"second"}
    assert len(loaded.log[0]) == 1, "its opening"


def test_only_what_runs_in_the_shard_gets_a_checkpoint(flow: Flow) -> None:
    scheduler, holder = flow.session(), flow.session()
    elsewhere, ended = flow.running(scheduler, 1), flow.running(scheduler, 0)
    flow.connection.execute([LeaseShard(holder, 0), LeaseShard(holder, 1)])
    assert flow.connection.call(Retire(holder, 0, ended, b"result", LONG_MS))
    waiting = flow.ready()
    given = tuple((each, ROWS) for each in (elsewhere, ended, waiting, id_of(250)))
    assert flow.connection.call(Compact(holder, 0, b"0-0", given))
    assert flow.connection.execute([ReadCheckpoints(holder, 0), ReadCheckpoints(holder, 1)]) == [[], []]
    loaded = flow.connection.call(Load(scheduler, (elsewhere,)))
    assert loaded is not None
    assert loaded.checkpoints == {}


def test_retire_deletes_the_checkpoint(flow: Flow) -> None:
    scheduler, holder = flow.session(), flow.session()
    one, other = flow.running(scheduler), flow.running(scheduler)
    flow.connection.execute([LeaseShard(holder, 0), Compact(holder, 0, b"0-0", ((one, ROWS), (other, ROWS)))])
    assert flow.connection.call(Retire(holder, 0, one, b"result", LONG_MS))
    left = flow.connection.call(ReadCheckpoints(holder, 0))
    assert left is not None
    assert [(each.request.request_id, each.rows) for each in left] == [(other, ROWS)]


def test_a_rejected_request_has_a_checkpoint_like_any_other(flow: Flow) -> None:
    holder = flow.session()
    request_id = flow.submitted()
    flow.connection.execute([Reject(request_id, b"", 0, b"finish"), LeaseShard(holder, 0)])
    assert flow.connection.call(Compact(holder, 0, b"0-0", ((request_id, ROWS),)))
    assert flow.connection.call(Retire(holder, 0, request_id, b"result", LONG_MS))


def test_checkpoints_are_read_in_parts_and_with_their_present_route(flow: Flow) -> None:
    scheduler, holder, gateway = flow.session(), flow.session(), sid_of(70)
    request_ids = [flow.running(scheduler) for _ in range(5)]
    flow.connection.call(LeaseShard(holder, 0))
    flow.connection.call(Compact(holder, 0, b"0-0", tuple((each, each) for each in reversed(request_ids))))
    flow.connection.call(Attach(request_ids[2], "tenant", gateway, b""))
    read: list[Checkpoint] = []
    while part := flow.connection.call(ReadCheckpoints(holder, 0, read[-1].request.request_id if read else b"", 2)):
        assert len(part) <= 2
        read += part
    assert [each.rows for each in read] == sorted(request_ids)
    assert [each.request.request_id for each in read] == sorted(request_ids)
    assert read[sorted(request_ids).index(request_ids[2])].request.route == gateway


def test_a_compaction_of_many_requests_is_one_call(flow: Flow) -> None:
    scheduler, holder = flow.session(), flow.session()
    request_id = flow.running(scheduler)
    flow.connection.call(LeaseShard(holder, 0))
    many = tuple((number.to_bytes(16, "big"), b"rows") for number in range(10_000))
    assert flow.connection.call(Compact(holder, 0, b"0-0", (*many, (request_id, ROWS))))
    (only,) = flow.connection.call(ReadCheckpoints(holder, 0)) or ()
    assert only.rows == ROWS
