"""What anybody can do who can connect: heads without an end, requests without an end, connections without number."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from running_gateway import RunningGateway
from scripted_pipeline import STOP

from gateway_svc.http_protocol import BoundedProtocol
from gateway_svc.http_server import HttpServer
from gateway_svc.settings import GatewaySettings

Launch = Callable[..., RunningGateway]
LIMIT_S = 180.0


@contextlib.contextmanager
def connected(gateway: RunningGateway) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", gateway.service.http_port), timeout=LIMIT_S) as client:
        yield client


def read_all(client: socket.socket) -> bytes:
    """Until the gateway closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            found += part
    return found


def error_of(reply: bytes) -> dict[str, Any]:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    found: dict[str, Any] = json.loads(body)["error"]
    return found


def flood(client: socket.socket, begin: bytes, part: bytes, num_bytes: int) -> None:
    """Sends until all is sent or the gateway does not take more."""
    with contextlib.suppress(OSError):
        client.sendall(begin)
        for _ in range(num_bytes // len(part)):
            client.sendall(part)


GET = b"GET /version HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
STREAMED = {"model": "tiny", "prompt": "x", "stream": True}


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (GET + b"x-long: ", b"a" * 65536),
        (GET, b"a" * 65536),
        (GET, b"x: y\r\n" * 10_000),
        (b"GET /", b"a" * 65536),
        (CHUNKED + b"0\r\nx-trailer: ", b"a" * 65536),
        (CHUNKED + b"0\r\n", b"x: y\r\n" * 10_000),
        (CHUNKED + b"1;", b"a" * 65536),
    ],
    ids=["value", "name", "number", "path", "trailer", "trailers", "extension"],
)
def test_a_head_without_an_end_is_refused(gateway: RunningGateway, begin: bytes, part: bytes) -> None:
    with connected(gateway) as client:
        flood(client, begin, part, 500_000)
        reply = read_all(client)
    assert reply.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert error_of(reply)["code"] == "invalid_argument"


def test_fifty_megabytes_of_a_header_break_no_stream(gateway: RunningGateway) -> None:
    began, go_on = threading.Event(), threading.Event()

    def script(incoming: Any) -> None:
        incoming.say("one ", finish=0)
        began.set()
        assert go_on.wait(LIMIT_S)
        incoming.say("two", finish=STOP)

    gateway.pipeline.script = script
    with gateway.post(STREAMED) as stream:
        assert began.wait(LIMIT_S)
        with connected(gateway) as client:
            flood(client, GET + b"x-long: ", b"a" * 65536, 50_000_000)
            read_all(client)
        assert httpx.get(f"{gateway.url}/version", timeout=LIMIT_S).status_code == 200
        go_on.set()
        found = b""
        while b"[DONE]" not in found:
            part = stream.recv(65536)
            assert part
            found += part
        assert b"one " in found
        assert b"two" in found


def test_a_head_within_the_bounds_is_taken_however_it_comes(launch: Launch) -> None:
    gateway = launch(max_header_bytes=8192, max_headers=16, head_timeout_s=3600.0)
    head = GET + b"x-long: " + b"a" * 7000 + b"\r\n" + b"x: y\r\n" * 12 + b"\r\n"
    with connected(gateway) as client:
        for turn in range(3):  # each has the bounds for itself
            for start in range(0, len(head), 700 + turn):
                client.sendall(head[start : start + 700 + turn])
            found = b""
            while b'version":' not in found:
                found += client.recv(65536)
            assert found.startswith(b"HTTP/1.1 200 OK\r\n")
        client.sendall(head.replace(b"x: y\r\n", b"x: y\r\n" * 2))
        assert read_all(client).startswith(b"HTTP/1.1 431 ")


def test_a_connection_without_a_request_is_closed_after_its_time(launch: Launch) -> None:
    gateway = launch(idle_timeout_s=0.5, head_timeout_s=3600.0)
    with connected(gateway) as client:
        client.sendall(GET + b"\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200 OK\r\n")


def test_it_is_kept_for_longer_than_nginx_keeps_its_own() -> None:
    async def app(*_: object) -> None:
        """Is not called."""

    server = HttpServer(app, GatewaySettings().http_limits)
    assert server.config.timeout_keep_alive > 60


