"""Two pools on servers of their own behind the gateways of one of them, as real processes."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from served import CALM_LEASES, SERVER, SIMULATED, Served, wait_until, write_checkpoint

from contract.domain.errors import PenstockError
from penstock.client import Client

LIMIT_S = 300.0
NUM_TOKENS = 300
PROMPT = [7, 8, 9]


class Site:
    """The pool `red`, whose gateways serve `blue` too, and the pool `blue`, which has another model."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.file = folder / "pools.jsonl"
        self.write({"name": "red", "pool": "penstock"})
        more = {
            "red": (f"--pools={self.file}", "--gateways=2"),
            "blue": ("--simulated-seed=5",),
        }
        common = ("--step-ms=5", CALM_LEASES, *SIMULATED)
        self.served: dict[str, Served] = {}
        for name, flags in more.items():
            (folder / name / name).mkdir(parents=True)
            write_checkpoint(folder / name / name)
            model = f"--model={folder / name / name}"
            self.served[name] = stack.enter_context(Served(folder / name, model, *common, *flags))
        for each in self.served.values():
            each.wait_ready()
        self.urls = self.served["red"].http_urls

    @property
    def blue(self) -> dict[str, str]:
        match = re.search(r"^server started .* at (unix://\S+)", self.served["blue"].err, re.MULTILINE)
        assert match
        return {"name": "blue", "pool": "penstock", "redis_url": match[1]}

    def write(self, *entries: dict[str, str]) -> None:
        new = self.file.with_suffix(".new")
        new.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        new.rename(self.file)

    def serve(self, *names: str) -> None:
        """Until all gateways serve these pools and no other."""
        known = {"red": {"name": "red", "pool": "penstock"}, "blue": self.blue}
        self.write(*(known[name] for name in names))
        for url in self.urls:
            wait_until(lambda url=url: models(url) == list(names), f"{names} at {url}")  # type: ignore[misc]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path_factory.mktemp("pools"), stack)


@pytest.fixture(autouse=True)
def both(site: Site) -> None:
    site.serve("red", "blue")


def models(url: str) -> list[str]:
    return [each["id"] for each in httpx.get(f"{url}/v1/models", timeout=300).json()["data"]]


def body(model: str, **more: object) -> dict[str, object]:
    return {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **more}


def ask(url: str, model: str, **more: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body(model, **more), timeout=LIMIT_S)


def text_of(reply: httpx.Response) -> str:
    text: str = reply.json()["choices"][0]["text"]
    return text


def undisturbed(site: Site, name: str) -> str:
    """The pool's own answer, through a gateway that knows no other."""
    if name == "red":
        return text_of(ask(site.urls[0], "red"))
    return text_of(httpx.post(f"{site.served['blue'].http_url}/v1/completions", json=body(""), timeout=LIMIT_S))


class Stream:
    """A resumable stream, read in a thread."""

    def __init__(self, url: str, model: str) -> None:
        self.text = self.request_id = ""
        self.lines: list[str] = []
        self.begun = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(url, model))
        self.thread.start()
        assert self.begun.wait(LIMIT_S)

    def _read(self, url: str, model: str) -> None:
        asked = body(model, stream=True, max_tokens=6 * NUM_TOKENS)
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=LIMIT_S) as reply:
            for line in reply.iter_lines():
                self.lines.append(line)
                if line.startswith("data: {"):
                    self.text += "".join(each["text"] for each in json.loads(line[6:])["choices"])
                    self.begun.set()

    def end(self) -> str:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        assert "data: [DONE]" in self.lines
        return self.text


def test_calls_go_where_their_model_is(site: Site) -> None:
    red, blue = (undisturbed(site, name) for name in ("red", "blue"))
    assert red != blue
    for url in site.urls:
        assert [text_of(ask(url, name)) for name in ("red", "blue", "")] == [red, blue, red]
        assert ask(url, "green").status_code == 404
    with Client(",".join(site.served["red"].grpc_addresses), timeout_s=LIMIT_S) as client:
        assert {each.name for each in client.models()} == {"red", "blue"}
        for name, text in (("red", red), ("blue", blue)):
            params = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
            assert client.complete(PROMPT, params, model=name).text == text
        assert {session.kind for session in client.pipeline("blue").sessions} >= {"gateway", "worker", "scheduler"}
        with pytest.raises(PenstockError, match="there is no pool 'green'"):
            client.pipeline("green")


def test_a_stream_goes_on_through_another_gateway(site: Site) -> None:
    first, second = site.urls
    whole = undisturbed(site, "blue")
    text = last = request_id = ""
    with httpx.stream(
        "POST", f"{first}/v1/completions", json=body("blue", stream=True, resumable=True), timeout=LIMIT_S
    ) as reply:
        for line in reply.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                last = value
            elif name == "data":
                chunk = json.loads(value)
                text += chunk["choices"][0]["text"]
                request_id = chunk["id"]
                if len(text) > 40:
                    break
    assert request_id.startswith("cmpl-blue-")
    assert httpx.get(f"{second}/v1/requests/{request_id}", timeout=LIMIT_S).json()["id"] == request_id
    page = f"{second}/v1/requests/{request_id}/events"
    with httpx.stream("GET", page, headers={"last-event-id": last}, timeout=LIMIT_S) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == whole


def test_a_server_that_is_away_is_503_for_its_models_alone(site: Site) -> None:
    url = site.urls[0]
    red = undisturbed(site, "red")
    both = {name: Stream(url, name) for name in ("red", "blue")}
    pid = site.served["blue"].pids()[SERVER]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: ask(url, "blue").status_code == 503, "503 for the pool that is away")
        refused = ask(url, "blue")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert both["red"].end().startswith(red)
        assert text_of(ask(url, "red")) == red
        assert httpx.get(f"{url}/ready", timeout=LIMIT_S).status_code == 200
        assert models(url) == ["red", "blue"]
        assert both["blue"].thread.is_alive()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert both["blue"].end().startswith(undisturbed(site, "blue"))
    wait_until(lambda: ask(url, "blue").status_code == 200, "the pool is back")


def test_a_pool_is_left_when_its_streams_have_ended_and_joined_again(site: Site) -> None:
    url = site.urls[0]
    stream = Stream(url, "blue")
    site.serve("red")
    assert ask(url, "blue").status_code == 404
    assert stream.end().startswith(undisturbed(site, "blue"))

    def gateways() -> int:
        with site.served["blue"].client() as client:
            return sum(each.kind == "gateway" and each.alive for each in client.pipeline().sessions)

    wait_until(lambda: gateways() == 1, "only its own gateway is in the pool")
    site.serve("blue", "red")
    assert text_of(ask(url, "")) == undisturbed(site, "blue"), "the first is the first of the file"
