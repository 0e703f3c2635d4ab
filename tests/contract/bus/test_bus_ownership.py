"""What schedulers own: claimed, loaded, committed, struck and taken over."""

from dataclasses import replace

from bus_flow import AWKWARD, DEAD_MS, LONG_MS, Flow, id_of, ids, sid_of

from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Append,
    Claim,
    Claimed,
    Commit,
    Fetch,
    HandOver,
    LeaseShard,
    Leave,
    Length,
    Load,
    Loaded,
    Owned,
    RequestState,
    Retire,
    SessionKind,
    StoredRequest,
    Strike,
    Struck,
    Survey,
    Take,
)


def as_claimed(fetched: StoredRequest | None) -> StoredRequest:
    """What a scheduler reads of a request: its tokens, and not its prompt."""
    assert fetched is not None
    assert fetched.prompt == b"prompt" + AWKWARD
    return replace(fetched, prompt=b"", token_ids=b"tokens" + AWKWARD)


def test_claim_takes_the_oldest_and_opens_them_in_the_log(flow: Flow) -> None:
    scheduler = flow.session()
    first, second, third = flow.ready(), flow.ready(), flow.ready()
    claimed = flow.connection.call(Claim(scheduler, 2, 5))
    assert claimed is not None
    assert ids(claimed) == [first, second]
    assert claimed[0] == StoredRequest(
        first,
        "tenant",
        RequestState.RUNNING,
        b"header" + AWKWARD,
        b"body" + AWKWARD,
        b"meta" + AWKWARD,
        sid_of(200),
        5,
        scheduler,
        0,
        0,
        0,
        token_ids=b"tokens" + AWKWARD,
    )
    assert claimed[0] == as_claimed(flow.connection.call(Fetch(first)))
    opened = flow.fields(flow.bus.keys.tokens(5))
    assert [entry[k.REQUEST] for entry in opened] == [first, second]
    assert opened[0].keys() == {k.REQUEST, k.ROUTE, k.HEADER, k.BODY, k.META}, "neither the prompt nor its tokens"
    assert opened[0][k.META] == b"meta" + AWKWARD
    rest = flow.connection.call(Claim(scheduler, 2, 5))
    assert rest is not None
    assert ids(rest) == [third]
    assert flow.connection.call(Claim(scheduler, 2, 5)) == []
    assert flow.connection.call(Owned(scheduler)) == sorted([first, second, third])


def test_two_schedulers_never_claim_the_same_request(flow: Flow) -> None:
    first, second = flow.session(), flow.session()
    request_ids = [flow.ready() for _ in range(5)]
    one, two = flow.connection.execute([Claim(first, 3, 0), Claim(second, 3, 1)])
    assert ids(one) + ids(two) == request_ids


def test_claim_tells_how_many_come_after_what_it_took(flow: Flow) -> None:
    scheduler = flow.session()
    for _ in range(3):
        flow.ready()
    flow.submitted()
    coming = []
    for count in (2, 1, 1):
        claimed = flow.connection.call(Claim(scheduler, count, 0))
        assert isinstance(claimed, Claimed)
        coming.append((len(claimed), claimed.num_coming))
    assert coming == [(2, 2), (1, 1), (0, 1)]


def test_claim_tells_when_hints_were_sent(flow: Flow) -> None:
    scheduler = flow.session()
    unsaid: list[dict[bytes, bytes]] = [{}, {k.SENT_NS: b"soon"}, {k.SENT_NS: b"9" * 5000}]
    for number, fields in enumerate(unsaid, 2):
        flow.connection.call(Append(flow.bus.keys.requests, {k.REQUEST: id_of(number)} | fields))
        assert flow.ready() == id_of(number)
    flow.ready()
    claimed = flow.connection.call(Claim(scheduler, 4, 0))
    assert isinstance(claimed, Claimed)
    assert claimed.sent_ns == [0, 0, 0, 2]