@pytest.mark.parametrize("begin", [b"", b"\r\n", b"POS", GET + b"x: y", POST, POST + b"content-length: 9\r\n\r\n{"])
def test_hundreds_of_requests_that_never_end_are_closed(launch: Launch, begin: bytes) -> None:
    gateway = launch(head_timeout_s=0.5, body_timeout_s=0.5)
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(200):
            clients.append(stack.enter_context(connected(gateway)))
            clients[-1].sendall(begin)
        replies = [read_all(client) for client in clients]
    if begin.strip():
        # Those of whom too many are refused at once are closed without being told.
        told = [reply for reply in replies if reply]
        assert told
        assert all(reply.startswith(b"HTTP/1.1 408 Request Timeout\r\n") for reply in told)
        assert "not complete after 0.5 s" in error_of(told[0])["message"]
    else:
        assert set(replies) == {b""}
    assert gateway.pipeline.incoming == []


def test_a_client_whose_body_could_not_be_read_while_the_gateway_was_suspended_is_not_late(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    body_timeout_s = 10.0  # in which a busy machine reads the body once it goes on
    suspended, resumed = threading.Event(), threading.Event()
    read_head = BoundedProtocol.on_headers_complete

    def read_head_and_wait(protocol: BoundedProtocol) -> None:
        read_head(protocol)
        suspended.set()
        assert resumed.wait(LIMIT_S)

    monkeypatch.setattr(BoundedProtocol, "on_headers_complete", read_head_and_wait)
    gateway = launch(body_timeout_s=body_timeout_s)
    body = json.dumps({"model": "none such", "prompt": "x" * 8_000_000}).encode()  # more than a socket holds
    with connected(gateway) as client:
        client.sendall(POST + b"content-length: %d\r\n\r\n" % len(body))
        sender = threading.Thread(target=client.sendall, args=(body,))
        sender.start()
        assert suspended.wait(LIMIT_S)
        time.sleep(body_timeout_s + 0.2)  # the first that it sees is that the time is over
        resumed.set()
        reply = client.recv(65536)
        sender.join()
    assert reply.startswith(b"HTTP/1.1 404 "), reply


def test_dribbling_does_not_begin_the_time_anew(launch: Launch) -> None:
    gateway = launch(head_timeout_s=0.5)
    with connected(gateway) as client:
        client.settimeout(0.05)
        found = b""
        deadline_s = time.monotonic() + LIMIT_S
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(GET)
            while not found:
                assert time.monotonic() < deadline_s
                client.sendall(b"x: y\r\n"[:1])
                with contextlib.suppress(TimeoutError):
                    found = client.recv(65536)
    assert found.startswith(b"HTTP/1.1 408 ")


def test_a_reply_may_take_longer_than_a_request(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """And half a request that comes meanwhile is not its end."""
    is_over = threading.Event()  # the time for a request, of the half one
    on_head_late = BoundedProtocol._on_head_late

    def on_head_late_and_tell(protocol: BoundedProtocol) -> None:
        on_head_late(protocol)
        is_over.set()

    monkeypatch.setattr(BoundedProtocol, "_on_head_late", on_head_late_and_tell)
    gateway = launch(head_timeout_s=3.0, body_timeout_s=3.0)

    def script(incoming: Any) -> None:
        incoming.say("one ", finish=0)
        assert is_over.wait(LIMIT_S)
        incoming.say("two", finish=STOP)

    gateway.pipeline.script = script
    with gateway.post(STREAMED) as stream:
        stream.sendall(GET)
        found = b""
        while b"[DONE]" not in found:
            part = stream.recv(65536)
            assert part
            found += part
        assert b"two" in found
        assert b" 408 " in found + read_all(stream)


def test_beyond_the_connections_a_client_is_told_to_come_later(launch: Launch) -> None:
    gateway = launch(max_connections=3)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(gateway)) for _ in range(3)]
        for client in clients:
            client.sendall(GET + b"\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        with connected(gateway) as late:
            reply = read_all(late)
        assert reply.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b"\r\nretry-after: 1\r\n" in reply
        assert error_of(reply)["code"] == "overloaded"
    deadline_s = time.monotonic() + LIMIT_S
    while httpx.get(f"{gateway.url}/version", timeout=LIMIT_S).status_code != 200:
        assert time.monotonic() < deadline_s


def test_what_is_no_http_is_told_so(gateway: RunningGateway) -> None:
    with connected(gateway) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        reply = read_all(client)
    assert reply.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert error_of(reply)["code"] == "invalid_argument"
