"""A request's way: every state, every way to get there, and every way to ask twice."""

from dataclasses import replace

import pytest
from bus_flow import AWKWARD, DEAD_MS, LONG_MS, Flow, id_of, ids, sid_of, submit

from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Acknowledge,
    Append,
    Attach,
    Attachment,
    Cancel,
    Claim,
    Claimed,
    Commit,
    Fetch,
    LeaseShard,
    Leave,
    Length,
    Load,
    Owned,
    ReadGroup,
    Recall,
    Recalled,
    Reclaim,
    Reject,
    ReleaseShard,
    RequestState,
    Retire,
    SessionKind,
    StoredRequest,
    Strike,
    SubmitOutcome,
    Take,
    Tokenized,
)

# --- submit -----------------------------------------------------------------------------------------------------------


def test_submit_stores_the_request_and_hints_the_tokenizers(flow: Flow) -> None:
    assert flow.connection.call(submit(id_of(1), "Zoë")) is SubmitOutcome.CREATED
    assert flow.connection.call(Fetch(id_of(1))) == StoredRequest(
        request_id=id_of(1),
        tenant="Zoë",
        state=RequestState.PROMPT,
        header=b"header" + AWKWARD,
        body=b"body" + AWKWARD,
        meta=b"",
        route=sid_of(200),
        shard=None,
        owner=None,
        cancel_reason=0,
        strikes=0,
    )
    copy = {k.HEADER: b"header" + AWKWARD, k.BODY: b"body" + AWKWARD}
    assert flow.fields(flow.bus.keys.prompts) == [{k.REQUEST: id_of(1), k.SENT_NS: b"1"} | copy]


def test_submit_again_finds_the_first(flow: Flow) -> None:
    outcomes = flow.connection.execute(
        [submit(id_of(1)), submit(id_of(1)), submit(id_of(1), digest=b"other"), submit(id_of(1), tenant="other")]
    )
    assert outcomes == [SubmitOutcome.CREATED, SubmitOutcome.EXISTS, SubmitOutcome.CONFLICT, SubmitOutcome.CONFLICT]
    assert flow.connection.call(Length(flow.bus.keys.prompts)) == 1


def test_submit_of_an_ended_request_finds_its_end(flow: Flow) -> None:
    request_id = flow.ended()
    assert flow.connection.call(submit(request_id)) is SubmitOutcome.EXISTS
    assert flow.connection.call(Length(flow.bus.keys.prompts)) == 0


def test_fetch_of_an_unknown_request_finds_nothing(flow: Flow) -> None:
    assert flow.connection.call(Fetch(id_of(1))) is None


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_tokenized_makes_a_request_ready_once(flow: Flow) -> None:
    request_id = flow.submitted()
    (hint,) = flow.hints(b"tokenizer-1")
    (again,) = flow.connection.call(Reclaim(flow.bus.keys.prompts, k.TOKENIZERS, b"tokenizer-2", 0, 10))
    assert again == hint
    assert flow.connection.call(Tokenized(request_id, hint.entry_id, b"first", 5))
    assert not flow.connection.call(Tokenized(request_id, again.entry_id, b"second", 6))
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    assert (stored.state, stored.meta) == (RequestState.READY, b"first")
    assert flow.fields(flow.bus.keys.requests) == [{k.REQUEST: request_id, k.SENT_NS: b"5"}]
    assert flow.connection.call(Length(flow.bus.keys.prompts)) == 0
    assert flow.connection.call(Reclaim(flow.bus.keys.prompts, k.TOKENIZERS, b"tokenizer-2", 0, 10)) == []


def test_tokenized_of_a_request_that_is_gone_removes_its_hint(flow: Flow) -> None:
    flow.connection.call(Append(flow.bus.keys.prompts, {k.REQUEST: id_of(9), k.SENT_NS: b"1"}))
    (hint,) = flow.hints()
    assert not flow.connection.call(Tokenized(id_of(9), hint.entry_id, b"meta", 5))
    assert flow.connection.call(Length(flow.bus.keys.prompts)) == 0
    assert flow.connection.call(Length(flow.bus.keys.requests)) == 0


def test_reject_opens_the_request_in_the_log_and_ends_it_there(flow: Flow) -> None:
    request_id = flow.submitted()
    (hint,) = flow.hints()
    reject = Reject(request_id, hint.entry_id, 2, b"finish" + AWKWARD)
    assert flow.connection.execute([reject, reject]) == [True, False]
    assert flow.fields(flow.bus.keys.tokens(2)) == [
        {
            k.REQUEST: request_id,
            k.ROUTE: sid_of(200),
            k.HEADER: b"header" + AWKWARD,
            k.BODY: b"body" + AWKWARD,
            k.META: b"",
        },
        {k.PAYLOAD: b"finish" + AWKWARD},
    ]
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    assert (stored.state, stored.owner, stored.shard) == (RequestState.RUNNING, None, 2)
    assert flow.connection.call(Length(flow.bus.keys.prompts)) == 0