def test_claim_passes_hints_that_lead_nowhere(flow: Flow) -> None:
    scheduler = flow.session()
    lost = {k.REQUEST: id_of(99), k.SENT_NS: b"1"}
    for _ in range(5):
        flow.connection.call(Append(flow.bus.keys.requests, lost))
    request_id = flow.ready()
    doubled = {k.REQUEST: request_id, k.SENT_NS: b"1"}
    flow.connection.execute([Append(flow.bus.keys.requests, doubled), Append(flow.bus.keys.requests, lost)])
    claimed = flow.connection.call(Claim(scheduler, 2, 0))
    assert claimed is not None
    assert ids(claimed) == [request_id]
    assert flow.connection.call(Length(flow.bus.keys.requests)) == 0


def test_claim_buries_hints_that_hold_no_request(flow: Flow) -> None:
    scheduler, keys = flow.session(), flow.bus.keys
    poison: list[dict[bytes, bytes]] = [
        {b"junk": AWKWARD},
        {k.REQUEST: b"short", k.SENT_NS: b"1"},
        {b"%d" % number: b"many fields" for number in range(9000)},
    ]
    flow.connection.execute([Append(keys.requests, fields) for fields in poison])
    request_id = flow.ready()
    flow.connection.call(Append(keys.requests, {k.SENT_NS: b"1", k.REQUEST: request_id}))
    claimed = flow.connection.call(Claim(scheduler, 10, 0))
    assert isinstance(claimed, Claimed)
    assert (ids(claimed), claimed.num_buried) == ([request_id], 3)
    assert flow.connection.call(Length(keys.requests)) == 0
    buried = flow.fields(keys.dead)
    head = {k.STREAM: keys.requests, k.WHY: k.NO_REQUEST}
    assert buried[:2] == [head | poison[0], head | poison[1]]
    assert (len(buried), len(buried[2])) == (3, len(head) + k.MAX_DEAD_FIELDS)


def test_load_reads_requests_and_the_logs_of_their_shards(flow: Flow) -> None:
    scheduler, other = flow.session(), flow.session()
    first, second = flow.running(scheduler, shard=0), flow.running(scheduler, shard=11)
    foreign = flow.running(other, shard=3)
    flow.connection.call(Commit(scheduler, ((11, b"row" + AWKWARD),)))
    loaded = flow.connection.call(Load(scheduler, (second, foreign, id_of(250), first)))
    assert loaded is not None
    assert loaded.requests == [as_claimed(flow.connection.call(Fetch(each))) for each in (second, first)]
    assert loaded.log == {shard: flow.entries(flow.bus.keys.tokens(shard)) for shard in (11, 0)}
    assert loaded.log[11][-1].fields == {k.PAYLOAD: b"row" + AWKWARD}


def test_load_leaves_out_what_ended(flow: Flow) -> None:
    scheduler, detokenizer = flow.session(), flow.session(SessionKind.DETOKENIZER)
    request_id = flow.running(scheduler)
    flow.connection.call(LeaseShard(detokenizer, 0))
    assert flow.connection.call(Retire(detokenizer, 0, request_id, b"result", LONG_MS))
    loaded = flow.connection.call(Load(scheduler, (request_id,)))
    assert loaded is not None
    assert (loaded.requests, loaded.log) == ([], {})


def strikes(flow: Flow, request_id: bytes) -> tuple[int, int]:
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    return stored.strikes, stored.struck_at


def test_what_counts_of_the_strikes_is_kept_however_often_it_is_told(flow: Flow) -> None:
    scheduler = flow.session()
    once, twice, spared = (flow.running(scheduler) for _ in range(3))
    told = Strike(scheduler, (Struck(once, 1, 7), Struck(twice, 2, 2**40)))
    assert flow.connection.call(told)
    assert flow.connection.call(told)
    assert [strikes(flow, each) for each in (once, twice, spared)] == [(1, 7), (2, 2**40), (0, 0)]
    assert flow.connection.call(Strike(scheduler, (Struck(twice, 1, 9),)))
    assert strikes(flow, twice) == (1, 9)


def test_strikes_outlive_their_scheduler(flow: Flow) -> None:
    dead, living = flow.session(), flow.session()
    request_id = flow.running(dead)
    flow.connection.call(Strike(dead, (Struck(request_id, 3, 5),)))
    flow.expire(dead)
    flow.connection.call(Take(living, dead))
    loaded = flow.connection.call(Load(living, (request_id,)))
    assert loaded is not None
    assert (loaded.requests[0].strikes, loaded.requests[0].struck_at) == (3, 5)


