"""Event-stream tokens per second of one gateway process, and the CPU time of a token.

A gateway on an embedded server; this process writes the text batches of a detokenizer, one row for each stream and
step; clients in a process of their own count events.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from bench.rig.machine import describe_machine
from contract.domain import chain
from contract.v1 import common_pb2, results_pb2, text_pb2
from servicekit.bus import Connection, open_bus
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, Call, Fetch, Hello, ReadGroup, RegisterWorker, SessionKind
from servicekit.bus.embedded import EmbeddedServer
from servicekit.bus.keys import Keys

PIECE = " token"
TTL_MS = 600_000
READY_TIMEOUT_S = 30.0


class Feed:
    """Text as a detokenizer would send it for requests that all go on step by step."""

    def __init__(self, request_ids: list[bytes], num_steps: int) -> None:
        self._ids = b"".join(request_ids)
        self._num_rows = len(request_ids)
        self._num_steps = num_steps
        self._chains = np.full(self._num_rows, chain.CHAIN_START, np.uint64)

    def batch(self, step: int) -> bytes:
        """The TextBatch of a step, counted from 0; the last one ends every request."""
        rows = self._num_rows
        token_ids = np.full(rows, step, np.uint32)
        message = text_pb2.TextBatch(
            origin=common_pb2.Origin(sent_unix_ns=time.time_ns()),
            request_ids=self._ids,
            sequences=bytes(4 * rows),
            token_offsets=np.full(rows, step, "<u4").tobytes(),
            text_offsets=np.full(rows, step * len(PIECE), "<u4").tobytes(),
            chains=self._chains.astype("<u8").tobytes(),
            counts=np.ones(rows, "<u4").tobytes(),
            token_ids=token_ids.tobytes(),
            texts=[PIECE] * rows,
        )
        if step == self._num_steps - 1:
            usage = common_pb2.Usage(prompt_tokens=16, output_tokens=self._num_steps)
            end = text_pb2.SequenceEnd(reason=common_pb2.FINISH_REASON_LENGTH, usage=usage)
            message.end_rows = np.arange(rows, dtype="<u4").tobytes()
            message.ends.extend([end] * rows)
        self._chains = chain.extend_columns(self._chains, token_ids)
        return message.SerializeToString()


def main() -> None:
    """Prints one line for each repetition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="clients at once")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0.0, help="milliseconds between steps; 0: as fast as it goes")
    options = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        server = EmbeddedServer(Path(directory))
        server.start()
        try:
            _measure(server.url, options)
        finally:
            server.close()


def _measure(url: str, options: argparse.Namespace) -> None:
    bus = open_bus(url)
    connection = bus.connect()
    sid = os.urandom(16)
    info = results_pb2.WorkerInfo(model="bench", max_model_len=options.tokens + 16)
    connection.call(Hello(sid, SessionKind.WORKER, "bench", "", TTL_MS))
    connection.call(RegisterWorker(sid, "bench", info.SerializeToString()))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "gateway_svc", f"--redis-url={url}", f"--http-address=127.0.0.1:{port}"]
    gateway = subprocess.Popen([*command, "--log-level=warning"])
    try:
        _wait_ready(port)
        for _ in range(options.repeat):
            _run(connection, bus.keys, port, gateway.pid, options)
    finally:
        gateway.terminate()
        gateway.wait()


def _wait_ready(port: int) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=READY_TIMEOUT_S):
                return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _run(connection: Connection, keys: Keys, port: int, pid: int, options: argparse.Namespace) -> None:
    arguments = ["127.0.0.1", str(port), str(options.streams), str(options.tokens)]
    clients = subprocess.Popen([sys.executable, "-m", "bench.rig.streams", *arguments], stdout=subprocess.PIPE)
    request_ids: list[bytes] = []
    while len(request_ids) < options.streams:
        if clients.poll() is not None:
            raise SystemExit("the clients have ended")
        hints = connection.call(ReadGroup(keys.prompts, k.TOKENIZERS, b"bench", 256, 1000))
        request_ids += [entry.fields[k.REQUEST] for entry in hints]
    stored = connection.call(Fetch(request_ids[0]))
    assert stored is not None
    stream = keys.text(stored.route)
    feed = Feed(request_ids, options.tokens)
    cpu_s, began_s = _cpu_s(pid), time.perf_counter()
    for step in range(options.tokens):
        call: Call[bytes] = Append(stream, {k.PAYLOAD: feed.batch(step)}, k.TEXT_CAP)
        connection.call(call)
        if options.step_ms:
            time.sleep(max(0.0, began_s + (step + 1) * options.step_ms * 1e-3 - time.perf_counter()))
    output, _ = clients.communicate()
    took_s = time.perf_counter() - began_s
    cpu_s = _cpu_s(pid) - cpu_s
    window = json.loads(output)
    num_tokens = options.streams * options.tokens
    rate = (window["end_events"] - window["begin_events"]) / (window["end_s"] - window["begin_s"])
    print(
        f"{options.streams} streams of {options.tokens} tokens: {rate:,.0f} events/s while all are served, "
        f"{num_tokens / took_s:,.0f} tokens/s overall, gateway CPU {cpu_s / num_tokens * 1e6:.1f} us a token"
    )


def _cpu_s(pid: int) -> float:
    """User and system time of a process, seconds (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
