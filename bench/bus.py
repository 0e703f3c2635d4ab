"""What the bus costs: a commit on the server, and the round trip scheduler → worker → scheduler over two streams.

Prints microseconds. Two processes on this machine; payloads of 2 kB; the same writes as the services make: the
scheduler commits rows and plan and waits for results in one write, the worker appends its result and waits for plans in
one write.

    python -m bench.bus [--url redis://…] [--round-trips 20000]
"""

import argparse
import multiprocessing
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import hiredis

from servicekit.bus import Bus, open_bus
from servicekit.bus.calls import Append, Call, Commit, DropStream, Entry, Hello, LastId, Read, SessionKind
from servicekit.bus.commands import pack
from servicekit.bus.embedded import EmbeddedServer
from servicekit.bus.keys import PAYLOAD, RESULTS_CAP
from servicekit.bus.redis_address import parse_address

SID = b"scheduler-session"[:16]
PLAN = bytes(2048)
ROWS = bytes(2048)
RESULT = bytes(2048)
POOL = "bench"


def worker(url: str, round_trips: int, read_id: bytes) -> None:
    """Answers each plan with a result."""
    bus = open_bus(url, POOL)
    connection = bus.connect()
    steps, results = bus.keys.steps("w"), bus.keys.results("w")
    answer: list[Append] = []
    for _ in range(round_trips):
        found: dict[bytes, list[Entry]] = {}
        while not found:
            *_, found = connection.execute([*answer, Read({steps: read_id}, block_ms=1000)])
            answer = []
        read_id = found[steps][-1].entry_id
        answer = [Append(results, {PAYLOAD: RESULT}, RESULTS_CAP)]
    connection.execute(answer)
    connection.close()


def measure_round_trips(bus: Bus, url: str, round_trips: int, rows: tuple[tuple[int, bytes], ...]) -> list[float]:
    """Microseconds from sending a commit until its result was read, without the first tenth."""
    connection = bus.connect()
    steps, results = bus.keys.steps("w"), bus.keys.results("w")
    read_id, plans_id = connection.execute([LastId(results), LastId(steps)])
    process = multiprocessing.get_context("spawn").Process(target=worker, args=(url, round_trips, plans_id))
    process.start()
    times: list[float] = []
    for _ in range(round_trips):
        begin_s = time.perf_counter()
        _, found = connection.execute([Commit(SID, rows, "w", PLAN), Read({results: read_id}, block_ms=60_000)])
        times.append((time.perf_counter() - begin_s) * 1e6)
        read_id = found[results][-1].entry_id
    process.join()
    connection.close()
    return times[round_trips // 10 :]


def ask(url: str, *command: bytes) -> str:
    """A command that is not part of the bus."""
    address = parse_address(url)
    reader = hiredis.Reader()
    with address.open_socket() as sock:
        sock.sendall(b"".join(pack(part) for part in (*address.login(), command)))
        replies: list[bytes] = []
        while len(replies) <= len(address.login()):
            reply = reader.gets()
            if reply is False:
                reader.feed(sock.recv(1 << 16))
            else:
                replies.append(reply)
    return replies[-1].decode()


def measure_server(bus: Bus, url: str, call: Call[Any], command: str, num_calls: int) -> float:
    """Microseconds that one call takes on the server, from the server's own books."""
    connection = bus.connect()
    ask(url, b"CONFIG", b"RESETSTAT")
    for _ in range(num_calls // 20):
        connection.execute([call] * 20)
    connection.close()
    found = re.search(rf"cmdstat_{command}:.*?usec_per_call=([0-9.]+)", ask(url, b"INFO", b"commandstats"))
    if found is None:
        raise SystemExit(f"the server has no figures of {command}")
    return float(found[1])


def report(url: str, round_trips: int) -> None:
    """Measures and prints everything."""
    bus = open_bus(url, POOL)
    connection = bus.connect()
    connection.call(Hello(SID, SessionKind.SCHEDULER, "bench", "", 3_600_000))
    plan_only, both = Commit(SID, (), "w", PLAN), Commit(SID, ((0, ROWS),), "w", PLAN)
    append = Append(bus.keys.results("w"), {PAYLOAD: RESULT}, RESULTS_CAP)
    for name, call, command in (
        ("append (XADD, capped)", append, "xadd"),
        ("commit, plan only", plan_only, "fcall"),
        ("commit, rows and plan", both, "fcall"),
        ("commit, refused", Commit(bytes(16), ((0, ROWS),), "w", PLAN), "fcall"),
    ):
        print(f"server  {name:28} {measure_server(bus, url, call, command, 20_000):7.1f} µs")
        connection.call(DropStream(bus.keys.tokens(0)))
    for name, committed in (("plan only", ()), ("rows and plan", ((0, ROWS),))):
        times = sorted(measure_round_trips(bus, url, round_trips, committed))
        p99 = times[len(times) * 99 // 100]
        print(f"round trip  {name:24} {statistics.median(times):7.1f} µs   p99 {p99:7.1f} µs")
        connection.call(DropStream(bus.keys.tokens(0)))
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that may be used for this; default: an embedded one")
    parser.add_argument("--server", type=Path, help="the program of the embedded server")
    parser.add_argument("--tcp", action="store_true", help="the embedded server listens on TCP, not on a Unix socket")
    parser.add_argument("--round-trips", type=int, default=20_000)
    options = parser.parse_args()
    if options.url:
        report(options.url, options.round_trips)
        return
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder), port=0 if options.tcp else None, server=options.server)
        server.start()
        try:
            report(server.url, options.round_trips)
        finally:
            server.close()


if __name__ == "__main__":
    main()
