"""Steps per second of the pipeline: of scheduler and worker alone over the bus, and of all five to a client."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.rig.loop import NUM_PROMPT_TOKENS
from bench.rig.services import READY_TIMEOUT_S, Services
from bench.rig.streams import completion_prompt
from contract.domain.params import SamplingParams
from contract.domain.request import Header, Prompt, Request
from gateway_svc.wire import encode_header, encode_prompt, encode_request
from servicekit.bus.calls import Call, Hello, Length, ListWorkers, SessionKind, Submit, Tokenized
from servicekit.bus.interface import Connection
from tokenizer_svc.core.tokenize import TokenizedPrompt
from tokenizer_svc.wire import encode_tokenized, pack

SERVICES = ("detokenizer", "worker", "scheduler", "tokenizer", "gateway")
_SHARD = 0
_POLL_S = 0.005


@dataclass(frozen=True)
class Mark:
    """A moment of a run."""

    time_s: float  # monotonic
    num_steps: float
    cpu_s: dict[str, float]  # by process


@dataclass(frozen=True)
class Rate:
    """The counts between two marks."""

    steps_per_s: float
    cpu_us: dict[str, float]  # CPU time of a step by process, microseconds


def rate_between(begin: Mark, end: Mark) -> Rate:
    num_steps = end.num_steps - begin.num_steps
    cpu_us = {kind: (end.cpu_s[kind] - begin.cpu_s[kind]) / num_steps * 1e6 for kind in end.cpu_s}
    return Rate(num_steps / (end.time_s - begin.time_s), cpu_us)


def measure_bus(step_s: float, num_seqs: int, num_steps: int, window: int) -> Rate:
    """The rate while all sequences decode; requests are put on the bus as gateway and tokenizer would."""
    max_model_len = NUM_PROMPT_TOKENS + num_steps
    with Services(step_s, num_seqs, max_model_len, window) as services:
        services.start("scheduler", "worker")
        bus = services.bus
        connection = bus.connect()
        _wait_for_worker(services, connection)
        calls = [call for number in range(num_seqs) for call in _arrival(number, num_steps)]
        connection.execute([Hello(os.urandom(16), SessionKind.GATEWAY, "bench", "", 60_000), *calls])
        first, last = num_steps // 5, num_steps - num_steps // 20
        marks: list[Mark] = []
        # The log has an entry for each request that was opened, and then one for each step.
        for count in (num_seqs + first, num_seqs + last):
            while (length := connection.call(Length(bus.keys.tokens(_SHARD)))) < count:
                services.check()
                time.sleep(_POLL_S)
            marks.append(Mark(time.monotonic(), length, services.cpu_s()))
        connection.close()
    return rate_between(*marks)


def measure_pipeline(step_s: float, num_seqs: int, num_steps: int, window: int, num_gateways: int = 1) -> Rate:
    """The rate at which a client gets the events of all sequences, between the last one's first and the first one's
    last; there is one event for each sequence and step.
    """
    with Services(step_s, num_seqs, NUM_PROMPT_TOKENS + num_steps, window, num_gateways) as services:
        services.start(*SERVICES)
        services.wait_ready()
        ports = ",".join(map(str, services.http_ports))
        command = [sys.executable, "-m", "bench.rig.streams", "127.0.0.1", ports]
        begin_cpu_s = services.cpu_s()
        shown = subprocess.run(
            [*command, str(num_seqs), str(num_steps)], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        cpu_s = services.cpu_s()
    window_of = json.loads(shown)
    steps = (window_of["end_events"] - window_of["begin_events"]) / num_seqs
    cpu_us = {kind: (cpu_s[kind] - begin_cpu_s[kind]) / num_steps * 1e6 for kind in cpu_s}
    return Rate(steps / (window_of["end_s"] - window_of["begin_s"]), cpu_us)


def _wait_for_worker(services: Services, connection: Connection) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not any(entry.owner for entry in connection.call(ListWorkers())):
        services.check()
        if time.monotonic() > deadline_s:
            raise SystemExit("the scheduler does not pair with the worker")
        time.sleep(0.05)


def _arrival(number: int, num_steps: int) -> list[Call[Any]]:
    """The entries that bring one request to the scheduler."""
    request_id = os.urandom(16)
    prompt = completion_prompt(number)
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    header = Header(request_id, "", 0, time.time_ns(), 0, "", number)
    request = Request(header, "", Prompt(token_ids=tuple(prompt)), params)
    body, part = encode_request(request), encode_prompt(request.prompt)
    tokenized = TokenizedPrompt(np.array(prompt, np.uint32), (), params.stopping)
    meta = encode_tokenized(tokenized)
    route = bytes(16)
    return [
        Submit(request_id, "", encode_header(header), body, b"", route, header.arrival_ns, prompt=part),
        Tokenized(request_id, b"0-0", meta, header.arrival_ns, len(prompt), pack(tokenized.token_ids)),
    ]
