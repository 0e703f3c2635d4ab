"""The cost of the bus: a commit on the server, and the round trip scheduler → worker → scheduler over two streams.

Prints microseconds. Two processes on this machine; payloads of 2 kB; the same writes as the services make: the
scheduler commits rows and plan and waits for results in one write, the worker appends its result and waits for plans in
one write.

With `--sessions N` instead: what a pool of N sessions, four fifths of them workers, costs the server to keep house,
while nothing changes. From the server's own books; fails if it is 2 % of its thread or more, or if a call takes
longer than 0.5 ms (but for one in a thousand: those the machine has kept waiting).

    python -m bench.bus [--url redis://…] [--round-trips 20000] [--sessions 250]
"""

import argparse
import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hiredis

from servicekit.bus import Bus, Connection, open_bus
from servicekit.bus.calls import (
    Append,
    Call,
    Commit,
    DropStream,
    Entry,
    Hello,
    LastId,
    Read,
    RegisterWorker,
    Renew,
    SessionKind,
)
from servicekit.bus.commands import pack
from servicekit.bus.embedded import EmbeddedServer
from servicekit.bus.keys import PAYLOAD, RESULTS_CAP
from servicekit.bus.redis_address import parse_address
from servicekit.roster import Roster
from servicekit.session import RENEWALS

SID = b"scheduler-session"[:16]
PLAN = bytes(2048)
ROWS = bytes(2048)
RESULT = bytes(2048)
POOL = "bench"
TTL_S = 1.5  # of a lease, by default
SURVEYS_PER_S = 5  # of a scheduler; others look around less often
MAX_SHARE, MAX_CALL_US = 0.02, 500.0


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


def function_times(url: str) -> tuple[float, int, float]:
    """Of all function calls since the books were opened: microseconds, how many, and what 999 in 1,000 stay below."""
    found = re.search(r"cmdstat_fcall:calls=(\d+),usec=(\d+)", ask(url, b"INFO", b"commandstats"))
    if found is None:
        raise SystemExit("the server has no figures of fcall")
    tail = re.search(r"latency_percentiles_usec_fcall:.*p99\.9=([0-9.]+)", ask(url, b"INFO", b"latencystats"))
    return float(found[2]), int(found[1]), float(tail[1]) if tail else 0.0


def measure_call(connection: Connection, url: str, calls: Sequence[Call[Any]], rounds: int) -> tuple[float, float]:
    """Microseconds of one of these calls on the server, and what 999 in 1,000 stay below."""
    ask(url, b"CONFIG", b"RESETSTAT")
    for _ in range(rounds):
        for start in range(0, len(calls), 20):
            connection.execute(calls[start : start + 20])
    total_us, num_calls, longest_us = function_times(url)
    return total_us / num_calls, longest_us


def report_housekeeping(url: str, num_sessions: int) -> bool:
    """Measures and prints what sessions cost; whether that is within its bounds."""
    bus = open_bus(url, POOL)
    connection = bus.connect()
    ask(url, b"CONFIG", b"SET", b"latency-tracking-info-percentiles", b"50 99.9")
    status = bytes(600)
    num_workers = num_sessions * 4 // 5
    kinds = [SessionKind.WORKER] * num_workers + [SessionKind.SCHEDULER] * (num_sessions - num_workers)
    sids = [number.to_bytes(16, "big") for number in range(num_sessions)]
    for number, (sid, kind) in enumerate(zip(sids, kinds, strict=True)):
        connection.call(Hello(sid, kind, f"n{number}", "", 3_600_000))
        if kind is SessionKind.WORKER:
            connection.call(RegisterWorker(sid, f"n{number}", bytes(400)))
    roster = Roster()
    first: list[Call[Any]] = []
    while True:
        first.append(roster.survey())
        if roster.note(connection.call(first[-1]), 0.0):
            break
    # As sessions do: most without a status.
    renewals = [Renew(sid, 3_600_000, b"" if number % 4 else status) for number, sid in enumerate(sids)]
    renew_us, renew_longest_us = measure_call(connection, url, renewals, 20)
    survey_us, survey_longest_us = measure_call(connection, url, [roster.survey()] * 20, 250)
    first_us, first_longest_us = measure_call(connection, url, first, 50)
    renewals_per_s, surveys_per_s = num_sessions * RENEWALS / TTL_S, (num_sessions - num_workers) * SURVEYS_PER_S
    share = (renew_us * renewals_per_s + survey_us * surveys_per_s) / 1e6
    longest_us = max(renew_longest_us, survey_longest_us, first_longest_us)
    for name, each_us, each_longest_us in (
        ("renew", renew_us, renew_longest_us),
        ("survey, nothing changed", survey_us, survey_longest_us),
        (f"survey, all in {len(first)} parts", first_us, first_longest_us),
    ):
        print(f"server  {name:28} {each_us:7.1f} µs   p99.9 {each_longest_us:7.1f} µs")
    print(f"housekeeping of {num_sessions} sessions, {num_workers} of them workers: {share:.2%} of the server's thread")
    connection.close()
    return share < MAX_SHARE and longest_us <= MAX_CALL_US


def measure(url: str, options: argparse.Namespace) -> None:
    """The options of the command line."""
    if not options.sessions:
        report(url, options.round_trips)
    elif not report_housekeeping(url, options.sessions):
        raise SystemExit(f"more than {MAX_SHARE:.0%} of the thread, or a call of more than {MAX_CALL_US:g} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that may be used for this; default: an embedded one")
    parser.add_argument("--server", type=Path, help="the program of the embedded server")
    parser.add_argument("--tcp", action="store_true", help="the embedded server listens on TCP, not on a Unix socket")
    parser.add_argument("--round-trips", type=int, default=20_000)
    parser.add_argument("--sessions", type=int, default=0, help="measure what so many sessions cost instead")
    options = parser.parse_args()
    if options.url:
        measure(options.url, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder), port=0 if options.tcp else None, server=options.server)
        server.start()
        try:
            measure(server.url, options)
        finally:
            server.close()


if __name__ == "__main__":
    main()