def test_only_the_owner_strikes(flow: Flow) -> None:
    owner, other, dead = flow.session(), flow.session(), flow.session()
    request_id = flow.running(owner)
    assert flow.connection.call(Strike(other, (Struck(request_id, 1, 1), Struck(id_of(99), 1, 1))))
    flow.expire(dead)
    flow.connection.call(Take(owner, dead))
    assert not flow.connection.call(Strike(dead, (Struck(request_id, 1, 1),)))
    assert strikes(flow, request_id) == (0, 0)
    assert flow.connection.call(Fetch(id_of(99))) is None


def test_commit_writes_rows_and_plan_in_order(flow: Flow) -> None:
    scheduler = flow.session()
    keys = flow.bus.keys
    assert flow.connection.call(Commit(scheduler, ((0, b"a"), (1, AWKWARD), (0, b"b")), "w", b"plan" + AWKWARD))
    assert flow.fields(keys.tokens(0)) == [{k.PAYLOAD: b"a"}, {k.PAYLOAD: b"b"}]
    assert flow.fields(keys.tokens(1)) == [{k.PAYLOAD: AWKWARD}]
    assert flow.fields(keys.steps("w")) == [{k.PAYLOAD: b"plan" + AWKWARD}]


def test_commit_without_a_plan_writes_none(flow: Flow) -> None:
    assert flow.connection.call(Commit(flow.session(), ((0, b"a"),), "w"))
    assert flow.connection.call(Length(flow.bus.keys.steps("w"))) == 0


def test_plans_are_capped(flow: Flow) -> None:
    scheduler = flow.session()
    for _ in range(8):
        flow.connection.execute([Commit(scheduler, (), "w", b"plan")] * 100)
    kept = flow.connection.call(Length(flow.bus.keys.steps("w")))
    assert k.STEPS_CAP <= kept <= 2 * k.STEPS_CAP


def test_an_unknown_dead_owner_has_nothing(flow: Flow) -> None:
    assert flow.connection.call(Take(flow.session(), sid_of(99))) == []


def test_a_dead_scheduler_is_taken_over_with_its_log(flow: Flow) -> None:
    dead, living = flow.session(ttl_ms=DEAD_MS), flow.session()
    request_id = flow.running(dead, shard=1)
    flow.connection.call(Commit(dead, ((1, b"row"),)))
    moved = flow.connection.call(Take(living, dead))
    assert moved == [request_id]
    loaded = flow.connection.call(Load(living, tuple(moved)))
    assert loaded is not None
    assert loaded.requests[0].owner == living
    assert [sorted(entry.fields) for entry in loaded.log[1]] == [sorted([b"id", b"route", b"h", b"b", b"m"]), [b"p"]]


def test_requests_that_are_handed_over_are_the_receivers_and_a_survey_tells_it(flow: Flow) -> None:
    giver, receiver = flow.session(), flow.session()
    first, second, other = (flow.running(giver) for _ in range(3))
    before = flow.connection.call(Survey())
    assert before is not None
    handed = flow.connection.call(HandOver(giver, receiver, (first, second)))
    assert handed == [first, second]
    assert flow.connection.call(Owned(giver)) == [other]
    assert sorted(flow.connection.call(Owned(receiver)) or ()) == sorted([first, second])
    told = flow.connection.call(Survey(before.generation))
    assert told is not None
    assert [session.sid for session in told.sessions] == [receiver]
    assert flow.connection.call(HandOver(giver, receiver, (first,))) == [first], "asked again after a lost answer"
    loaded = flow.connection.call(Load(receiver, (first,)))
    assert isinstance(loaded, Loaded)
    assert ids(loaded.requests) == [first]


def test_what_is_handed_to_a_dead_scheduler_stays(flow: Flow) -> None:
    giver, dead = flow.session(), flow.session()
    request_id = flow.running(giver)
    flow.expire(dead)
    assert flow.connection.call(HandOver(giver, dead, (request_id,))) == []
    assert flow.connection.call(Owned(giver)) == [request_id]
    flow.connection.call(Leave(giver))
    assert flow.connection.call(HandOver(giver, dead, (request_id,))) is None