def test_reject_of_a_ready_request_keeps_claim_from_it(flow: Flow) -> None:
    scheduler = flow.session()
    rejected, kept = flow.ready(), flow.ready()
    assert flow.connection.call(Reject(rejected, b"", 0, b"finish"))
    claimed = flow.connection.call(Claim(scheduler, 10, 0))
    assert claimed is not None
    assert ids(claimed) == [kept]
    assert flow.connection.call(Length(flow.bus.keys.requests)) == 0


def test_reject_and_tokenized_race_for_a_request_and_one_wins(flow: Flow) -> None:
    first, second = flow.submitted(), flow.submitted()
    one, two = flow.hints()
    assert flow.connection.execute(
        [
            Tokenized(first, one.entry_id, b"meta", 1),
            Reject(second, two.entry_id, 0, b"finish"),
            Tokenized(second, two.entry_id, b"meta", 1),
        ]
    ) == [True, True, False]
    assert flow.connection.call(Length(flow.bus.keys.requests)) == 1


def test_a_running_request_cannot_be_rejected(flow: Flow) -> None:
    request_id = flow.running(flow.session())
    assert not flow.connection.call(Reject(request_id, b"", 0, b"finish"))
    assert flow.connection.call(Length(flow.bus.keys.tokens(0))) == 1


# --- schedulers -------------------------------------------------------------------------------------------------------


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
    )
    assert claimed[0] == flow.connection.call(Fetch(first))
    opened = flow.fields(flow.bus.keys.tokens(5))
    assert [entry[k.REQUEST] for entry in opened] == [first, second]
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
    assert loaded.requests == [flow.connection.call(Fetch(second)), flow.connection.call(Fetch(first))]
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


def strikes(flow: Flow, request_id: bytes) -> int:
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    return stored.strikes


def test_a_strike_counts_once_for_each_incarnation_of_a_worker(flow: Flow) -> None:
    scheduler = flow.session()
    struck, spared = flow.running(scheduler), flow.running(scheduler)
    for incarnation in (sid_of(101), sid_of(101), sid_of(102)):
        assert flow.connection.call(Strike(scheduler, incarnation, (struck,)))
    assert (strikes(flow, struck), strikes(flow, spared)) == (2, 0)


def test_strikes_outlive_their_scheduler(flow: Flow) -> None:
    dead, living = flow.session(), flow.session()
    request_id = flow.running(dead)
    flow.connection.call(Strike(dead, sid_of(101), (request_id,)))
    flow.expire(dead)
    flow.connection.call(Take(living, dead))
    loaded = flow.connection.call(Load(living, (request_id,)))
    assert loaded is not None
    assert loaded.requests[0].strikes == 1


def test_only_the_owner_strikes(flow: Flow) -> None:
    owner, other, dead = flow.session(), flow.session(), flow.session()
    request_id = flow.running(owner)
    assert flow.connection.call(Strike(other, sid_of(101), (request_id, id_of(99))))
    flow.expire(dead)
    flow.connection.call(Take(owner, dead))
    assert not flow.connection.call(Strike(dead, sid_of(101), (request_id,)))
    assert strikes(flow, request_id) == 0
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


# --- ends -------------------------------------------------------------------------------------------------------------


def test_retire_ends_a_request_once_and_delivers_its_last_text(flow: Flow) -> None:
    scheduler, detokenizer, gateway = flow.session(), flow.session(SessionKind.DETOKENIZER), sid_of(77)
    request_id = flow.running(scheduler, shard=4)
    flow.connection.call(LeaseShard(detokenizer, 4))
    retire = Retire(detokenizer, 4, request_id, b"result" + AWKWARD, LONG_MS, gateway, b"text" + AWKWARD)
    assert flow.connection.execute([retire, retire]) == [True, False]
    assert flow.fields(flow.bus.keys.text(gateway)) == [{k.PAYLOAD: b"text" + AWKWARD}]
    assert flow.connection.call(Owned(scheduler)) == []
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
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
    assert flow.connection.call(Retire(detokenizer, 0, request_id, b"result", LONG_MS, before, b"text"))
    assert flow.fields(flow.bus.keys.text(before)) == [{k.PAYLOAD: b"text"}]
    assert flow.fields(flow.bus.keys.text(now)) == [{k.REQUEST: request_id}]


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
            Retire(holder, 0, request_id, b"r", LONG_MS, sid_of(77), b"text"),
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


