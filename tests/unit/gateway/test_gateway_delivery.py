"""Clients that leave, lag or wait, and text that comes twice, late or not at all."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from memory_bus import MemoryBus
from running_gateway import RunningGateway, eventually
from scripted_pipeline import STOP, Incoming, Row, ScriptedPipeline

from contract.domain.rows import TextRow
from gateway_svc.core.sse import SseFormat
from gateway_svc.service import GatewayService
from gateway_svc.settings import GatewaySettings
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, Leave, ListSessions, ListWorkers, SessionKind

BODY = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 4096}


def events(body: bytes) -> list[dict[str, Any]]:
    """The chunks of an event stream; its end mark is checked."""
    *chunks, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(chunk.rpartition(b"data: ")[2]) for chunk in chunks]


def text_of(body: bytes) -> str:
    return "".join(event["choices"][0]["text"] for event in events(body) if event["choices"])


def post(gateway: RunningGateway, **fields: Any) -> bytes:
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        return http.post("/v1/completions", json={**BODY, **fields}).raise_for_status().content


def test_one_event_for_each_step(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.say(*"abcdef", finish=STOP)
    assert [event["choices"][0]["text"] for event in events(post(gateway))] == list("abcdef")


def test_first_tokens_are_told_before_those_of_samples_that_go_on(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("a"))
        request.send(request.row("b"), request.row("x", sequence=1), request.row("y", sequence=1))
        request.send(request.row("c", finish=STOP))
        request.send(request.row("z", sequence=1, finish=STOP))

    gateway.pipeline.script = script
    told = [event["choices"][0] for event in events(post(gateway, n=2))]
    assert [(each["index"], each["text"]) for each in told] == [
        (0, "a"),
        (1, "x"),
        (0, "b"),
        (1, "y"),
        (0, "c"),
        (1, "z"),
    ]


def test_usage_is_told_where_a_sample_ends_with_its_first_token(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("a"))
        request.send(request.row("b", finish=STOP), request.row("x", sequence=1, finish=STOP))

    gateway.pipeline.script = script
    *chunks, last = events(post(gateway, n=2, stream_options={"include_usage": True}))
    assert "".join(each["choices"][0]["text"] for each in chunks) == "abx"
    assert last["usage"]["completion_tokens"] == 3


def test_doubled_rows_are_delivered_once(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        rows: list[Row] = []
        for text in ("a", "b", "c"):
            rows.append(request.row(text))
            request.send(*rows)
        request.send(*rows, request.row("", finish=STOP), *rows)

    gateway.pipeline.script = script
    assert text_of(post(gateway)) == "abc"
    assert gateway.service.stats.num_duplicate_rows > 0


def test_a_lost_row_is_asked_for_again(gateway: RunningGateway) -> None:
    lost: list[Row] = []

    def script(request: Incoming) -> None:
        request.send(request.row("a"))
        lost.append(request.row("b"))
        lost.append(request.row("c", finish=STOP))
        request.send(lost[1])
        (wanted,) = gateway.pipeline.attaches()
        assert list(memoryview(wanted.token_offsets).cast("I")) == [1]
        assert list(memoryview(wanted.text_offsets).cast("I")) == [1]
        request.send(*lost)

    gateway.pipeline.script = script
    assert text_of(post(gateway)) == "abc"


def test_a_lost_end_is_found_in_the_result(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("a"))
        rows = [request.row("b"), request.row("c", finish=STOP)]
        assert request.retire()
        request.send(rows[1])  # behind a gap

    gateway.pipeline.script = script
    assert text_of(post(gateway)) == "abc"


def test_usage_is_counted_once_though_the_result_names_it_with_every_sample(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        for sequence in (0, 1):
            request.row("a", sequence=sequence, finish=STOP)
        for sequence in (0, 1):
            end = request.spoken[sequence].end
            assert end is not None
            end.usage.CopyFrom(request.usage())
        assert request.retire()

    gateway.pipeline.script = script
    last = events(post(gateway, n=2, stream_options={"include_usage": True}))[-1]
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (7, 2)


def test_silence_is_probed_until_the_end_is_found(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("a"))
        request.row("b", finish=STOP)
        assert request.retire()  # its last text never came

    gateway.pipeline.script = script
    assert text_of(post(gateway)) == "ab"


def test_a_result_of_another_history_is_an_error_and_not_a_splice(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("a", [1]))
        request.spoken[0].token_ids[0] = 2
        late = request.row("b", [3], finish=STOP)
        assert request.retire()
        late.token_offset += 1
        request.send(late)

    gateway.pipeline.script = script
    first, error = events(post(gateway))
    assert first["choices"][0]["text"] == "a"
    assert error["error"]["code"] == "stream_diverged"


def test_a_reply_that_cannot_be_written_takes_no_other_with_it(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = SseFormat.chunk

    def broken(self: SseFormat, choice: int, row: TextRow, chain: int) -> bytes:
        if row.text == "unlucky":
            raise ZeroDivisionError
        return chunk(self, choice, row, chain)

    monkeypatch.setattr(SseFormat, "chunk", broken)
    gateway.pipeline.script = lambda request: request.say("unlucky")
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        reply = http.post("/v1/completions", json=BODY)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal")
    gateway.pipeline.script = lambda request: request.say("lucky")
    assert text_of(post(gateway)) == "lucky"
    assert gateway.service.stats.num_streams == 0


def test_an_unreadable_batch_is_buried_and_its_text_asked_for_again(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("a"))
        stream = gateway.bus.keys.text(request.route)
        gateway.pipeline.call(Append(stream, {k.PAYLOAD: b"\xff\xff"}))
        rest = request.row("b", finish=STOP)
        gateway.pipeline.attaches()
        request.send(rest)

    gateway.pipeline.script = script
    assert text_of(post(gateway)) == "ab"
    (dead,) = gateway.pipeline.hints(gateway.bus.keys.dead)
    assert dead[k.STREAM] == b"text"
    assert dead[k.WHY].startswith(b"not a TextBatch")
    assert gateway.service.stats.num_dead_letters == 1


def open_stream(gateway: RunningGateway, **fields: Any) -> socket.socket:
    """A client that has sent its request and reads nothing by itself."""
    return gateway.post({**BODY, **fields})


def test_a_client_that_leaves_cancels(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    client = open_stream(gateway)
    assert client.recv(10)
    client.close()
    assert gateway.pipeline.cancels() == [(gateway.pipeline.wait_for()[0].request_id, 1)]
    eventually(lambda: gateway.service.stats.num_streams == 0)


def test_a_client_that_leaves_before_the_first_text_cancels(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: None
    client = open_stream(gateway, stream=False)
    gateway.pipeline.wait_for()
    client.close()
    assert gateway.pipeline.cancels() == [(gateway.pipeline.wait_for()[0].request_id, 1)]


def test_a_client_that_got_everything_cancels_nothing(gateway: RunningGateway) -> None:
    post(gateway)
    post(gateway, stream=False)
    gateway.pipeline.script = lambda request: None
    client = open_stream(gateway)
    gateway.pipeline.wait_for(3)
    client.close()
    assert [request_id for request_id, _ in gateway.pipeline.cancels()] == [gateway.pipeline.incoming[2].request_id]


def test_the_timeout_header_ends_a_request(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: None
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        reply = http.post("/v1/completions", json=BODY, headers={"x-request-timeout-s": "0.2"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    (request,) = gateway.pipeline.wait_for()
    assert gateway.pipeline.cancels() == [(request.request_id, 3)]
    assert request.header.deadline_unix_ns > request.header.arrival_unix_ns


def test_a_slow_client_takes_bounded_memory_and_gets_everything(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch(max_backlog_bytes=20_000)
    piece = "z" * 4096
    served: list[Row] = []

    def script(request: Incoming) -> None:
        for _ in range(2000):
            served.append(request.row(piece))
            request.send(served[-1])

    gateway.pipeline.script = script
    client = open_stream(gateway)
    eventually(lambda: gateway.service.stats.num_slow_clients > 0)
    (request,) = gateway.pipeline.wait_for()
    eventually(lambda: len(served) == 2000)
    # Kept: what the socket holds and the backlog. All else was let go.
    assert gateway.service.stats.num_rows < 2000
    request.row("", finish=STOP)
    assert request.retire()
    received = bytearray()
    while not received.endswith(b"0\r\n\r\n"):
        part = client.recv(1 << 16)
        assert part
        received += part
    client.close()
    assert sum(map(len, re.findall(b"z{4096,}", received))) == 2000 * 4096
    assert received.count(b"data: {") < 2000
    assert b'"finish_reason":"stop"' in received
    assert gateway.service.stats.num_attaches >= 1


def test_a_restarted_server_is_a_pause(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("a"))
        rest = request.row("b", finish=STOP)
        eventually(lambda: gateway.service.stats.num_tokens == 1)
        gateway.bus.stop()
        gateway.bus.start()
        gateway.pipeline.attaches()
        request.send(rest)

    gateway.pipeline.script = script
    assert text_of(post(gateway)) == "ab"
    gateway.pipeline.script = lambda request: request.say("again")
    # The played worker goes on after its script has returned; until then the pool has no model.
    eventually(lambda: all(worker.alive for worker in gateway.pipeline.call(ListWorkers())))
    eventually(gateway.service.is_ready)
    assert text_of(post(gateway)) == "again"


def test_a_fenced_gateway_goes_on_under_another_name(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch(session_ttl_s=6.0)  # it learns that it is fenced with its next renewal

    def gateway_sid() -> bytes:
        found = [each for each in gateway.pipeline.call(ListSessions()) if each.kind is SessionKind.GATEWAY]
        return next((each.sid for each in found if each.alive), b"")

    def script(request: Incoming) -> None:
        request.send(request.row("a"))
        eventually(lambda: gateway.service.stats.num_tokens == 1)
        rest = request.row("b", finish=STOP)
        gateway.pipeline.call(Leave(request.route))
        hints = gateway.pipeline.hints(gateway.bus.keys.attach(0))
        assert hints[0][k.ROUTE] not in (request.route, b"")
        request.route = hints[0][k.ROUTE]
        assert gateway_sid() == request.route
        request.send(rest)

    gateway.pipeline.script = script
    assert text_of(post(gateway)) == "ab"


def test_a_server_that_is_gone_is_told_and_streams_wait(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch(outage_patience_s=0.0)
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with (
        httpx.Client(base_url=gateway.url, timeout=300) as http,
        http.stream("POST", "/v1/completions", json=BODY) as stream,
    ):
        gateway.bus.stop()
        eventually(lambda: not gateway.service.is_ready())
        with httpx.Client(base_url=gateway.url, timeout=300) as other:
            reply = other.post("/v1/completions", json=BODY)
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert "cannot reach its Redis server" in reply.json()["error"]["message"]
            assert other.delete("/v1/requests/" + "0" * 32).status_code == 503
            assert other.get("/ready").status_code == 503
        gateway.bus.start()
        gateway.pipeline.attaches()
        gateway.pipeline.wait_for()[0].say("b")
        assert text_of(stream.read()) == "ab"


def test_a_gateway_without_a_server_waits_and_says_so() -> None:
    bus = MemoryBus()
    pipeline = ScriptedPipeline(bus)
    bus.stop()
    gateway = RunningGateway(bus, pipeline, GatewayService(GatewaySettings(http_address="127.0.0.1:0"), bus))
    began_s = time.monotonic()
    threading.Timer(0.3, bus.start).start()
    gateway.start()
    try:
        assert time.monotonic() - began_s > 0.25
        assert text_of(post(gateway)) == "Hello world"
    finally:
        gateway.close()
        pipeline.close()
