"""A client that does not read, a detokenizer that stands still: nobody else waits, memory is bounded, nothing lost."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import write_byte_model
from in_memory import Pipeline, wait_until
from watched_bus import WatchedBus
from worker_gate import Gate

from contract.domain.params import SamplingParams
from gateway_svc.core.backlog import LOGPROB_BYTES, ROW_BYTES
from servicekit.bus.calls import Length, LogBacklogs
from worker_svc.core.interface import Limits
from worker_svc.core.pretended_model import expected_tokens

MAX_BACKLOG_BYTES = 16 * 1024
NUM_CHOICES, NUM_TOKENS = 4, 1200
NUM_LOGPROBS = 20  # so that it is more than the sockets of the system hold
WORKER = {"runner": "simulated", "step_ms": 0.5, "num_blocks": 2000, "max_num_seqs": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("long")
    write_byte_model(directory, max_model_len=4096)
    return directory


def expected(prompt: list[int], count: int) -> list[int]:
    limits = Limits(0, 0, 0, 0, 0, vocab_size=257, eos_token_ids=(256,))
    return list(islice(expected_tokens(prompt, GREEDY.sampling, 0, limits), count))


class Reader:
    """An HTTP client that reads when it is told to, over a connection that holds little."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(300.0)
        self._socket.connect(("127.0.0.1", port))
        body = {
            "prompt": [9, 8, 7], "n": NUM_CHOICES, "max_tokens": NUM_TOKENS, "temperature": 0.7, "seed": 5,
            "ignore_eos": True, "stream": True, "logprobs": NUM_LOGPROBS, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        head += "Content-Type: application/json\r\n"
        self._socket.sendall(head.encode() + b"Connection: close\r\n\r\n" + content)

    def read(self) -> list[tuple[str, list[str]]]:
        """All there is: text and tokens of each choice."""
        # With what little it held so far, each packet would wait for a timer of the system.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        received = b""
        while part := self._socket.recv(1 << 16):
            received += part
        self._socket.close()
        texts, tokens = [""] * NUM_CHOICES, [[] for _ in range(NUM_CHOICES)]  # type: ignore[var-annotated]
        for event in _events(received):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
                if choice["logprobs"]:
                    tokens[choice["index"]] += choice["logprobs"]["tokens"]
        return list(zip(texts, tokens, strict=True))


def _events(received: bytes) -> list[dict[str, Any]]:
    """The events of a chunked reply."""
    _, _, rest = received.partition(b"\r\n\r\n")
    joined = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        joined, rest = joined + rest[:length], rest[length + 2 :]
    data = [line.removeprefix(b"data: ") for line in joined.split(b"\n") if line.startswith(b"data: ")]
    assert data[-1] == b"[DONE]"
    return [json.loads(each) for each in data[:-1]]


def test_a_client_that_does_not_read_costs_nobody_anything_and_gets_all_of_it_later(long_model: Path) -> None:
    with Pipeline(long_model, worker=WORKER, gateway={"max_backlog_bytes": MAX_BACKLOG_BYTES}) as pipeline:
        gateway = pipeline.gateway
        slow = Reader(gateway.http_port)
        wait_until(lambda: gateway.stats.num_slow_clients > 0)
        (served,) = gateway.pools.all[0].delivery._served.values()
        sink = served.call.sink
        with ThreadPoolExecutor(100) as pool:
            prompts = [[number, 1, 2] for number in range(100)]
            others = list(pool.map(lambda prompt: pipeline.client.complete(prompt, GREEDY), prompts))
        for prompt, generation in zip(prompts, others, strict=True):
            assert generation.outputs[0].token_ids == expected(prompt, 12)
        # Meanwhile the request goes on to its end, and what is kept for its client stays small.
        wait_until(lambda: not pipeline.scheduler.list_requests())
        row_bytes = ROW_BYTES + (1 + NUM_LOGPROBS) * LOGPROB_BYTES + 100
        assert sink._backlog.num_bytes < MAX_BACKLOG_BYTES + row_bytes
        assert len(sink._outlet._queue) <= 1
        read = slow.read()
        prompt = Reader(gateway.http_port).read()
        assert read == prompt
        assert [len(tokens) for _, tokens in read] == [NUM_TOKENS] * NUM_CHOICES


def test_a_detokenizer_that_stands_still_stops_the_steps_and_loses_nothing(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, gate = WatchedBus(), Gate()
    every = {"session_ttl_s": 300.0}  # who is held is not taken for dead
    scheduler = {"max_log_backlog": 300}
    with Pipeline(long_model, bus=bus, worker=WORKER, scheduler=scheduler, every=every, load=gate.load) as pipeline:
        is_running, is_held = threading.Event(), threading.Event()
        is_running.set()
        detokenizer, connection = pipeline.detokenizer, bus.connect()
        turn = detokenizer._turn

        def held(*arguments: Any) -> None:
            if not is_running.is_set():
                is_held.set()
            is_running.wait()
            detokenizer._keep_at_s = 0.0  # it tells at once how far it has read, so that steps go on
            turn(*arguments)

        monkeypatch.setattr(detokenizer, "_turn", held)
        prompts = [[number, 3, 4] for number in range(20)]
        params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
        with ThreadPoolExecutor(20) as pool:
            pending = [pool.submit(pipeline.client.complete, prompt, params) for prompt in prompts]
            wait_until(lambda: len(pipeline.scheduler.list_requests()) == 20)
            is_running.clear()
            assert is_held.wait(300)
            gate.open()
            logs = [bus.keys.tokens(shard) for shard in range(4)]

            def watch(times: int) -> list[int]:
                """How long the logs are when the scheduler has looked so often."""
                seen = bus.counts[LogBacklogs]
                wait_until(lambda: bus.counts[LogBacklogs] >= seen + times)
                return [connection.call(Length(log)) for log in logs]

            wait_until(lambda: max(pipeline.scheduler.meters.log_backlogs.values(), default=0) > 300)
            wait_until(lambda: not pipeline.scheduler.stats().workers["worker"].num_plans_in_flight)
            lengths = watch(2)  # by then the last rows are written
            assert watch(5) == lengths
            is_running.set()
            for prompt, each in zip(prompts, pending, strict=True):
                assert each.result(900).outputs[0].token_ids == expected(prompt, 1500)