# --- attach -----------------------------------------------------------------------------------------------------------


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


# --- cancel -----------------------------------------------------------------------------------------------------------


def test_cancel_sets_the_flag_and_hints(flow: Flow) -> None:
    request_id = flow.running(flow.session())
    assert flow.connection.call(Cancel(request_id, 3, 9, "tenant"))
    assert flow.connection.call(Cancel(request_id, 4, 10))
    stored = flow.connection.call(Fetch(request_id))
    assert stored is not None
    assert stored.cancel_reason == 3, "the first cancel counts"
    hint = {k.REQUEST: request_id, k.SEQUENCE: b"-1"}
    assert flow.fields(flow.bus.keys.cancels) == [
        hint | {k.REASON: b"3", k.SENT_NS: b"9"},
        hint | {k.REASON: b"4", k.SENT_NS: b"10"},
    ]


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


# --- hints ------------------------------------------------------------------------------------------------------------


def test_an_acknowledged_hint_is_gone(flow: Flow) -> None:
    flow.submitted()
    (hint,) = flow.hints()
    keys = flow.bus.keys
    flow.connection.execute([Acknowledge(keys.prompts, k.TOKENIZERS, hint.entry_id)] * 2)
    assert flow.connection.call(Length(keys.prompts)) == 0
    assert flow.connection.call(Reclaim(keys.prompts, k.TOKENIZERS, b"tokenizer-2", 0, 10)) == []


def test_finished_hints_do_not_stand_before_those_that_wait(flow: Flow) -> None:
    keys = flow.bus.keys
    request_ids = [flow.submitted() for _ in range(3)]
    first, second, third = flow.hints()
    flow.connection.execute(
        [
            Tokenized(request_ids[0], first.entry_id, b"meta", 1),
            Acknowledge(keys.prompts, k.TOKENIZERS, second.entry_id),
        ]
    )
    assert flow.connection.call(Reclaim(keys.prompts, k.TOKENIZERS, b"tokenizer-2", 0, 1)) == [third]


def test_each_hint_goes_to_one_tokenizer_until_it_waited_too_long(flow: Flow) -> None:
    keys = flow.bus.keys
    first, second = flow.submitted(), flow.submitted()
    (one,) = flow.connection.call(ReadGroup(keys.prompts, k.TOKENIZERS, b"tokenizer-1", 1))
    (two,) = flow.connection.call(ReadGroup(keys.prompts, k.TOKENIZERS, b"tokenizer-2", 9))
    assert (one.fields[k.REQUEST], two.fields[k.REQUEST]) == (first, second)
    assert flow.connection.call(Reclaim(keys.prompts, k.TOKENIZERS, b"tokenizer-3", LONG_MS, 10)) == []
    assert flow.connection.call(Reclaim(keys.prompts, k.TOKENIZERS, b"tokenizer-3", 0, 1)) == [one]
    assert flow.connection.call(Reclaim(keys.prompts, k.TOKENIZERS, b"tokenizer-3", 0, 10)) == [one, two]


def test_hints_that_a_consumer_was_given_can_be_read_again_until_they_are_acknowledged(flow: Flow) -> None:
    stream, connection = flow.bus.keys.prompts, flow.connection
    again = ReadGroup(stream, k.TOKENIZERS, b"tokenizer-1", 10, pending=True)
    assert connection.call(again) == []
    for _ in range(3):
        flow.submitted()
    given = connection.call(ReadGroup(stream, k.TOKENIZERS, b"tokenizer-1", 2))
    connection.call(ReadGroup(stream, k.TOKENIZERS, b"tokenizer-2", 10))
    assert connection.call(again) == connection.call(again) == given
    connection.call(Acknowledge(stream, k.TOKENIZERS, given[0].entry_id))
    assert connection.call(again) == given[1:]
    assert connection.call(Reclaim(stream, k.TOKENIZERS, b"tokenizer-2", 0, 1)) == given[1:]
    assert connection.call(again) == []


def test_reclaim_makes_its_group(flow: Flow) -> None:
    assert flow.connection.call(Reclaim(flow.bus.keys.prompts, k.TOKENIZERS, b"tokenizer-1", 0, 10)) == []
    request_id = flow.submitted()
    assert [hint.fields[k.REQUEST] for hint in flow.hints()] == [request_id]


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
