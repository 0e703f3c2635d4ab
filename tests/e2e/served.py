"""`penstock serve` as a process of its own, as users start it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

import httpx
from byte_tokenizer import write_byte_model

from contract.domain.params import SamplingParams
from penstock.client import Client
from worker_svc.core.interface import Limits
from worker_svc.core.pretended_model import expected_tokens

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0  # of a wait for an event, on any machine
LONG_LEASES = "--session-ttl-s=60"  # where nobody is missed by a lease, on a machine that stands still for seconds
CALM_LEASES = "--session-ttl-s=15"  # where somebody may die as well
# For clients that come back through the other one, as soon as the machine lets them.
TWO_GATEWAYS = ("--gateways=2", "--orphan-grace-s=600", "--resume-grace-s=600")
SIMULATED = ("--runner=simulated", "--num-blocks=2048", "--max-num-seqs=64")
VOCAB_SIZE = 300
EOS = 256
LONG_MODEL_LEN = 32_768
ENDLESS_TOKENS = 32_000  # of a stream that must not end before a machine has done what a test does meanwhile
SERVER = "server"  # what the launcher calls the embedded Valkey


def write_checkpoint(directory: Path, max_model_len: int = 4096) -> None:
    """A model for the simulated runner: a token for each byte, and a chat template."""
    write_byte_model(directory, vocab_size=VOCAB_SIZE, max_model_len=max_model_len, chats=True)


def expected(prompt_ids: list[int], count: int) -> list[int]:
    """What the simulated runner answers greedily, whatever happens meanwhile."""
    limits = Limits(0, 0, 0, 0, 0, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    return list(islice(expected_tokens(prompt_ids, SamplingParams(temperature=0).sampling, 0, limits), count))


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {limit_s:g} s"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        # A zombie has ended; who should reap it may be gone or busy.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: between opening and reading
        return False


def is_ready(url: str) -> bool:
    """Return whether the gateway there takes requests."""
    try:
        return httpx.get(f"{url}/ready", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


class Served:
    """A running pipeline; ends with the `with`."""

    def __init__(
        self, directory: Path, *flags: str, environ: Mapping[str, str] | None = None, root: Path = ROOT
    ) -> None:
        self._out, self._err = directory / "out", directory / "err"
        command = [sys.executable, "-m", "penstock.cli", "serve", "--port=0", "--grpc-port=0", *flags]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=root,  # whose code is run
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | dict(environ or {}),
            )

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(300)
            except subprocess.TimeoutExpired:
                self.process.kill()  # children die with it
                self.process.wait()

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_ready(self) -> "Served":
        def ready() -> bool:
            assert self.process.poll() is None, self.err
            return "penstock status" in self.out

        try:
            wait_until(ready, "ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.err}") from None
        return self

    @property
    def http_url(self) -> str:
        return self._found(r"OpenAI HTTP +(\S+)/v1")

    @property
    def grpc_address(self) -> str:
        return self._found(r"gRPC +(\S+)")

    @property
    def http_urls(self) -> list[str]:
        """Of all gateways, in the order of their names."""
        return re.findall(r"OpenAI HTTP +(\S+)/v1", self.out)

    @property
    def grpc_addresses(self) -> list[str]:
        """Of all gateways, in the order of their names."""
        return re.findall(r"gRPC +(\S+)", self.out)

    @property
    def model(self) -> str:
        return self._found(r"Penstock serves (\S+)")

    def client(self) -> Client:
        return Client(self.grpc_address)

    def pids(self) -> dict[str, int]:
        """The process that each child is now, the server too, by name."""
        return {name: int(pid) for name, pid in re.findall(r"^(\S+) started \(pid (\d+)\)", self.err, re.MULTILINE)}

    def _found(self, pattern: str) -> str:
        match = re.search(pattern, self.out)
        assert match, self.out
        return match[1]
