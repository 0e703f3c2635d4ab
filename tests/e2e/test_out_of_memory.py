"""Redis at its `maxmemory`: new requests are refused, running ones finish, and all is well when there is room again."""

import threading
from collections.abc import Iterator
from pathlib import Path

import hiredis
import httpx
import pytest
from served import LIMIT_S, LONG_LEASES, SIMULATED, Served, expected, wait_until

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from penstock.client import Client, Delta
from servicekit.bus.commands import pack
from servicekit.bus.embedded import EmbeddedServer
from servicekit.bus.redis_address import parse_address

NUM_TOKENS = 1200
LONG = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def command(url: str, *words: str) -> str:
    reader = hiredis.Reader(encoding="utf-8")
    with parse_address(url).open_socket() as sock:
        sock.sendall(pack(words))
        while (reply := reader.gets()) is False:
            reader.feed(sock.recv(1 << 16))
    return str(reply)


def used(url: str) -> int:
    (line,) = (line for line in command(url, "INFO", "memory").splitlines() if line.startswith("used_memory:"))
    return int(line.partition(":")[2])


class Stream:
    """One client's stream; it has `begun` with its first token."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.begun = threading.Event()

    def follow(self, client: Client) -> None:
        for event in client.generate(self.prompt_ids, LONG):
            if isinstance(event, Delta):
                self.token_ids += event.token_ids
                self.begun.set()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    own = EmbeddedServer(tmp_path / "data", port=0)
    own.start()
    yield own
    own.close()


@pytest.mark.parametrize("share", [0.9, 1.5], ids=["above four fifths", "beyond the limit"])
def test_a_server_short_of_memory_refuses_new_requests_and_finishes_the_others(
    server: EmbeddedServer, checkpoint: Path, tmp_path: Path, share: float
) -> None:
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", "--step-ms=2", LONG_LEASES, *SIMULATED)
    with Served(tmp_path, *flags, environ={"PENSTOCK_REDIS_URL": server.url}) as served:
        served.wait_ready()
        body = {"prompt": [1, 2, 3], "max_tokens": 4}
        streams = [Stream([number, 2]) for number in range(4)]
        with served.client() as client, httpx.Client(base_url=served.http_url, timeout=300) as http:
            assert http.post("/v1/completions", json=body).status_code == 200
            running = [threading.Thread(target=stream.follow, args=(client,)) for stream in streams]
            for thread in running:
                thread.start()
            for stream in streams:
                assert stream.begun.wait(LIMIT_S)
            command(server.url, "CONFIG", "SET", "maxmemory", str(int(used(server.url) / share)))
            wait_until(lambda: http.post("/v1/completions", json=body).status_code == 503, "a look at the memory")
            refused = http.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable"), refused.text
            assert "short of memory" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
            with pytest.raises(PenstockError, match="short of memory") as caught:
                client.complete([1], LONG)
            assert caught.value.code is ErrorCode.UNAVAILABLE
            for thread in running:
                thread.join(LIMIT_S)
            for stream in streams:
                assert stream.token_ids == expected(stream.prompt_ids, NUM_TOKENS)
            command(server.url, "CONFIG", "SET", "maxmemory", "0")
            wait_until(lambda: http.post("/v1/completions", json=body).status_code == 200, "a new request")
