"""Cancels, before, while and after their request is there."""

from bus_flow import Flow, ask, id_of, sid_of, submit

from servicekit.bus import keys as k
from servicekit.bus import open_bus
from servicekit.bus.calls import (
    Attach,
    Cancel,
    Claim,
    Fetch,
    LeaseShard,
    Length,
    Reject,
    Retire,
    SubmitOutcome,
    Tokenized,
)
from servicekit.bus.keys import CANCELS_KEPT_MS


def test_cancel_sets_the_flag_and_hints(flow: Flow) -> None:
    request_id = flow.running(flow.session())
    assert flow.connection.call(Cancel(request_id, 3, 9, "tenant"))
    assert flow.connection.call(Cancel(request_id, 4, 10))
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    assert stored.cancel_reason == 3, "the first cancel counts"
    # The second has no hint: who asks again and again must not fill the server.
    assert flow.fields(flow.bus.keys.cancels) == [
        {k.REQUEST: request_id, k.SEQUENCE: b"-1", k.REASON: b"3", k.SENT_NS: b"9"}
    ]


def test_no_hint_of_a_burst_of_cancels_is_lost(flow: Flow) -> None:
    request_id = flow.running(flow.session())
    for first in range(0, 10_000, 1000):
        flow.connection.execute([Cancel(request_id, 2, 9, sequence=i) for i in range(first, first + 1000)])
    hints = flow.fields(flow.bus.keys.cancels)
    assert [int(hint[k.SEQUENCE]) for hint in hints] == list(range(10_000))


def test_hints_older_than_a_minute_go(valkey_url: str, pool: str) -> None:
    flow = Flow(bus := open_bus(valkey_url, pool), bus.connect())
    stream = bus.keys.cancels.decode()
    for number in range(1, 301):  # a server drops whole nodes, of a hundred entries
        ask(valkey_url, "XADD", stream, f"{number}-0", "id", "long ago")
    recent = 1000 * int(ask(valkey_url, "TIME").split()[0]) - CANCELS_KEPT_MS + 30_000
    ask(valkey_url, "XADD", stream, f"{recent}-0", "id", "lately")
    assert flow.connection.call(Cancel(flow.running(flow.session()), 2, 9, sequence=1))
    kept = [hint.get(k.REQUEST) for hint in flow.fields(bus.keys.cancels)]
    assert len(kept) <= 100
    assert kept[-2] == b"lately"
    flow.connection.close()


def test_cancel_of_one_sequence_only_hints(flow: Flow) -> None:
    request_id = flow.running(flow.session())
    assert flow.connection.call(Cancel(request_id, 2, 9, sequence=1))
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    assert stored.cancel_reason == 0
    assert flow.fields(flow.bus.keys.cancels)[0][k.SEQUENCE] == b"1"


def test_a_cancel_before_its_request_still_counts(flow: Flow) -> None:
    scheduler = flow.session()
    assert not flow.connection.call(Cancel(id_of(1), 5, 9, "tenant"))
    flow.connection.call(submit(id_of(1)))
    (hint,) = flow.hints()
    flow.connection.call(Tokenized(id_of(1), hint.entry_id, b"meta", 1))
    claimed = flow.connection.call(Claim(scheduler, 1, 0))
    assert claimed is not None
    assert claimed[0].cancel_reason == 5


def test_a_cancel_before_its_claim_still_counts(flow: Flow) -> None:
    scheduler = flow.session()
    request_id = flow.ready()
    assert flow.connection.call(Cancel(request_id, 6, 9))
    claimed = flow.connection.call(Claim(scheduler, 1, 0))
    assert claimed is not None
    assert claimed[0].cancel_reason == 6


def test_a_cancel_mark_counts_once_and_only_for_its_tenant(flow: Flow) -> None:
    flow.connection.execute(
        [Cancel(id_of(1), 5, 9, "other"), Cancel(id_of(2), 6, 9), Cancel(id_of(3), 7, 9, sequence=0)]
    )
    flow.connection.execute([submit(id_of(number)) for number in (1, 2, 3)])
    stored = flow.connection.execute([Fetch(id_of(number)) for number in (1, 2, 3)])
    assert [request.cancel_reason for request in stored] == [0, 6, 0]


def test_a_cancel_mark_is_used_up_by_its_request(flow: Flow) -> None:
    detokenizer = flow.session()
    flow.connection.execute([Cancel(id_of(1), 5, 9), submit(id_of(1)), Reject(id_of(1), b"", 0, b"finish")])
    flow.connection.execute([LeaseShard(detokenizer, 0), Retire(detokenizer, 0, id_of(1), b"result", ttl_ms=0)])
    assert flow.connection.call(submit(id_of(1))) is SubmitOutcome.CREATED
    stored = flow.connection.call(Fetch(id_of(1)))
    assert stored is not None
    assert stored.cancel_reason == 0


def test_cancel_of_another_tenants_request_finds_nothing(flow: Flow) -> None:
    request_id = flow.running(flow.session())
    assert not flow.connection.call(Cancel(request_id, 3, 9, "other"))
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    assert stored.cancel_reason == 0
    assert flow.connection.call(Length(flow.bus.keys.cancels)) == 0


def test_cancel_of_an_ended_request_is_known_and_changes_nothing(flow: Flow) -> None:
    request_id = flow.ended()
    assert flow.connection.call(Cancel(request_id, 3, 9, "tenant"))
    assert flow.connection.call(Length(flow.bus.keys.cancels)) == 0


def test_a_cancel_by_who_lost_the_client_counts_only_while_the_request_is_there(flow: Flow) -> None:
    request_id = flow.running(flow.session())
    lost, now = sid_of(78), sid_of(79)
    flow.connection.execute([Attach(request_id, "tenant", lost, b""), Attach(request_id, "tenant", now, b"")])
    assert not flow.connection.call(Cancel(request_id, 1, 9, "tenant", route=lost))
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    assert stored.cancel_reason == 0
    assert flow.connection.call(Length(flow.bus.keys.cancels)) == 0
    assert flow.connection.call(Cancel(request_id, 1, 9, "tenant", route=now))
    assert flow.connection.call(Length(flow.bus.keys.cancels)) == 1


def test_a_cancel_by_who_lost_the_client_does_not_end_what_is_sent_again(flow: Flow) -> None:
    assert not flow.connection.call(Cancel(id_of(1), 1, 9, "tenant", route=sid_of(200)))
    flow.connection.call(submit(id_of(1)))
    stored = flow.connection.call(Fetch(id_of(1)))
    assert stored is not None
    assert stored.cancel_reason == 0
