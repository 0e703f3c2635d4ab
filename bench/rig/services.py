"""Services as processes on an embedded server, as `penstock serve` starts them."""

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from bench.rig.checkpoint import write_checkpoint
from penstock.launcher.ports import free_ports
from servicekit.bus import Bus, open_bus
from servicekit.bus.embedded import EmbeddedServer

POOL = "bench"
READY_TIMEOUT_S = 300.0


class Services:
    """A server and any of the five services; all end with the `with`.

    Args:
        step_s: device time of a simulated step, seconds.
        max_num_seqs: slots of the worker.
        max_model_len: tokens of the longest sequence.
        window: plans in flight.
        num_gateways: processes that `start("gateway")` starts.
    """

    def __init__(
        self, step_s: float, max_num_seqs: int, max_model_len: int, window: int, num_gateways: int = 1
    ) -> None:
        self._exits = ExitStack()
        self._processes: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        ports = free_ports(2 * num_gateways)
        self.http_ports = ports[:num_gateways]
        self.http_port, self.grpc_port = ports[0], ports[num_gateways]
        num_blocks = max_num_seqs * -(-max_model_len // 16)
        self._directory = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        write_checkpoint(self._directory)
        model = ["--model", str(self._directory)]
        self._arguments = {
            "tokenizer": [*model, f"--max-model-len={max_model_len}"],
            "scheduler": [f"--plans-in-flight={window}", f"--max-num-batched-tokens={max(2048, max_num_seqs)}"],
            "worker": [
                *model,
                "--runner=simulated",
                f"--step-ms={step_s * 1e3:g}",
                f"--max-num-seqs={max_num_seqs}",
                f"--max-num-batched-tokens={max(2048, max_num_seqs)}",
                f"--max-model-len={max_model_len}",
                f"--num-blocks={num_blocks}",
                "--home-shard=0",
            ],
            "detokenizer": model,
        }
        self._gateways = [
            [f"--http-address=127.0.0.1:{http}", f"--grpc-address=127.0.0.1:{grpc}"]
            for http, grpc in zip(self.http_ports, ports[num_gateways:], strict=True)
        ]

    def __enter__(self) -> "Services":
        self._server = EmbeddedServer(self._directory / "data")
        self._exits.callback(self._server.close)
        self._server.start()
        self._url = self._server.url
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for _, process, _ in self._processes:
            process.terminate()
        for _, process, _ in self._processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._exits.close()

    @property
    def bus(self) -> Bus:
        """The pool."""
        return open_bus(self._url, POOL)

    def start(self, *kinds: str) -> None:
        """Starts services; they need not be ready when this returns."""
        for kind in kinds:
            for number, arguments in enumerate(self._gateways if kind == "gateway" else [self._arguments[kind]]):
                name = f"{kind}-{number}" if number else kind
                log = self._directory / f"{name}.log"
                command = [sys.executable, "-m", f"{kind}_svc", *arguments]
                common = [f"--redis-url={self._url}", f"--pool={POOL}", f"--name={name}", "--log-level=warning"]
                with log.open("wb") as output:
                    process = subprocess.Popen(command + common, stdout=output, stderr=subprocess.STDOUT)
                self._processes.append((kind, process, log))

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds that the server and each kind of process have used so far; empty where there is no /proc."""
        used: dict[str, float] = {}
        for kind, pid in (*((kind, process.pid) for kind, process, _ in self._processes), ("server", self._server.pid)):
            if pid and Path(f"/proc/{pid}/stat").exists():
                used[kind] = used.get(kind, 0.0) + _cpu_s(pid)
        return used

    def check(self) -> None:
        """Raises SystemExit with the end of its log if a service has ended."""
        for kind, process, log in self._processes:
            if process.poll() is not None:
                raise SystemExit(f"{kind} ended with {process.returncode}: {log.read_text(errors='replace')[-2000:]}")

    def wait_ready(self) -> None:
        """Until each gateway answers a completion: then all five work."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        for port in self.http_ports:
            self._wait_for_answer(f"http://127.0.0.1:{port}/v1/completions", deadline_s)

    def _wait_for_answer(self, url: str, deadline_s: float) -> None:
        body = b'{"prompt": [1, 2, 3], "max_tokens": 1}'
        while True:
            self.check()
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S):
                    return
            except (urllib.error.URLError, ConnectionError) as error:
                if time.monotonic() > deadline_s:
                    raise SystemExit(f"the pipeline does not answer: {error}") from error
                time.sleep(0.05)


def _cpu_s(pid: int) -> float:
    # Fields 14 and 15 of proc(5)'s stat, counted after the name, which may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
