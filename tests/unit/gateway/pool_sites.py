"""Pools with servers of their own, whose other services are played, and gateways before them."""

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from memory_bus import MemoryBus
from prometheus_client.parser import text_string_to_metric_families
from running_gateway import RunningGateway, eventually
from scripted_pipeline import Incoming, ScriptedPipeline

from gateway_svc.service import GatewayService
from gateway_svc.settings import GatewaySettings
from servicekit.bus import Bus, open_bus
from servicekit.bus.calls import ListSessions, SessionKind

LIMIT_S = 300.0  # for what takes a second on a machine that is not busy


@dataclass
class Site:
    """A file of pools, their servers, and the gateways that serve them."""

    folder: Path
    entries: list[dict[str, Any]] = field(default_factory=list)
    pipelines: dict[str, ScriptedPipeline] = field(default_factory=dict)
    gateways: list[RunningGateway] = field(default_factory=list)
    buses: dict[str, MemoryBus] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / "pools.jsonl"

    def bus(self, name: str) -> MemoryBus:
        return self.buses.setdefault(self.url(name), MemoryBus(name))

    def open_bus(self, url: str, pool: str) -> Bus:
        """The bus of a URL, for gateways."""
        return self.buses.get(url) or open_bus(url, pool)

    def url(self, name: str) -> str:
        return f"redis://{name}.invalid"

    def add(self, name: str, model: str, *, entry: dict[str, Any] | None = None) -> ScriptedPipeline:
        """A pool whose workers have a model; in the file from the next `write` on."""
        self.pipelines[name] = pipeline = ScriptedPipeline(self.bus(name), model=model)
        pipeline.script = lambda request: request.say(name)
        pipeline.follows = True
        self.entries.append({"name": name, "redis_url": self.url(name), **(entry or {})})
        return pipeline

    def write(self, *names: str) -> None:
        """The file with these pools, in this order; without names, with all."""
        known = {entry["name"]: entry for entry in self.entries}
        self.replace_file("".join(json.dumps(known[name]) + "\n" for name in names or known))

    def replace_file(self, content: str) -> None:
        """In one step, so that nobody reads a part of it."""
        new = self.folder / "new"
        new.write_text(content)
        new.rename(self.file)

    def start(self, **settings: Any) -> RunningGateway:
        if not self.file.exists():
            self.write()
        given = {"http_address": "127.0.0.1:0", "name": f"g{len(self.gateways)}", "session_ttl_s": 60.0}
        given |= {"pools": self.file, **settings}
        first = next(iter(self.pipelines.values()))
        gateway = RunningGateway(first.bus, first, GatewayService(GatewaySettings(**given)))
        gateway.start()
        self.gateways.append(gateway)
        return gateway

    def start_two(self) -> RunningGateway:
        """A gateway of two pools: `one` with the model red, `two` with blue."""
        self.add("one", "/models/red")
        self.add("two", "/models/blue")
        gateway = self.start()
        self.wait_for(gateway, "red", "blue")
        return gateway

    def wait_for(self, gateway: RunningGateway, *models: str) -> None:
        eventually(lambda: served(gateway) == list(models), LIMIT_S)

    def close(self) -> None:
        for name in self.pipelines:
            if not self.bus(name)._is_running:  # after a test that failed: who waits for it would wait for ever
                self.bus(name).start()
        for gateway in self.gateways:
            gateway.close()
        for pipeline in self.pipelines.values():
            pipeline.close()


def served(gateway: RunningGateway) -> list[str]:
    return [each["id"] for each in httpx.get(f"{gateway.url}/v1/models", timeout=300).json()["data"]]


def ask(gateway: RunningGateway, model: str, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "x", **fields}
    return httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=300)


def text_of(reply: httpx.Response) -> str:
    text: str = reply.json()["choices"][0]["text"]
    return text


def silent(_request: Incoming) -> None:
    """Says nothing by itself."""


class Listener:
    """A client of a resumable stream, in a thread of its own."""

    def __init__(self, gateway: RunningGateway, model: str) -> None:
        self.lines: list[str] = []
        self.headers: dict[str, str] = {}
        self.thread = threading.Thread(target=self._listen, args=(gateway, model))
        self.thread.start()

    def _listen(self, gateway: RunningGateway, model: str) -> None:
        body = {"model": model, "prompt": "x", "stream": True}
        with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=300) as reply:
            self.headers |= reply.headers
            self.lines += reply.iter_lines()

    def end(self) -> str:
        """All that it was told."""
        self.thread.join(300)
        assert not self.thread.is_alive()
        chunks = [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]
        assert self.lines[-2:] == ["data: [DONE]", ""]
        return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))


def told(gateway: RunningGateway, name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by those of its labels, which are in the order of their names."""
    page = httpx.get(f"{gateway.url}/metrics", timeout=300).text
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


def up(gateway: RunningGateway) -> dict[str, float]:
    return {pool: value for (pool,), value in told(gateway, "penstock_bus_up").items()}


def gateways_of(site: Site, name: str) -> int:
    """Gateways that have a session in a pool."""
    sessions = site.bus(name).connect().call(ListSessions())
    return sum(each.kind is SessionKind.GATEWAY and each.alive for each in sessions)
