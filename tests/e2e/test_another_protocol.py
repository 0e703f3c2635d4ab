"""A version that cannot share the pool: the new one gets a pool of its own, clients are moved, the old pool drains."""

import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from served import CALM_LEASES, LIMIT_S, ROOT, SIMULATED, Served, expected, wait_until
from test_chaos import OTHER_PROTOCOL, knows

from contract.domain.params import SamplingParams
from penstock.client import Client, Delta
from servicekit.bus.embedded import EmbeddedServer

NUM_STREAMS = 6
NUM_TOKENS = 400
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

pytestmark = pytest.mark.skipif(
    not knows(OTHER_PROTOCOL), reason="the history of this checkout does not go back so far"
)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of a revision of another protocol."""
    folder = tmp_path_factory.mktemp("earlier")
    archive = subprocess.run(["git", "archive", OTHER_PROTOCOL], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path_factory.mktemp("server"), port=0)
    server.start()
    yield server
    server.close()


class Stream:
    """One client's stream; it has `begun` with its first token."""

    def __init__(self, number: int, client: Client) -> None:
        self.begun = threading.Event()
        self._prompt = [number + 1, 7, 9]
        self._client = client

    def follow(self) -> bool:
        """Return whether it was whole."""
        tokens: list[int] = []
        with self._client as client:
            for event in client.generate(self._prompt, PARAMS, timeout_s=LIMIT_S):
                if isinstance(event, Delta):
                    assert event.token_offset == len(tokens)
                    tokens.extend(event.token_ids)
                    self.begun.set()
        return tokens == expected(self._prompt, NUM_TOKENS)


@pytest.mark.parametrize("is_back", [False, True], ids=["upgrade", "roll back"])
def test_clients_are_moved_to_a_pool_of_another_protocol_without_an_error(
    earlier: Path, server: EmbeddedServer, checkpoint: Path, tmp_path: Path, is_back: bool
) -> None:
    flags = (f"--model={checkpoint}", f"--redis-url={server.url}", "--step-ms=10", "--drain-timeout-s=300")
    flags += (CALM_LEASES, *SIMULATED)
    codes = (ROOT, earlier) if is_back else (earlier, ROOT)
    folders = tmp_path / "before", tmp_path / "after"
    for each in folders:
        each.mkdir()
    with (
        Served(folders[0], "--pool=before", *flags, root=codes[0]) as before,
        Served(folders[1], "--pool=after", *flags, root=codes[1]) as after,
        ThreadPoolExecutor(2 * NUM_STREAMS) as pool,
    ):

        def begin(served: Served) -> list[Future[bool]]:
            streams = [Stream(number, served.client()) for number in range(NUM_STREAMS)]
            ends = [pool.submit(stream.follow) for stream in streams]
            wait_until(lambda: all(stream.begun.is_set() for stream in streams), "first tokens")
            return ends

        before.wait_ready()
        after.wait_ready()
        new = begin(after)  # where a Service sends clients from now on
        old = begin(before)
        before.process.send_signal(signal.SIGTERM)
        assert [end.result(LIMIT_S) for end in old + new] == [True] * 2 * NUM_STREAMS
        assert before.process.wait(LIMIT_S) == 0
