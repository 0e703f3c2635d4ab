"""What a server refuses, and whose fault it is: full, busy, read-only, or closed to strangers."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bus_flow import AWKWARD, LONG_MS, Flow, ask, id_of, submit

from servicekit.bus import Bus, BusFull, BusUnavailable, Connection, open_bus, redis_async_connection, redis_connection
from servicekit.bus.calls import (
    Append,
    Attach,
    Call,
    Cancel,
    Commit,
    Compact,
    LeaseShard,
    Length,
    ListSessions,
    ListWorkers,
    Pair,
    Read,
    ReadCheckpoints,
    RegisterWorker,
    Reject,
    Renew,
    Retire,
    SessionKind,
    SubmitOutcome,
    Take,
)
from servicekit.bus.embedded import EmbeddedServer, find_server
from servicekit.bus.keys import PAYLOAD, Names

LOOK = bytes(1_000_000)  # a body for which `submit` looks at the memory, however long ago it did


@pytest.fixture(params=["valkey", "redis"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    program = find_server() if request.param == "valkey" else request.getfixturevalue("redis_program")
    own = EmbeddedServer(tmp_path / "data", server=program, port=0)
    own.start()
    yield own
    own.close()


def _used_memory(url: str) -> int:
    (line,) = (line for line in ask(url, "INFO", "memory").splitlines() if line.startswith("used_memory:"))
    return int(line.partition(":")[2])


def _call_async(bus: Bus, call: Call[object]) -> object:
    async def run() -> object:
        connection = await bus.connect_async()
        try:
            return await connection.call(call)
        finally:
            await connection.close()

    return asyncio.run(run())


def _call_often(connection: Connection) -> None:
    for _ in range(10_000):
        connection.call(ListSessions())


def test_submit_is_refused_above_four_fifths_of_the_memory(server: EmbeddedServer) -> None:
    bus = open_bus(server.url)
    flow = Flow(bus, bus.connect())
    ask(server.url, "CONFIG", "SET", "maxmemory", str(int(_used_memory(server.url) / 0.6)))
    assert flow.connection.call(submit(id_of(1))) is SubmitOutcome.CREATED
    ask(server.url, "CONFIG", "SET", "maxmemory", str(int(_used_memory(server.url) / 0.9)))
    assert flow.connection.call(replace(submit(id_of(2)), body=LOOK)) is SubmitOutcome.OUT_OF_MEMORY
    assert flow.connection.call(submit(id_of(1))) is SubmitOutcome.EXISTS
    assert flow.connection.call(Length(bus.keys.prompts)) == 1
    flow.connection.close()


def test_a_look_at_the_memory_is_good_for_a_megabyte_of_requests(server: EmbeddedServer) -> None:
    bus = open_bus(server.url)
    connection = bus.connect()
    assert connection.call(replace(submit(id_of(1)), body=LOOK)) is SubmitOutcome.CREATED
    ask(server.url, "CONFIG", "SET", "maxmemory", str(int(_used_memory(server.url) / 0.9)))
    outcomes = [connection.call(replace(submit(id_of(number)), body=bytes(100_000))) for number in range(2, 14)]
    assert outcomes[-1] is SubmitOutcome.OUT_OF_MEMORY
    assert outcomes.count(SubmitOutcome.CREATED) <= 9
    connection.close()


def test_a_full_server_takes_no_entries_but_lets_requests_end(server: EmbeddedServer) -> None:
    bus = open_bus(server.url)
    flow = Flow(bus, bus.connect())
    sid, dead = flow.session(), flow.session()
    request_id = flow.running(dead)
    stream = bus.keys.key("s")
    ask(server.url, "CONFIG", "SET", "maxmemory", str(_used_memory(server.url) // 2))
    with pytest.raises(BusFull, match="maxmemory"):
        flow.connection.call(Append(stream, {b"n": b"1"}))
    with pytest.raises(BusFull):
        _call_async(bus, Append(stream, {b"n": b"1"}))
    assert flow.connection.call(Length(stream)) == 0
    assert flow.connection.call(Append(stream, {b"n": AWKWARD}, cap=5)), "what is capped cannot fill it"
    _call_async(bus, Append(stream, {b"n": b"2"}, cap=5))
    assert flow.fields(stream) == [{b"n": AWKWARD}, {b"n": b"2"}]
    assert flow.connection.execute(
        [Renew(sid, LONG_MS), Commit(sid, ((0, b"row"),), "w", b"plan"), Renew(dead, -1), Take(sid, dead)]
    ) == [True, True, True, [request_id]]
    compaction = [LeaseShard(sid, 0), Compact(sid, 0, b"0-0", ((request_id, b"rows"),)), ReadCheckpoints(sid, 0)]
    assert all(flow.connection.execute(compaction))
    assert flow.connection.call(replace(submit(id_of(2)), body=LOOK)) is SubmitOutcome.OUT_OF_MEMORY
    with pytest.raises(BusFull):
        flow.connection.execute([Append(stream, {b"n": b"1"}), Commit(sid, ((1, b"row"),))])
    assert flow.connection.call(Length(bus.keys.tokens(1))) == 1, "the calls beside the refused one are carried out"
    flow.connection.close()


def test_a_busy_server_is_unavailable_and_comes_back(server: EmbeddedServer) -> None:
    bus = open_bus(server.url)
    connection = bus.connect()
    ask(server.url, "CONFIG", "SET", "busy-reply-threshold", "1")
    script = threading.Thread(target=ask, args=(server.url, "EVAL", "while true do end", "0"))
    script.start()
    with pytest.raises(BusUnavailable, match="BUSY"):
        _call_often(connection)
    ask(server.url, "SCRIPT", "KILL")
    script.join()
    assert connection.call(ListSessions()) == []
    connection.close()


def test_a_replica_is_unavailable_for_writes(server: EmbeddedServer) -> None:
    bus = open_bus(server.url)
    connection = bus.connect()
    ask(server.url, "REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(BusUnavailable, match="READONLY"):
        connection.call(submit(id_of(1)))
    ask(server.url, "REPLICAOF", "NO", "ONE")
    assert connection.call(submit(id_of(1))) is SubmitOutcome.CREATED
    connection.close()


def test_a_server_that_hangs_is_unavailable(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = open_bus(server.url)
    connection = bus.connect()
    assert server.pid is not None

    async def test(pid: int, patched: pytest.MonkeyPatch) -> None:
        async_connection = await bus.connect_async()
        for module in (redis_connection, redis_async_connection):
            patched.setattr(module, "PATIENCE_S", 0.2)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(BusUnavailable, match="does not answer"):
            await async_connection.call(Length(b"{s}"))
        await async_connection.close()

    with monkeypatch.context() as patched:
        try:
            asyncio.run(test(server.pid, patched))
            with pytest.raises(BusUnavailable):
                connection.call(Length(b"{s}"))
        finally:
            os.kill(server.pid, signal.SIGCONT)
    connection.reconnect()
    assert connection.call(Length(b"{s}")) == 0
    connection.close()


def test_a_long_wait_is_not_taken_for_a_hanging_server(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = open_bus(server.url)
    connection = bus.connect()
    monkeypatch.setattr(redis_connection, "PATIENCE_S", 1.0)
    assert connection.call(Read({b"{s}": b"0-0"}, block_ms=1200)) == {}
    connection.close()


def test_strangers_wait_and_are_told_to_log_in(server: EmbeddedServer) -> None:
    ask(server.url, "CONFIG", "SET", "requirepass", "s3cr:et/")
    with pytest.raises(BusUnavailable, match=r"it wants a login.*NOAUTH") as refused:
        open_bus(server.url).connect()
    assert "s3cr" not in str(refused.value)
    with pytest.raises(BusUnavailable, match="NOAUTH"):
        _call_async(open_bus(server.url), ListSessions())
    with pytest.raises(BusUnavailable, match=r"it refuses the login.*WRONGPASS"):
        open_bus(server.url.replace("://", "://:wrong@")).connect()
    for login in (":s3cr%3Aet%2F@", "default:s3cr%3Aet%2F@"):
        bus = open_bus(server.url.replace("://", f"://{login}"))
        connection = bus.connect()
        assert connection.call(ListSessions()) == []
        connection.close()
        assert _call_async(bus, ListSessions()) == []


def test_a_database_is_chosen_by_the_url(server: EmbeddedServer) -> None:
    first, second = (open_bus(f"{server.url}/{number}").connect() for number in (0, 3))
    first.call(Append(b"s", {b"n": b"1"}))
    assert (first.call(Length(b"s")), second.call(Length(b"s"))) == (1, 0)
    first.close()
    second.close()


def test_the_functions_are_loaded_beside_those_of_another_version(server: EmbeddedServer) -> None:
    ask(
        server.url,
        "FUNCTION",
        "LOAD",
        "#!lua name=penstock_0123456789ab\nredis.register_function('hello_0123456789ab', function() return 7 end)",
    )
    connections = [open_bus(server.url).connect() for _ in range(3)]
    assert all(connection.call(ListSessions()) == [] for connection in connections)
    assert ask(server.url, "FCALL", "hello_0123456789ab", "0") == "7"
    for connection in connections:
        connection.close()


def test_no_key_is_left_behind(server: EmbeddedServer) -> None:
    bus = open_bus(server.url, "pool")
    flow = Flow(bus, bus.connect())
    keys = bus.keys
    scheduler, worker = flow.session(), flow.session(SessionKind.WORKER)
    detokenizer, gateway = flow.session(SessionKind.DETOKENIZER), flow.session(SessionKind.GATEWAY)
    flow.connection.execute([RegisterWorker(worker, "w", b"info"), Pair(scheduler, "w"), LeaseShard(detokenizer, 0)])
    ended, rejected, marked = flow.running(scheduler), flow.submitted(), id_of(99)
    flow.connection.execute(
        [
            Reject(rejected, flow.hints()[0].entry_id, 0, b"finish"),
            Cancel(ended, 1, 1),
            Cancel(marked, 1, 1),
            submit(marked),
            Reject(marked, b"", 0, b"finish"),
            Attach(ended, "tenant", gateway, b""),
            Commit(scheduler, ((0, b"row"),), "w", b"plan"),
            Compact(
                detokenizer, 0, b"0-1", ((ended, b"rows"), (rejected, b""), (marked, b"rows"), (id_of(98), b"rows"))
            ),
            Append(keys.results("w"), {PAYLOAD: b"result"}),
            *(Retire(detokenizer, 0, one, b"r", 0, gateway) for one in (ended, rejected, marked)),
            *(Renew(sid, -60_001) for sid in (scheduler, worker, detokenizer, gateway)),
        ]
    )
    flow.connection.execute([ListSessions(), ListWorkers()])
    shared = [keys.run, keys.prompts, keys.requests, keys.cancels, keys.tokens(0), keys.attach(0)]
    shared += [keys.key(name) for name in (Names.SURVEY, Names.CHANGED, Names.GONE, Names.MODELS)]
    assert sorted(ask(server.url, "KEYS", "*").split()) == sorted(key.decode() for key in shared)
    flow.connection.close()


def test_a_bus_over_tls(redis_program: Path, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on PATH: it makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key),
            *("-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    own = EmbeddedServer(tmp_path / "data", server=redis_program, port=0)
    own.start()
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            tls_port = probe.getsockname()[1]
        tls = ("tls-auth-clients", "no", "tls-key-file", key, "tls-cert-file", certificate, "tls-port", tls_port)
        ask(own.url, "CONFIG", "SET", *map(str, tls))
        url = f"rediss://localhost:{tls_port}"
        for query in (f"?ssl_ca_certs={certificate}", "?ssl_cert_reqs=none"):
            bus = open_bus(url + query)
            connection = bus.connect()
            assert connection.call(submit(id_of(1))) in (SubmitOutcome.CREATED, SubmitOutcome.EXISTS)
            assert connection.call(Read({b"{s}": b"0-0"}, block_ms=1100)) == {}
            connection.close()
            assert _call_async(bus, Length(bus.keys.prompts)) == 1
        with pytest.raises(BusUnavailable, match="certificate"):
            open_bus(url).connect()
        with pytest.raises(BusUnavailable, match="certificate"):
            _call_async(open_bus(url), ListSessions())
    finally:
        own.close()
