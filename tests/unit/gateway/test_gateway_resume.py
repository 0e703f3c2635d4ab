"""Clients that lose their connection and go on behind their last event, through this gateway or another."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from running_gateway import RunningGateway, eventually
from scripted_pipeline import CANCELLED, LENGTH, STOP, Incoming

from penstock.domain import chain
from penstock.domain.api_keys import hash_api_key
from penstock.v1 import common_pb2, inference_pb2, inference_pb2_grpc, requests_pb2
from servicekit.bus.calls import (
    Attach,
    Fetch,
    Hello,
    Recall,
    Recalled,
    Revalidate,
    SessionKind,
    Submit,
    SubmitOutcome,
)

Launch = Callable[..., RunningGateway]
BODY = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 4096}
RESUMABLE = {"x-penstock-resumable": "true"}


@pytest.fixture
def launch(launch: Launch) -> Launch:
    """With a pipeline that sees to re-attachments by itself."""

    def start(beside: RunningGateway | None = None, **settings: Any) -> RunningGateway:
        gateway = launch(beside, **settings)
        gateway.pipeline.follows = True
        return gateway

    return start


def silent(request: Incoming) -> None:
    """What is said is said by the test."""


@dataclass
class Heard:
    """What came of a stream."""

    status: int = 0
    request_id: str = ""
    texts: list[str] = field(default_factory=list)  # by choice
    last_event_id: str = ""
    finishes: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    error: str = ""
    num_events: int = 0
    is_done: bool = False

    def take(self, line: str) -> None:
        name, _, value = line.partition(": ")
        if name == "id":
            self.last_event_id = value
        if name != "data":
            return
        self.num_events += 1
        if value == "[DONE]":
            self.is_done = True
            return
        chunk = json.loads(value)
        self.error = chunk.get("error", {}).get("code", "") or self.error
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", []):
            index = choice["index"]
            self.texts += [""] * (index + 1 - len(self.texts))
            delta = choice.get("delta", choice)
            self.texts[index] += delta.get("content", delta.get("text")) or ""
            if choice["finish_reason"]:
                self.finishes[index] = choice["finish_reason"]


@contextmanager
def streaming(
    gateway: RunningGateway, path: str = "/v1/completions", *, headers: dict[str, str] | None = None, **fields: Any
) -> Iterator[tuple[Heard, Iterator[str]]]:
    """A stream that is read line by line as far as the test likes: `hear`; then its connection ends."""
    given = {"headers": headers or {}}
    method = "GET" if path.endswith("/events") else "POST"
    if method == "POST":
        given["json"] = {**BODY, **fields}
    with httpx.Client(base_url=gateway.url, timeout=20) as http, http.stream(method, path, **given) as reply:
        heard = Heard(reply.status_code, reply.headers.get("x-request-id", ""))
        if reply.status_code != 200:
            heard.error = json.loads(reply.read())["error"]["code"]
        yield heard, reply.iter_lines()


def hear(heard: Heard, lines: Iterator[str], until: Callable[[], bool] = lambda: False) -> Heard:
    if not until():
        for line in lines:
            heard.take(line)
            if until():
                break
    return heard


def begun(gateway: RunningGateway, *texts: str, headers: dict[str, str] | None = None, **fields: Any) -> Heard:
    """A stream whose connection broke when it had these texts."""
    index = len(gateway.pipeline.incoming)
    gateway.pipeline.script = lambda request: [request.send(request.row(text)) for text in texts] and None
    with streaming(gateway, headers=RESUMABLE | (headers or {}), **fields) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["".join(texts)])
    gateway.pipeline.script = silent
    assert gateway.pipeline.incoming[index].request_id.hex() == heard.request_id
    return heard


def events(gateway: RunningGateway, first: Heard, *, headers: dict[str, str] | None = None) -> Any:
    """The rest of a stream, through a gateway, behind its last event."""
    given = {"last-event-id": first.last_event_id} if first.last_event_id else {}
    return streaming(gateway, f"/v1/requests/{first.request_id}/events", headers=given | (headers or {}))


@pytest.fixture
def other(launch: Launch, gateway: RunningGateway) -> RunningGateway:
    """A second gateway of the pool."""
    return launch(gateway)


@pytest.fixture(params=["same", "other"])
def second(request: pytest.FixtureRequest, gateway: RunningGateway) -> RunningGateway:
    """Where the client comes back."""
    return gateway if request.param == "same" else request.getfixturevalue("other")


# --- over HTTP --------------------------------------------------------------------------------------------------------


def test_a_broken_stream_goes_on_behind_its_last_event(gateway: RunningGateway, second: RunningGateway) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.incoming
    request.send(request.row("c"))  # for nobody
    request.afterwards.append(lambda: request.say("d", finish=STOP))
    with events(second, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.finishes, heard.is_done) == (["cd"], {0: "stop"}, True)
    assert heard.request_id == first.request_id
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []
    assert second.service.stats.num_resumes == 1


def test_without_an_event_id_a_stream_is_told_from_its_start(gateway: RunningGateway, other: RunningGateway) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.incoming
    first.last_event_id = ""
    request.afterwards.append(lambda: request.say("c"))
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert heard.texts == ["abc"]


def test_it_goes_on_in_the_shape_and_with_the_usage_that_was_asked_for(
    gateway: RunningGateway, other: RunningGateway
) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"), request.row("x", sequence=1))
    chat = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "stream_options": {"include_usage": True}}
    body = BODY | chat
    del body["prompt"]
    with httpx.Client(base_url=gateway.url, timeout=20) as http:
        first = Heard()
        with http.stream("POST", "/v1/chat/completions", json=body, headers=RESUMABLE) as reply:
            first.request_id = reply.headers["x-request-id"]
            hear(first, reply.iter_lines(), lambda: first.texts == ["a", "x"])
    (request,) = gateway.pipeline.incoming
    request.send(request.row("y", sequence=1, finish=LENGTH))
    request.afterwards.append(lambda: request.send(request.row("b", finish=STOP)))
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.finishes) == (["b", "y"], {0: "stop", 1: "length"})
    assert heard.usage is not None
    assert heard.usage["completion_tokens"] == 4


def test_a_sample_that_had_ended_is_not_told_again(gateway: RunningGateway, other: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("a", finish=STOP), request.row("x", sequence=1))

    gateway.pipeline.script = script
    with streaming(gateway, headers=RESUMABLE, n=2) as (first, lines):
        hear(first, lines, lambda: first.texts == ["a", "x"])
    (request,) = gateway.pipeline.incoming
    request.afterwards.append(lambda: request.send(request.row("y", sequence=1, finish=STOP)))
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.finishes) == (["", "y"], {1: "stop"})


def test_a_finished_request_is_told_from_its_result(gateway: RunningGateway, second: RunningGateway) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.incoming
    request.row("c", finish=STOP)
    assert request.retire()
    with events(second, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.finishes, heard.is_done) == (["c"], {0: "stop"}, True)
    # And again: behind the end there is only the usage, if it was asked for.
    with events(second, heard) as (again, lines):
        hear(again, lines)
    assert (again.texts, again.is_done, again.num_events) == ([], True, 1)


def test_who_had_everything_is_told_the_usage_again(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        row = request.row("a", finish=STOP)
        assert request.retire(row)

    gateway.pipeline.script = script
    with streaming(gateway, stream_options={"include_usage": True}) as (first, lines):
        hear(first, lines)
    with events(gateway, first) as (again, lines):
        hear(again, lines)
    assert again.texts == []
    assert again.usage == first.usage != None  # noqa: E711


def test_several_prompts_go_on_together(gateway: RunningGateway, other: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, headers=RESUMABLE, prompt=["x", "y"]) as (first, lines):
        hear(first, lines, lambda: first.texts == ["a", "a"])
    one, two = sorted(gateway.pipeline.incoming, key=lambda request: request.request_id.hex() != first.request_id)
    one.afterwards.append(lambda: one.say("b"))
    two.afterwards.append(lambda: two.say("c"))
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.is_done) == (["b", "c"], True)


def test_each_prompts_request_leads_to_the_whole_call(gateway: RunningGateway, other: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, headers=RESUMABLE, prompt=["x", "y", "z"]) as (first, lines):
        hear(first, lines, lambda: first.texts == ["a", "a", "a"])
    ids = {request.request_id for request in gateway.pipeline.incoming}
    last = next(each.hex() for each in ids if each.hex() != first.request_id)
    found = httpx.get(f"{other.url}/v1/requests/{last}").json()
    assert (found["id"], found["state"]) == (f"cmpl-{first.request_id}", "running")
    assert httpx.delete(f"{other.url}/v1/requests/{last}").status_code == 200
    assert {request_id for request_id, _ in gateway.pipeline.cancels(3)} == ids


@pytest.mark.parametrize("num_prompts", [3, 33], ids=["with event ids", "more choices than event ids have room for"])
def test_prompts_of_which_some_have_ended_go_on_together(
    gateway: RunningGateway, second: RunningGateway, num_prompts: int
) -> None:
    """What came again comes once where events have ids, and from the start where they have none."""

    def script(request: Incoming) -> None:
        is_last = request.body.text == prompts[-1]
        rows = [request.row("a", finish=0 if is_last else STOP)]
        request.send(*rows) if is_last else request.retire(*rows)

    prompts = [f"p{index}" for index in range(num_prompts)]
    gateway.pipeline.script = script
    usage = {"include_usage": True}
    with streaming(gateway, headers=RESUMABLE, prompt=prompts, stream_options=usage) as (first, lines):
        hear(first, lines, lambda: first.texts == ["a"] * num_prompts and len(first.finishes) == num_prompts - 1)
    (last,) = [request for request in gateway.pipeline.incoming if request.body.text == prompts[-1]]
    last.row("b", finish=STOP)
    assert last.retire()
    with events(second, first) as (heard, lines):
        hear(heard, lines)
    has_ids = num_prompts == 3
    assert bool(first.last_event_id) == has_ids
    assert heard.texts == ([""] * (num_prompts - 1) + ["b"] if has_ids else ["a"] * (num_prompts - 1) + ["ab"])
    assert heard.is_done
    assert heard.usage is not None
    assert heard.usage["completion_tokens"] == num_prompts + 1


def test_a_request_waits_for_its_client_and_is_cancelled_when_the_grace_is_over(launch: Launch) -> None:
    gateway = launch(resume_grace_s=0.3)
    begun(gateway, "a")
    assert gateway.pipeline.cancels() == [(gateway.pipeline.incoming[0].request_id, 1)]
    eventually(lambda: gateway.service.stats.num_streams == gateway.service.stats.num_detached == 0)


def test_where_the_gateway_is_set_so_every_request_waits(launch: Launch) -> None:
    gateway = launch(resumable=True)
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["a"])
    eventually(lambda: gateway.service.stats.num_detached == 1)
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


def test_the_body_can_ask_for_it_too(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, resumable=True) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["a"])
    eventually(lambda: gateway.service.stats.num_detached == 1)


def test_a_request_that_ends_while_its_client_is_gone_is_over(gateway: RunningGateway) -> None:
    begun(gateway, "a")
    eventually(lambda: gateway.service.stats.num_detached == 1)
    gateway.pipeline.incoming[0].say("b")
    eventually(lambda: gateway.service.stats.num_streams == gateway.service.stats.num_detached == 0)
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


def test_who_still_follows_is_told_that_another_call_does(gateway: RunningGateway, second: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, headers=RESUMABLE) as (first, first_lines):
        hear(first, first_lines, lambda: first.texts == ["a"])
        (request,) = gateway.pipeline.incoming
        request.afterwards.append(lambda: request.say("b"))
        with events(second, first) as (heard, lines):
            hear(heard, lines)
        hear(first, first_lines)
    assert (first.error, first.texts, first.is_done) == ("superseded", ["a"], True)
    assert (heard.texts, heard.is_done) == (["b"], True)
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


def test_a_gateway_that_waits_for_a_client_is_told_that_it_came_back_elsewhere(
    gateway: RunningGateway, other: RunningGateway
) -> None:
    first = begun(gateway, "a")
    (request,) = gateway.pipeline.incoming
    eventually(lambda: gateway.service.stats.num_detached == 1)
    request.afterwards.append(lambda: request.send(request.row("b")))
    with events(other, first) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["b"])
        eventually(lambda: gateway.service.stats.num_streams == gateway.service.stats.num_detached == 0)
        request.say("c")
        hear(heard, lines)
    assert (heard.texts, heard.is_done) == (["bc"], True)
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


def test_back_and_forth_between_gateways(gateway: RunningGateway, other: RunningGateway) -> None:
    heard = begun(gateway, "a")
    (request,) = gateway.pipeline.incoming
    for turn, text in enumerate("bcde"):
        request.send(request.row(text))  # for nobody, or for who does not listen any more
        with events((other, gateway)[turn % 2], heard) as (heard, lines):
            hear(heard, lines, lambda heard=heard, text=text: heard.texts == [text])
    request.afterwards.append(lambda: request.say("f"))
    with events(other, heard) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.is_done) == (["f"], True)


def test_a_gateway_that_is_drained_leaves_its_resumable_requests_to_another(launch: Launch) -> None:
    gateway = launch()
    other = launch(gateway)
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, headers=RESUMABLE) as (first, first_lines):
        hear(first, first_lines, lambda: first.texts == ["a"])
        gateway.stop.end()
        hear(first, first_lines)
    assert first.error == "unavailable"
    (request,) = gateway.pipeline.incoming
    request.afterwards.append(lambda: request.say("b"))
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.is_done) == (["b"], True)
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


def test_who_comes_back_while_the_server_is_away_waits_for_it(gateway: RunningGateway, other: RunningGateway) -> None:
    first = begun(gateway, "a")
    (request,) = gateway.pipeline.incoming
    request.afterwards.append(lambda: request.say("b"))
    gateway.bus.stop()
    eventually(lambda: not other.service.is_ready())
    threading.Timer(0.3, gateway.bus.start).start()
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.is_done) == (["b"], True)


def lose(gateway: RunningGateway, request: Incoming) -> Submit:
    """The server is restarted without a request; the submit with which it can be made again."""
    stored = gateway.pipeline.call(Fetch(request.request_id))
    recalled = gateway.pipeline.call(Recall(request.request_id, ""))
    assert stored is not None
    assert isinstance(recalled, Recalled)
    gateway.bus.stop()
    del gateway.bus._pool._requests[request.request_id]
    gateway.bus.start()
    digest = hashlib.blake2b(b"1:" + stored.body, digest_size=16).digest()
    reply, tokens = recalled.reply, np.array(request.spoken[0].token_ids, "<u4").tobytes()
    return Submit(
        *(request.request_id, "", stored.header, stored.body, digest, stored.route, 1, reply), witness=(tokens,)
    )


def test_the_gateway_to_which_a_client_came_tells_a_restarted_server_what_it_has(
    gateway: RunningGateway, second: RunningGateway
) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.incoming
    request.afterwards.append(lambda: request.say("c", finish=0))
    with events(second, first) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["c"])
        lost = lose(gateway, request)
        eventually(lambda: gateway.pipeline.call(Fetch(request.request_id)) is not None)
        found = gateway.pipeline.call(Fetch(request.request_id))
        assert found is not None
        assert len(request.spoken[0].token_ids) == 3
        assert (found.witness, found.header, found.body) == (lost.witness, lost.header, lost.body)


def test_who_comes_back_before_the_server_knows_the_request_again_waits(gateway: RunningGateway) -> None:
    first = begun(gateway, "a")
    (request,) = gateway.pipeline.incoming
    # Another gateway has it, and takes its time.
    ghost = Hello(b"g" * 16, SessionKind.GATEWAY, "ghost", "", 600_000)
    assert gateway.pipeline.call(ghost).active
    gateway.pipeline.call(Attach(request.request_id, "", ghost.sid, b""))
    eventually(lambda: gateway.service.stats.num_streams == 0)
    again = lose(gateway, request)
    request.afterwards.append(lambda: request.say("b"))
    answers: list[Heard] = []

    def come_back() -> None:
        with events(gateway, first) as (heard, lines):
            answers.append(hear(heard, lines))

    client = threading.Thread(target=come_back)
    client.start()
    eventually(gateway.service.is_ready)
    assert gateway.pipeline.call(again) is SubmitOutcome.CREATED
    assert gateway.pipeline.call(Revalidate(ghost.sid, 600_000))
    client.join()
    assert [(heard.status, heard.texts, heard.is_done) for heard in answers] == [(200, ["b"], True)]


# --- ids that do not fit ----------------------------------------------------------------------------------------------


def test_damaged_and_foreign_event_ids_are_refused(gateway: RunningGateway) -> None:
    first, foreign = begun(gateway, "a"), begun(gateway, "b")
    damaged = first.last_event_id[:9] + ("A" if first.last_event_id[9] != "A" else "B") + first.last_event_id[10:]
    for event_id in (damaged, foreign.last_event_id, "", "nonsense"):
        with streaming(gateway, f"/v1/requests/{first.request_id}/events", headers={"last-event-id": event_id}) as (
            heard,
            _,
        ):
            assert (heard.status, heard.error) == (400, "invalid_argument")


def test_an_event_id_of_another_history_diverges(gateway: RunningGateway, other: RunningGateway) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.incoming
    request.spoken[0].token_ids[0] = 7  # the server lost it, and it was generated anew
    request.spoken[0].chain = chain.extend(chain.CHAIN_START, request.spoken[0].token_ids)
    request.send(request.row("c"))
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.error, heard.texts) == ("stream_diverged", [])


def test_a_result_of_another_history_diverges(gateway: RunningGateway, other: RunningGateway) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.incoming
    request.spoken[0].token_ids[0] = 7
    request.row("c", finish=STOP)
    assert request.retire()
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.status, heard.error) == (500, "stream_diverged")


def test_unknown_requests_and_wrong_ids(http: httpx.Client) -> None:
    for path in ("/v1/requests/{}/events", "/v1/requests/{}"):
        assert http.get(path.format("0" * 32)).json()["error"]["code"] == "not_found"
        assert http.get(path.format("x")).json()["error"]["code"] == "invalid_argument"


def test_the_header_says_true_or_false(http: httpx.Client) -> None:
    reply = http.post("/v1/completions", json=BODY, headers={"x-penstock-resumable": "maybe"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-penstock-resumable")


# --- what a request is asked about ------------------------------------------------------------------------------------


def test_a_request_tells_where_it_is_and_what_came_of_it(gateway: RunningGateway, other: RunningGateway) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.incoming
    url = f"{other.url}/v1/requests/{first.request_id}"
    found = httpx.get(url).json()
    assert (found["state"], found["reply"], found["error"]) == ("running", None, None)
    request.row("c", finish=STOP)
    assert request.retire()
    found = httpx.get(url).json()
    assert found["state"] == "ended"
    assert found["reply"]["choices"][0]["text"] == "abc"
    assert found["reply"]["usage"]["completion_tokens"] == 3
    assert found["reply"]["id"] == found["id"] == f"cmpl-{first.request_id}"


def test_a_request_that_failed_tells_why(gateway: RunningGateway) -> None:
    first = begun(gateway, "a")
    (request,) = gateway.pipeline.incoming
    request.row("", finish=CANCELLED)
    assert request.retire()
    found = httpx.get(f"{gateway.url}/v1/requests/{first.request_id}").json()
    assert (found["state"], found["reply"], found["error"]["code"]) == ("ended", None, "cancelled")
    with events(gateway, first) as (heard, _):
        assert (heard.status, heard.error) == (499, "cancelled")


# --- idempotency keys -------------------------------------------------------------------------------------------------

KEY = {"idempotency-key": "order-66"}


def test_a_retried_stream_is_the_same_request(gateway: RunningGateway, second: RunningGateway) -> None:
    first = begun(gateway, "a", headers=KEY)
    (request,) = gateway.pipeline.incoming
    request.afterwards.append(lambda: request.say("b"))
    with streaming(second, headers=KEY) as (heard, lines):
        hear(heard, lines)
    assert (heard.request_id, heard.texts) == (first.request_id, ["ab"])
    assert len(gateway.pipeline.incoming) == 1
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


def test_several_prompts_are_the_same_requests_when_they_are_sent_again(
    gateway: RunningGateway, second: RunningGateway
) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row(request.body.text))
    with streaming(gateway, headers=KEY, prompt=["x", "y"]) as (first, lines):
        hear(first, lines, lambda: first.texts == ["x", "y"])
    for request in gateway.pipeline.incoming:
        request.afterwards.append(lambda request=request: request.say("b"))
    with streaming(second, headers=KEY, prompt=["x", "y"]) as (heard, lines):
        hear(heard, lines)
    assert (heard.request_id, heard.texts, heard.is_done) == (first.request_id, ["xb", "yb"], True)
    for request in gateway.pipeline.incoming:
        assert request.retire()
    body = BODY | {"stream": False, "prompt": ["x", "y"]}
    reply = httpx.post(f"{second.url}/v1/completions", json=body, headers=KEY).json()
    assert [choice["text"] for choice in reply["choices"]] == ["xb", "yb"]
    assert len(gateway.pipeline.incoming) == 2


def test_a_retried_plain_reply_is_the_same_before_and_after_its_end(
    gateway: RunningGateway, second: RunningGateway
) -> None:
    gateway.pipeline.script = lambda request: request.retire(request.row("a", finish=STOP)) and None
    body = BODY | {"stream": False, "n": 1}
    replies = [httpx.post(f"{each.url}/v1/completions", json=body, headers=KEY) for each in (gateway, second, second)]
    assert [reply.status_code for reply in replies] == [200] * 3
    assert replies[0].json() == replies[1].json() == replies[2].json()
    assert len(gateway.pipeline.incoming) == 1


def test_another_body_with_the_same_key_is_a_conflict_and_disturbs_nobody(
    gateway: RunningGateway, second: RunningGateway
) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, headers=KEY) as (first, lines):
        hear(first, lines, lambda: first.texts == ["a"])
        for other_body in ({"prompt": "y"}, {"max_tokens": 7}, {"n": 2}, {"prompt": ["x", "x"]}):
            with streaming(second, headers=KEY, **other_body) as (heard, _):
                assert (heard.status, heard.error) == (409, "idempotency_conflict")
        gateway.pipeline.incoming[0].say("b")
        hear(first, lines)
    assert (first.texts, first.is_done) == (["ab"], True)


def test_a_request_with_a_key_waits_for_its_client(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, headers=KEY) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["a"])
    eventually(lambda: gateway.service.stats.num_detached == 1)
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


@pytest.mark.parametrize("key", ["", "with space", "x" * 256])
def test_a_key_is_short_and_visible(http: httpx.Client, key: str) -> None:
    reply = http.post("/v1/completions", json=BODY, headers={"idempotency-key": key})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "idempotency-key")


def test_the_same_key_of_a_client_without_a_seed_asks_for_the_same(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.say("a")
    for headers in (KEY, {"idempotency-key": "another"}):
        httpx.post(f"{gateway.url}/v1/completions", json=BODY, headers=headers).raise_for_status()
    one, two = gateway.pipeline.incoming
    assert one.header.seed != two.header.seed
    assert one.request_id != two.request_id


# --- whose it is ------------------------------------------------------------------------------------------------------


def test_another_tenants_request_is_as_unknown_as_one_that_never_was(launch: Launch, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = [{"tenant": name, "sha256": hash_api_key(f"psk_{name}").hex()} for name in ("one", "two")]
    keys.write_text("".join(json.dumps(line) + "\n" for line in lines))
    gateway = launch(api_keys_file=keys)
    mine, theirs = ({"authorization": f"Bearer psk_{name}"} for name in ("one", "two"))
    first = begun(gateway, "a", headers=mine | KEY)
    ids = (first.request_id, "0" * 32)
    with httpx.Client(base_url=gateway.url, timeout=20) as http:

        def answers(method: str, path: str, headers: dict[str, str]) -> list[tuple[int, str]]:
            found = [http.request(method, path.format(each), headers=theirs | headers) for each in ids]
            return [(each.status_code, each.text.replace(name, "ID")) for each, name in zip(found, ids, strict=True)]

        for method, path in (
            ("GET", "/v1/requests/{}"),
            ("GET", "/v1/requests/{}/events"),
            ("DELETE", "/v1/requests/{}"),
        ):
            for headers in ({}, {"last-event-id": first.last_event_id}):
                found = answers(method, path, headers)
                assert found[0] == found[1]
                assert found[0][0] == 404
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        metadata = tuple(theirs.items())
        for name in ids:
            with pytest.raises(grpc.RpcError) as raised:
                list(stub.Resume(inference_pb2.ResumeCall(request_id=name), metadata=metadata))
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
            assert not stub.Cancel(inference_pb2.CancelCall(request_id=name), metadata=metadata).known
    # The same key of another tenant is another request.
    gateway.pipeline.script = lambda request: request.say("theirs")
    with streaming(gateway, headers=theirs | KEY) as (heard, lines):
        hear(heard, lines)
    assert heard.texts == ["theirs"]
    assert heard.request_id != first.request_id
    stored = gateway.pipeline.call(Fetch(bytes.fromhex(first.request_id)))
    assert stored is not None
    assert stored.cancel_reason == 0


# --- over gRPC --------------------------------------------------------------------------------------------------------


def generate(gateway: RunningGateway, **fields: Any) -> inference_pb2.GenerateCall:
    return inference_pb2.GenerateCall(request=requests_pb2.GenerateRequest(text="hi", n=2), **fields)


def offsets(deltas: list[inference_pb2.Delta]) -> list[inference_pb2.SampleOffset]:
    found = [inference_pb2.SampleOffset() for _ in range(2)]
    for delta in deltas:
        offset = found[delta.sequence]
        offset.tokens = delta.token_offset + len(delta.token_ids) // 4
        offset.characters = delta.text_offset + len(delta.text)
        offset.chain = delta.chain_after
        offset.finish_reason = delta.finish_reason
    return found


def test_grpc_calls_go_on_behind_what_their_client_has(gateway: RunningGateway, second: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(
        request.row("a", finish=LENGTH), request.row("xx", sequence=1)
    )
    with grpc.insecure_channel(gateway.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate(gateway, resumable=True))
        accepted, *deltas = (next(call) for _ in range(3))
        call.cancel()
    eventually(lambda: gateway.service.stats.num_detached == 1)
    (request,) = gateway.pipeline.incoming
    request.afterwards.append(lambda: request.say("y", sequence=1))
    request_id = accepted.accepted.request_id
    with grpc.insecure_channel(second.grpc) as channel:
        asked = inference_pb2.ResumeCall(request_id=request_id, offsets=offsets([each.delta for each in deltas]))
        call = inference_pb2_grpc.InferenceStub(channel).Resume(asked)
        again = next(call)
        rest = [event.delta for event in call]
    assert again == accepted
    assert [(each.sequence, each.token_offset, each.text_offset, each.text) for each in rest] == [(1, 1, 2, "y")]
    assert rest[0].usage.output_tokens == 3


def test_a_call_of_several_prompts_goes_on_over_grpc(gateway: RunningGateway, second: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row(request.body.text), request.row("xx", sequence=1))

    gateway.pipeline.script = script
    with streaming(gateway, headers=RESUMABLE, prompt=["p", "q"], n=2) as (first, lines):
        hear(first, lines, lambda: first.texts == ["p", "xx", "q", "xx"])
    one, two = sorted(gateway.pipeline.incoming, key=lambda request: request.body.text)
    one.afterwards.append(lambda: one.say("1") or one.say("2", sequence=1))
    two.afterwards.append(lambda: two.say("3") or two.say("4", sequence=1))
    have = [
        inference_pb2.SampleOffset(tokens=1, characters=len(text), chain=chain.extend(chain.CHAIN_START, [100]))
        for text in first.texts
    ]
    with grpc.insecure_channel(second.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        accepted, *rest = stub.Resume(inference_pb2.ResumeCall(request_id=two.request_id.hex(), offsets=have))
        whole = list(stub.Resume(inference_pb2.ResumeCall(request_id=first.request_id)))[1:]
    assert accepted.accepted.request_id == first.request_id
    assert {each.delta.sequence: each.delta.text for each in rest} == {0: "1", 1: "2", 2: "3", 3: "4"}
    assert sorted(each.delta.usage.output_tokens for each in rest) == [0, 0, 4, 4]
    texts = [""] * 4
    for event in whole:
        texts[event.delta.sequence] += event.delta.text
    assert texts == ["p1", "xx2", "q3", "xx4"]


@pytest.mark.parametrize(
    "wrong",
    [
        [inference_pb2.SampleOffset()],
        [inference_pb2.SampleOffset(characters=3), inference_pb2.SampleOffset()],
        [inference_pb2.SampleOffset(finish_reason=common_pb2.FINISH_REASON_ERROR), inference_pb2.SampleOffset()],
    ],
)
def test_grpc_offsets_that_cannot_be_are_refused(
    gateway: RunningGateway, wrong: list[inference_pb2.SampleOffset]
) -> None:
    gateway.pipeline.script = silent
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        accepted = next(stub.Generate(generate(gateway, resumable=True)))
        asked = inference_pb2.ResumeCall(request_id=accepted.accepted.request_id, offsets=wrong)
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Resume(asked))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_grpc_call_that_is_taken_over_ends_with_aborted(gateway: RunningGateway, second: RunningGateway) -> None:
    gateway.pipeline.script = silent
    with grpc.insecure_channel(gateway.grpc) as channel, grpc.insecure_channel(second.grpc) as there:
        first = inference_pb2_grpc.InferenceStub(channel).Generate(generate(gateway, idempotency_key="k"))
        accepted = next(first)
        again = inference_pb2_grpc.InferenceStub(there).Generate(generate(gateway, idempotency_key="k"))
        assert next(again) == accepted
        with pytest.raises(grpc.RpcError) as raised:
            list(first)
        assert raised.value.code() is grpc.StatusCode.ABORTED
        (request,) = gateway.pipeline.incoming
        request.say("a")
        request.say("x", sequence=1)
        assert {event.delta.sequence: event.delta.text for event in again} == {0: "a", 1: "x"}


def test_a_grpc_request_can_be_followed_over_http(gateway: RunningGateway, other: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.retire(request.row("a", finish=STOP)) and None
    with grpc.insecure_channel(gateway.grpc) as channel:
        call = inference_pb2.GenerateCall(request=requests_pb2.GenerateRequest(text="hi"))
        accepted, *_ = inference_pb2_grpc.InferenceStub(channel).Generate(call)
    with events(other, Heard(request_id=accepted.accepted.request_id)) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.finishes) == (["a"], {0: "stop"})
