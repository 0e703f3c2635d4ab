"""Redis at its `maxmemory`: new requests are refused, running ones finish, and all is well when there is room again."""

import threading
from collections.abc import Iterator
from pathlib import Path

import hiredis
import httpx
import pytest
from served import SIMULATED, Served, expected, wait_until

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from penstock.client import Generation
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
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", "--step-ms=2", *SIMULATED)
    with Served(tmp_path, *flags, environ={"PENSTOCK_REDIS_URL": server.url}) as served:
        served.wait_ready()
        body = {"prompt": [1, 2, 3], "max_tokens": 4}
        found: list[Generation] = []
        with served.client() as client, httpx.Client(base_url=served.http_url, timeout=300) as http:
            assert http.post("/v1/completions", json=body).status_code == 200
            running = [
                threading.Thread(target=lambda number=number: found.append(client.complete([number, 2], LONG)))
                for number in range(4)
            ]
            for thread in running:
                thread.start()
            wait_until(
                lambda: 'penstock_open_streams{pool="penstock"} 4.0' in http.get("/metrics").text, "four streams"
            )
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
                thread.join(120.0)
            outputs = {tuple(generation.outputs[0].token_ids) for generation in found}
            assert outputs == {tuple(expected([number, 2], NUM_TOKENS)) for number in range(4)}
            command(server.url, "CONFIG", "SET", "maxmemory", "0")
            wait_until(lambda: http.post("/v1/completions", json=body).status_code == 200, "a new request")
