"""A server with an OpenAI API, ours or a peer's, and clients in processes of their own that load it."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.rig.children import SHOWN, ChildError
from bench.rig.process_tree import cpu_s
from bench.rig.work import Work

NUM_CLIENTS = 4
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.02
_VALUE = r"""(?:'[^']*'|"[^"]*"|\S+)"""
_PHASE = re.compile(rf"worker-0 \| \S+ \[info\] (.+?) +(?:\w+={_VALUE} )*seconds=([\d.]+)")
_HTTP = re.compile(r"OpenAI HTTP +http://[^:]+:(\d+)")


@dataclass(frozen=True)
class Load:
    """One run of a work as its clients saw it."""

    seconds: float  # from the first request to the last end
    ttft_ms: float  # time to the first token, medians over the requests
    tpot_ms: float  # time for each token after it
    events_per_token: float
    ttft_p99_ms: float = 0.0
    tpot_p99_ms: float = 0.0
    itl_ms: float = 0.0  # between two events of a request; 0: requests had no times
    itl_p99_ms: float = 0.0


class Server:
    """A server process that takes completions on some ports, until the `with` ends.

    Args:
        command: what to run.
        model: its name in requests.
        find_ports: given what the process has printed so far, its ports; none before it takes requests.
        timeout_s: how long it may take until then.
        environ: on top of this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        model: str,
        find_ports: Callable[[str], list[int]],
        timeout_s: float,
        environ: dict[str, str] | None = None,
    ) -> None:
        self._command = list(command)
        self._model = model
        self._find_ports = find_ports
        self._timeout_s = timeout_s
        self._environ = os.environ | (environ or {})
        self._exits = ExitStack()
        self.ports: list[int] = []
        self.first_s = 0.0  # from its start to the first token of a request that was sent as soon as it took one

    def __enter__(self) -> "Server":
        self._words = self._exits.enter_context(tempfile.NamedTemporaryFile("w+"))
        began_s = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._words,
            stderr=subprocess.STDOUT,
            env=self._environ,
            start_new_session=True,
        )
        try:
            while not (ports := self._find_ports(self.said())):
                self._check(began_s)
                time.sleep(_POLL_S)
            self.ports = ports
            self.load(Work("first", [[1] * 10], [1]))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.first_s = time.monotonic() - began_s
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._exits.close()

    def said(self) -> str:
        """All that it has printed so far."""
        return Path(self._words.name).read_text("utf-8", errors="replace")

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of its processes so far, by what runs in them."""
        return cpu_s(self._process.pid)

    def load(self, work: Work) -> Load:
        """Lets clients do all of `work`.

        Raises:
            ChildError: a client or the server failed; the text says why.
        """
        bodies = [{"model": self._model, **body} for body in _bodies(work)]
        at_once = work.at_once or len(bodies)
        num_clients = min(NUM_CLIENTS, at_once)
        clients = []
        for number in range(num_clients):
            asked = {
                "host": "127.0.0.1",
                "port": self.ports[number % len(self.ports)],
                "bodies": bodies[number::num_clients],
                "at_once": -(-at_once // num_clients),
                "arrivals_s": work.arrivals_s and work.arrivals_s[number::num_clients],
            }
            clients.append(_Client(asked, "embeddings" if work.pools else "completions"))
        for client in clients:
            client.read()
        for client in clients:
            client.begin()
        found = [json.loads(client.read()) for client in clients]
        return _summary(work, found)

    def _check(self, began_s: float) -> None:
        status = self._process.poll()
        if status is not None or time.monotonic() - began_s > self._timeout_s:
            why = f"ended with {status}" if status is not None else f"took no request within {self._timeout_s:g} s"
            raise ChildError(f"{' '.join(self._command[:4])} {why}: {self.said()[-SHOWN:]}")


def pipeline_ports(said: str) -> list[int]:
    """The ports that `penstock serve` invites to, when all services are ready."""
    return [int(port) for port in _HTTP.findall(said)] if "penstock status" in said else []


def pipeline_phases(said: str) -> dict[str, float]:
    """Seconds of each phase of the worker's start."""
    return {name: float(seconds) for name, seconds in _PHASE.findall(said)}


def answers_at(port: int) -> Callable[[str], list[int]]:
    """For a server that answers on one known port."""

    def find(_said: str) -> list[int]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5.0):
                return [port]
        except (urllib.error.URLError, OSError):
            return []

    return find


def _bodies(work: Work) -> list[dict[str, Any]]:
    """Of each request, but for the model."""
    if work.pools:
        return [{"input": prompt, "encoding_format": "base64"} for prompt in work.inputs]
    return [
        {"prompt": prompt, "max_tokens": num_tokens, "temperature": work.temperature, "ignore_eos": True}
        for prompt, num_tokens in zip(work.inputs, work.num_tokens, strict=True)
    ]


class _Client:
    def __init__(self, asked: dict[str, Any], kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"bench.rig.{kind}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._write(json.dumps(asked))

    def begin(self) -> None:
        self._write("")

    def read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(f"a client ended with {self._process.wait()}")
        return line

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def _summary(work: Work, found: list[dict[str, Any]]) -> Load:
    requests = [each for client in found for each in client["requests"]]
    # A server that tells no usage is believed by its events.
    num_tokens = sum(each[4] for each in requests) or sum(work.num_tokens)
    if num_tokens != sum(work.num_tokens) or len(requests) != len(work.num_tokens):
        raise ChildError(f"{work.name}: {sum(work.num_tokens)} tokens were asked for, {num_tokens} came")
    seconds = max(client["ended_s"] for client in found) - min(client["began_s"] for client in found)
    ttfts_ms = [(first - sent) * 1e3 for sent, first, *_ in requests]
    tpots_ms = [(last - first) / (num - 1) * 1e3 for _, first, last, _, num, _ in requests if num > 1]
    gaps_ms = [gap_s * 1e3 for *_, gaps_s in requests for gap_s in gaps_s]
    return Load(
        seconds,
        _quantile(ttfts_ms, 0.5),
        _quantile(tpots_ms, 0.5),
        sum(each[3] for each in requests) / num_tokens,
        ttft_p99_ms=_quantile(ttfts_ms, 0.99),
        tpot_p99_ms=_quantile(tpots_ms, 0.99),
        itl_ms=_quantile(gaps_ms, 0.5),
        itl_p99_ms=_quantile(gaps_ms, 0.99),
    )


def _quantile(values: list[float], share: float) -> float:
    """The least value that so large a share does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
