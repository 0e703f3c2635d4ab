"""A server that comes back may have lost its last writes: the gateway knows what its clients have."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from running_gateway import RunningGateway, eventually
from scripted_pipeline import ERROR, STOP, Incoming, batch

from contract.domain import chain
from contract.domain.finish import FinishReason
from contract.domain.rows import TextRow
from contract.v1 import common_pb2, text_pb2
from gateway_svc.call import ClientCall, NoClient
from gateway_svc.core.ask import Form
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.streams import ClientStream, DeliveredSequence
from gateway_svc.witness import REMEMBERED_S, Witness
from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Append,
    Attach,
    Cancel,
    Fetch,
    KeepPromptOutput,
    RequestState,
    Revalidate,
    StoredRequest,
    Submit,
)

BODY = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 4096}
ID = b"r" * 16


def packed(*token_ids: int) -> bytes:
    return np.array(token_ids, "<u4").tobytes()


def post(gateway: RunningGateway, **fields: Any) -> list[dict[str, Any]]:
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        body = http.post("/v1/completions", json={**BODY, **fields}).raise_for_status().content
    chunks = [chunk.rpartition(b"data: ")[2] for chunk in body.split(b"\n\n") if chunk]
    return [json.loads(chunk) for chunk in chunks if chunk != b"[DONE]"]


def restart(gateway: RunningGateway, losing: bytes | None = None) -> None:
    """The server dies and comes back, perhaps without a request."""
    gateway.bus.stop()
    if losing is not None:
        gateway.bus.server.store.delete(gateway.bus.keys.request(losing))  # it loses nothing by itself
    gateway.bus.start()


def stored(gateway: RunningGateway, request_id: bytes) -> StoredRequest | None:
    return gateway.pipeline.call(Fetch(request_id))


# --- a gateway and a bus ----------------------------------------------------------------------------------------------


def test_a_restarted_server_is_told_what_clients_have(gateway: RunningGateway) -> None:
    witnesses: list[tuple[bytes, ...]] = []

    def script(request: Incoming) -> None:
        request.send(request.row("ab", [5, 6]), request.row("c", [7], sequence=1))
        eventually(lambda: gateway.service.stats.num_tokens == 3)
        restart(gateway)
        gateway.pipeline.attaches()
        found = stored(gateway, request.request_id)
        assert found is not None
        witnesses.append(found.witness)
        request.send(request.row("d", [8], finish=STOP), request.row("e", [9], sequence=1, finish=STOP))

    gateway.pipeline.script = script
    chunks = post(gateway, n=2)
    assert ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in (0, 1)] == [
        "abd",
        "ce",
    ]
    assert witnesses == [(packed(5, 6), packed(7))]


def test_text_that_was_read_before_the_server_was_lost_is_not_delivered_afterwards(gateway: RunningGateway) -> None:
    delivery = gateway.service.pools.all[0].delivery
    deliver = delivery.deliver
    offsets: list[text_pb2.AttachOffsets] = []

    def deliver_and_lose(rows: Sequence[TextRow], now_s: float) -> None:
        delivery.deliver = deliver  # type: ignore[method-assign]
        deliver(rows, now_s)
        gateway.service.pools.all[0].link.suspend()

    def script(request: Incoming) -> None:
        delivery.deliver = deliver_and_lose  # type: ignore[method-assign]
        stream = request.pipeline.bus.keys.text(request.route)
        first, second = request.row("a", [5]), request.row("b", [6], finish=STOP)
        appends = [Append(stream, {k.PAYLOAD: batch([each]).SerializeToString()}) for each in (first, second)]
        gateway.bus.connect().execute(appends)  # both come with one read
        offsets.extend(gateway.pipeline.attaches())
        request.send(second)

    gateway.pipeline.script = script
    chunks = post(gateway)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    assert offsets[0].token_offsets == packed(1), "the second batch is let go, and asked for again"


def test_what_clients_have_is_told_before_the_session_is_active_again(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, told = gateway.bus.apply, []

    def recording(calls: Any, wake: Any) -> Any:
        told.extend(call for call in calls if isinstance(call, Submit | Revalidate | Attach))
        return apply(calls, wake)

    def script(request: Incoming) -> None:
        request.send(request.row("a"))
        eventually(lambda: gateway.service.stats.num_tokens >= 1)

    gateway.pipeline.script = script
    gateway_sid = gateway.service.pools.all[0].link.sid
    clients = [threading.Thread(target=post, args=(gateway,)) for _ in range(3)]
    for client in clients:
        client.start()
    eventually(lambda: gateway.service.stats.num_tokens == 3)
    monkeypatch.setattr(gateway.bus, "apply", recording)
    restart(gateway)
    gateway.pipeline.attaches(3)
    for request in gateway.pipeline.incoming:
        request.say("b")
    for client in clients:
        client.join()
    mine = [type(each) for each in told if not isinstance(each, Revalidate) or each.sid == gateway_sid]
    assert mine == [Submit] * 3 + [Revalidate] + [Attach] * 3


def test_a_request_that_the_server_lost_is_submitted_again_behind_its_tokens(gateway: RunningGateway) -> None:
    again: list[Incoming] = []

    def script(request: Incoming) -> None:
        if again:
            # As a scheduler that goes on behind the witness.
            request.row("ab", [5, 6])
            request.send(request.row("c", [7], finish=STOP))
            return
        again.append(request)
        request.send(request.row("ab", [5, 6]))
        eventually(lambda: gateway.service.stats.num_tokens == 2)
        restart(gateway, losing=request.request_id)

    gateway.pipeline.script = script
    assert "".join(chunk["choices"][0]["text"] for chunk in post(gateway)) == "abc"
    first, second = gateway.pipeline.incoming
    assert (second.request_id, second.body) == (first.request_id, first.body)
    found = stored(gateway, first.request_id)
    assert found is not None
    assert found.witness == (packed(5, 6),)


def test_a_request_that_has_just_ended_ends_again_as_it_had(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.witness.REMEMBERED_S", 600.0)
    gateway.pipeline.script = lambda request: request.say("a", "b")
    post(gateway)
    (request,) = gateway.pipeline.wait_for()
    gateway.pipeline.script = lambda request: None
    restart(gateway, losing=request.request_id)
    eventually(lambda: stored(gateway, request.request_id) is not None)
    found = stored(gateway, request.request_id)
    assert found is not None
    assert found.witness == (packed(*request.spoken[0].token_ids),)


def test_a_cancel_that_was_just_sent_is_sent_again(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway_svc.witness.REMEMBERED_S", 600.0)
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with (
        httpx.Client(base_url=gateway.url, timeout=300) as http,
        http.stream("POST", "/v1/completions", json=BODY) as stream,
    ):
        next(stream.iter_raw())
    (request,) = gateway.pipeline.wait_for()
    assert gateway.pipeline.cancels() == [(request.request_id, 1)]
    restart(gateway, losing=request.request_id)
    assert gateway.pipeline.cancels(2) == [(request.request_id, 1)] * 2
    found = stored(gateway, request.request_id)
    assert found is not None
    assert (found.cancel_reason, found.witness) == (1, (packed(*request.spoken[0].token_ids),))


def test_a_new_request_waits_for_a_server_that_is_away(gateway: RunningGateway) -> None:
    gateway.bus.stop()
    eventually(lambda: not gateway.service.is_ready())
    link = gateway.service.pools.all[0].link
    back_within = link.back_within

    async def come_back_and_wait(seconds: float) -> bool:
        link.back_within = back_within  # type: ignore[method-assign]
        gateway.bus.start()
        return await back_within(seconds)

    link.back_within = come_back_and_wait  # type: ignore[method-assign]
    assert [chunk["choices"][0]["text"] for chunk in post(gateway)][:2] == ["Hello", " world"]
    assert len(gateway.pipeline.incoming) == 1


def test_a_submit_whose_answer_was_lost_is_sent_again_and_served_once(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.pipeline.follows = True
    apply, losses = gateway.bus.apply, []

    def lossy(calls: Any, wake: Any) -> Any:
        answers = apply(calls, wake)
        if any(isinstance(call, Submit) for call in calls) and not losses:
            losses.append(calls)
            gateway.bus.stop()
            gateway.bus.start()
        return answers

    monkeypatch.setattr(gateway.bus, "apply", lossy)
    assert "".join(chunk["choices"][0]["text"] for chunk in post(gateway)) == "Hello world"
    assert len(losses) == len(gateway.pipeline.incoming) == 1


def test_a_continuation_of_another_history_is_an_error_and_cancelled(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("a"))
        diverged = common_pb2.Error(code=common_pb2.ERROR_CODE_STREAM_DIVERGED, message="begin anew")
        request.send(request.row("", [], finish=ERROR, error=diverged))

    gateway.pipeline.script = script
    assert post(gateway)[-1]["error"]["code"] == "stream_diverged"
    assert gateway.pipeline.cancels() == [(gateway.pipeline.wait_for()[0].request_id, 1)]


def test_patience_ends_with_a_503(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch(outage_patience_s=0.1)
    gateway.bus.stop()
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        reply = http.post("/v1/completions", json=BODY)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
    gateway.bus.start()


# --- what is remembered -----------------------------------------------------------------------------------------------


def call_of(stream: ClientStream) -> ClientCall:
    form = ReplyForm((ID,), len(stream.sequences), Form.COMPLETION, "m", 0, 0, 0)
    call = ClientCall(form, "t", NoClient(), route=b"old", now_s=0.0, came_ms=0)
    call.is_submitted = True
    (served,) = call.served
    served.stream = stream
    served.submission = Submit(ID, "t", b"header", b"body", b"digest", b"old", 1)
    return call


def row(token_ids: list[int], before: list[int], finish: FinishReason = FinishReason.UNSPECIFIED) -> TextRow:
    known = chain.extend(chain.CHAIN_START, before)
    return TextRow(ID, 0, len(before), len(before), known, tuple(token_ids), "x" * len(token_ids), finish=finish)


def test_a_restarted_server_is_told_the_tokens_of_now_and_the_route_of_now() -> None:
    witness, stream = Witness(time.monotonic), ClientStream(1)
    call = call_of(stream)
    stream.accept(row([5, 6], []))
    assert [each.witness for each in witness.restart_calls(call.served, b"new") if isinstance(each, Submit)] == [
        (packed(5, 6),)
    ]
    stream.accept(row([7], [5, 6]))
    call.served[0].model_digest = b"model---"
    (submit,) = witness.restart_calls(call.served, b"new")
    assert isinstance(submit, Submit)
    assert submit.model_digest == b"model---"
    assert (submit.witness, submit.route, submit.digest) == ((packed(5, 6, 7),), b"new", b"digest")


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_restarted_server_is_told_the_logprobs_of_a_prompt_after_its_request(has_ended: bool) -> None:
    witness, stream = Witness(time.monotonic), ClientStream(1)
    (served,) = call_of(stream).served
    stream.accept(row([5], [], FinishReason.STOP if has_ended else FinishReason.UNSPECIFIED))
    if has_ended:
        witness.end(served)
    served.prompt_output = kept = KeepPromptOutput(ID, b"model---", b"logprobs")  # read a moment after the end
    submit, told = witness.restart_calls([] if has_ended else [served], b"new")
    assert isinstance(submit, Submit)
    assert told is kept


def test_what_is_not_submitted_yet_or_was_submitted_elsewhere_is_no_part_of_it() -> None:
    witness = Witness(time.monotonic)
    early, foreign = call_of(ClientStream(1)), call_of(ClientStream(1))
    early.is_submitted, foreign.served[0].submission = False, None
    assert witness.restart_calls([*early.served, *foreign.served], b"new") == []


@pytest.mark.parametrize(
    ("finish", "is_remembered"),
    [
        (FinishReason.STOP, True),
        (FinishReason.LENGTH, True),
        (FinishReason.ERROR, False),
        (FinishReason.CANCELLED, False),
        (FinishReason.UNSPECIFIED, False),
    ],
)
def test_only_what_has_ended_well_is_remembered(finish: FinishReason, is_remembered: bool) -> None:
    witness, stream = Witness(time.monotonic), ClientStream(1)
    stream.accept(row([5], [], finish))
    (served,) = call_of(stream).served
    witness.end(served)
    assert bool(witness.restart_calls([], b"new")) == is_remembered


def test_it_is_forgotten_after_a_while_of_a_server_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = heard_s = 100.0
    monkeypatch.setattr("gateway_svc.witness.time.monotonic", lambda: now_s)
    witness, stream = Witness(lambda: heard_s), ClientStream(1)
    stream.accept(row([5], [], FinishReason.STOP))
    witness.end(call_of(stream).served[0])
    witness.cancel([Cancel(ID, 1, 1)])
    now_s += 60.0  # the server is away
    witness.cancel([Cancel(ID, 1, 1)])
    assert len(witness.restart_calls([], b"new")) == 3
    heard_s += REMEMBERED_S
    assert len(witness.restart_calls([], b"new")) == 3
    heard_s += 0.1
    assert len(witness.restart_calls([], b"new")) == 1
    heard_s += 60.0
    assert witness.restart_calls([], b"new") == []


def test_the_tokens_of_a_client_that_came_with_some_are_told_if_it_got_them_here() -> None:
    known = chain.extend(chain.CHAIN_START, [5, 6])
    before, other = ClientStream(1), ClientStream(1)
    before.accept(row([5, 6, 7], []))
    other.accept(row([8, 9, 7], []))

    def resumed() -> ClientStream:
        return ClientStream(1, [DeliveredSequence(2, 2, known, claim=2)])

    stranger, mistaken, returning = resumed(), resumed(), resumed()
    mistaken.remember(other)
    returning.remember(before)
    for stream in (stranger, mistaken, returning):
        stream.accept(row([7], [5, 6]))
    assert [stream.witness() for stream in (stranger, mistaken, returning)] == [(b"",), (b"",), (packed(5, 6, 7),)]


def test_a_request_that_ended_stays_ended(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        last = request.row("a", finish=STOP)
        request.retire(last)

    gateway.pipeline.script = script
    post(gateway)
    (request,) = gateway.pipeline.wait_for()
    restart(gateway)
    eventually(gateway.service.is_ready)
    found = stored(gateway, request.request_id)
    assert found is not None
    assert (found.state, found.witness) == (RequestState.ENDED, ())
