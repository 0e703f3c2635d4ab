"""From a request's submit until its tokens are known, or it is rejected."""

from bus_flow import AWKWARD, Flow, id_of, ids, sid_of, submit

from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Append,
    Claim,
    Fetch,
    Length,
    Reclaim,
    Reject,
    RequestState,
    StoredRequest,
    SubmitOutcome,
    Tokenized,
)


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
        struck_at=0,
        prompt=b"prompt" + AWKWARD,
    )
    copy = {k.HEADER: b"header" + AWKWARD, k.BODY: b"body" + AWKWARD, k.PROMPT: b"prompt" + AWKWARD}
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
