"""One gateway before two pools, each on a server of its own, whose other services are played."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from memory_bus import MemoryBus
from prometheus_client.parser import text_string_to_metric_families
from running_gateway import RunningGateway, eventually
from scripted_pipeline import Incoming, ScriptedPipeline

from contract.domain.errors import ErrorCode, PenstockError
from contract.v1 import inference_pb2, inference_pb2_grpc, requests_pb2
from gateway_svc import pools
from gateway_svc.service import GatewayService
from gateway_svc.settings import GatewaySettings
from penstock.client import Client
from servicekit.bus import Bus, open_bus
from servicekit.bus.calls import Hello, ListSessions, SessionKind
from servicekit.shape import pool_shape

LIMIT_S = 90.0  # for what takes a second on a machine that is not busy


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
        new = self.folder / "new"
        new.write_text("".join(json.dumps(known[name]) + "\n" for name in names or known))
        new.rename(self.file)

    def start(self, **settings: Any) -> RunningGateway:
        if not self.file.exists():
            self.write()
        given = {"http_address": "127.0.0.1:0", "name": f"g{len(self.gateways)}", "pools": self.file, **settings}
        first = next(iter(self.pipelines.values()))
        gateway = RunningGateway(first.bus, first, GatewayService(GatewaySettings(**given)))
        gateway.start()
        self.gateways.append(gateway)
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


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path)
    monkeypatch.setattr(pools, "open_bus", made.open_bus)
    yield made
    made.close()


@pytest.fixture
def gateway(site: Site) -> RunningGateway:
    site.add("one", "/models/red")
    site.add("two", "/models/blue")
    gateway = site.start()
    site.wait_for(gateway, "red", "blue")
    return gateway


def served(gateway: RunningGateway) -> list[str]:
    return [each["id"] for each in httpx.get(f"{gateway.url}/v1/models", timeout=120).json()["data"]]


def ask(gateway: RunningGateway, model: str, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "x", **fields}
    return httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=120)


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
        self.thread.join(120)
        assert not self.thread.is_alive()
        chunks = [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]
        assert self.lines[-2:] == ["data: [DONE]", ""]
        return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))


def test_a_call_goes_where_its_model_is(gateway: RunningGateway) -> None:
    assert [text_of(ask(gateway, model)) for model in ("red", "blue", "red")] == ["one", "two", "one"]
    assert text_of(httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "x"}, timeout=120)) == "one"
    chat = {"model": "blue", "messages": [{"role": "user", "content": "x"}]}
    reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=chat, timeout=120).json()
    assert (reply["model"], reply["choices"][0]["message"]["content"]) == ("blue", "two")
    with Client(gateway.grpc, timeout_s=120) as client:
        assert [each.name for each in client.models()] == ["red", "blue"]
        assert [client.complete("x", model=model).text for model in ("blue", "red", "")] == ["two", "one", "one"]
        with pytest.raises(PenstockError) as caught:
            client.complete("x", model="green")
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
    assert ask(gateway, "green").status_code == 404
    assert httpx.get(f"{gateway.url}/v1/models/blue").json()["id"] == "blue"
    assert httpx.get(f"{gateway.url}/v1/models/green").status_code == 404


def test_ids_name_the_pool_so_that_any_gateway_finds_it(gateway: RunningGateway, site: Site) -> None:
    site.pipelines["two"].script = silent
    second = site.start()
    site.wait_for(second, "red", "blue")
    first = Listener(gateway, "blue")
    (request,) = site.pipelines["two"].wait_for(1)
    request.send(request.row("a"))
    shown = f"two-{request.request_id.hex()}"
    for url in (gateway.url, second.url):
        for name in (shown, f"cmpl-{shown}"):
            page = httpx.get(f"{url}/v1/requests/{name}", timeout=120).json()
            assert (page["id"], page["state"]) == (f"cmpl-{shown}", "running")
        for name in (request.request_id.hex(), f"one-{request.request_id.hex()}"):
            assert httpx.get(f"{url}/v1/requests/{name}", timeout=120).status_code == 404, "it is not in the first pool"
        refused = httpx.get(f"{url}/v1/requests/three-{request.request_id.hex()}", timeout=120)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "request_id")
        assert "'three'; there is one, two" in refused.json()["error"]["message"]
    request.afterwards.append(lambda: request.send(request.row("b", finish=1)))
    with httpx.stream("GET", f"{second.url}/v1/requests/cmpl-{shown}/events", timeout=120) as reply:
        chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert reply.headers["x-penstock-request-id"] == shown
    assert {chunk["id"] for chunk in chunks} == {f"cmpl-{shown}"}
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "ab"
    first.thread.join(60)
    assert first.headers["x-penstock-request-id"] == shown


def test_a_request_is_cancelled_in_its_pool(gateway: RunningGateway, site: Site) -> None:
    site.pipelines["two"].script = silent
    listeners = [Listener(gateway, "blue") for _ in range(2)]
    first, second = site.pipelines["two"].wait_for(2)
    path = f"{gateway.url}/v1/requests/cmpl-two-{first.request_id.hex()}"
    assert httpx.delete(path, timeout=120).json()["cancelled"] is True
    with Client(gateway.grpc, timeout_s=120) as client:
        assert client.cancel(f"two-{second.request_id.hex()}")
        assert not client.cancel(second.request_id.hex()), "in the first pool it is not"
    assert {request for request, _ in site.pipelines["two"].cancels(2)} == {first.request_id, second.request_id}
    for request in (first, second):
        request.send(request.row("", [], finish=3))
    for listener in listeners:
        listener.thread.join(60)
        assert not listener.thread.is_alive()


def test_over_grpc_a_stream_goes_on_through_another_gateway(gateway: RunningGateway, site: Site) -> None:
    def speak(request: Incoming) -> None:
        request.send(request.row("a"))
        request.afterwards.append(lambda: request.send(request.row("b", finish=1)))

    site.pipelines["two"].script = speak
    second = site.start()
    site.wait_for(second, "red", "blue")
    with grpc.insecure_channel(gateway.grpc) as channel, grpc.insecure_channel(second.grpc) as other:
        asked = inference_pb2.GenerateCall(request=requests_pb2.GenerateRequest(text="x", n=1, model="blue"))
        asked.resumable = True
        accepted = next(inference_pb2_grpc.InferenceStub(channel).Generate(asked))
        (request,) = site.pipelines["two"].wait_for(1)
        shown = accepted.accepted.request_id
        assert shown == f"two-{request.request_id.hex()}"
        resumed = inference_pb2_grpc.InferenceStub(other).Resume(inference_pb2.ResumeCall(request_id=shown))
        again, *rest = resumed
    assert again == accepted
    assert "".join(event.delta.text for event in rest) == "ab"


def test_a_key_names_a_request_of_the_pool_that_its_model_is_in(gateway: RunningGateway, site: Site) -> None:
    key = {"idempotency-key": "k"}
    first, again = (ask(gateway, "blue", headers=key) for _ in range(2))
    assert first.json()["id"] == again.json()["id"]
    assert first.json()["id"].startswith("cmpl-two-")
    assert ask(gateway, "blue", headers=key, prompt="y").status_code == 409
    other = ask(gateway, "red", headers=key)
    assert (other.status_code, text_of(other)) == (200, "one"), "in another pool it names another request"
    assert [len(pipeline.wait_for(1)) for pipeline in site.pipelines.values()] == [1, 1]


def test_a_pool_whose_server_is_away_is_503_for_its_models_alone(site: Site) -> None:
    site.add("one", "/models/red")
    site.add("two", "/models/blue")
    site.pipelines["one"].script = silent
    gateway = site.start(outage_patience_s=0.2)
    site.wait_for(gateway, "red", "blue")
    listener = Listener(gateway, "red")
    (request,) = site.pipelines["one"].wait_for(1)
    site.bus("two").stop()
    eventually(lambda: up(gateway) == {"one": 1.0, "two": 0.0}, LIMIT_S)
    refused = ask(gateway, "blue")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "cannot reach its Redis server" in refused.json()["error"]["message"]
    request.send(request.row("a"))
    site.pipelines["one"].script = lambda request: request.say("one")
    assert text_of(ask(gateway, "red")) == "one"
    assert httpx.get(f"{gateway.url}/ready").status_code == 200, "one pool is enough"
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    assert served(gateway) == ["red", "blue"]
    site.bus("one").stop()
    eventually(lambda: httpx.get(f"{gateway.url}/ready").status_code == 503, LIMIT_S)
    for name in ("one", "two"):
        site.bus(name).start()
    eventually(lambda: up(gateway) == {"one": 1.0, "two": 1.0}, LIMIT_S)
    assert text_of(ask(gateway, "blue")) == "two"
    request.send(request.row("b", finish=1))
    assert listener.end() == "ab"


def test_a_gateway_starts_while_a_server_is_away(site: Site) -> None:
    site.add("one", "/models/red")
    site.add("two", "/models/blue")
    site.add("three", "/models/green", entry={"models": ["verde"]})
    site.bus("two").stop()
    site.bus("three").stop()
    gateway = site.start(outage_patience_s=0.2)
    assert text_of(ask(gateway, "red")) == "one"
    for model in ("blue", "verde"):  # it may be there: nobody has told; it is: the file says so
        refused = ask(gateway, model)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert served(gateway) == ["red", "verde"]
    for name in ("two", "three"):
        site.bus(name).start()
    site.wait_for(gateway, "red", "blue", "verde")
    assert [text_of(ask(gateway, model)) for model in ("blue", "verde")] == ["two", "three"]
    assert ask(gateway, "green").status_code == 404, "the file calls it otherwise"


def test_a_pool_is_joined_and_left_while_the_gateway_runs(gateway: RunningGateway, site: Site) -> None:
    site.pipelines["two"].script = silent
    listener = Listener(gateway, "blue")
    (request,) = site.pipelines["two"].wait_for(1)
    request.send(request.row("a"))
    site.add("three", "/models/green")
    site.write("three", "one")
    site.wait_for(gateway, "green", "red")
    assert text_of(ask(gateway, "green")) == "three"
    assert text_of(ask(gateway, "")) == "three", "the first is the first of the file"
    assert ask(gateway, "blue").status_code == 404
    assert gateways_of(site, "two") == 1, "its stream goes on"
    assert httpx.get(f"{gateway.url}/v1/requests/two-{request.request_id.hex()}", timeout=60).status_code == 200
    request.send(request.row("b", finish=1))
    assert listener.end() == "ab"
    eventually(lambda: gateways_of(site, "two") == 0, LIMIT_S)
    eventually(lambda: up(gateway) == {"three": 1.0, "one": 1.0}, LIMIT_S)
    assert httpx.get(f"{gateway.url}/v1/requests/two-{request.request_id.hex()}", timeout=60).status_code == 404
    site.pipelines["two"].script = lambda request: request.say("back")
    site.write()
    site.wait_for(gateway, "red", "blue", "green")
    assert text_of(ask(gateway, "blue")) == "back"


def test_a_pool_that_is_put_back_before_it_has_left_stays(gateway: RunningGateway, site: Site) -> None:
    site.pipelines["two"].script = silent
    listener = Listener(gateway, "blue")
    (request,) = site.pipelines["two"].wait_for(1)
    pool = gateway.service.pools.called("two")
    site.write("one")
    site.wait_for(gateway, "red")
    site.write("one", "two")
    site.wait_for(gateway, "red", "blue")
    request.send(request.row("a", finish=1))
    assert listener.end() == "a"
    site.pipelines["two"].script = lambda request: request.say("two")
    assert text_of(ask(gateway, "blue")) == "two"
    assert gateway.service.pools.called("two") is pool
    assert up(gateway) == {"one": 1.0, "two": 1.0}


def test_names_of_models_may_change_while_the_pool_goes_on(gateway: RunningGateway, site: Site) -> None:
    pool = gateway.service.pools.called("two")
    site.entries[1]["models"] = ["azul", "red"]
    site.write()
    site.wait_for(gateway, "azul", "red")
    assert text_of(ask(gateway, "azul")) == text_of(ask(gateway, "red")) == "two"
    assert text_of(ask(gateway, "")) == "one"
    assert gateway.service.pools.called("two") is pool


@pytest.mark.parametrize(
    "content",
    [
        "",
        "nonsense",
        '{"name": "two", "redis_url": "redis://elsewhere"}',
        '{"name": "x", "redis_url": "ftp://h"}',
        None,
    ],
)
def test_a_version_of_the_file_that_is_wrong_changes_nothing(
    gateway: RunningGateway, site: Site, content: str | None
) -> None:
    if content is None:
        site.file.unlink()
    else:
        site.file.write_text(content)
    stats = gateway.service.stats
    eventually(lambda: stats.num_broken_pool_reloads == 1, LIMIT_S)
    assert [text_of(ask(gateway, model)) for model in ("red", "blue")] == ["one", "two"]
    site.write("two")
    site.wait_for(gateway, "blue")
    assert (stats.num_broken_pool_reloads, stats.num_pool_reloads) == (1, 2)


def test_a_model_of_two_pools_is_told_once_and_served_by_the_first(
    gateway: RunningGateway, site: Site, log: Any
) -> None:
    site.add("three", "/models/red")
    site.write()
    eventually(lambda: "several pools have a model" in log.getvalue(), LIMIT_S)
    assert served(gateway) == ["red", "blue"]
    assert text_of(ask(gateway, "red")) == "one"
    site.write("three", "two", "one")
    eventually(lambda: text_of(ask(gateway, "red")) == "three", LIMIT_S)


def test_bounds_of_the_gateway_hold_for_all_pools_together(site: Site) -> None:
    site.add("one", "/models/red").script = silent
    site.add("two", "/models/blue")
    gateway = site.start(max_streams=1)
    site.wait_for(gateway, "red", "blue")
    listener = Listener(gateway, "red")
    (request,) = site.pipelines["one"].wait_for(1)
    assert ask(gateway, "blue").status_code == 429
    request.send(request.row("a", finish=1))
    assert listener.end() == "a"
    eventually(lambda: ask(gateway, "blue").status_code == 200, LIMIT_S)


def test_the_pipeline_of_each_pool_can_be_looked_at(gateway: RunningGateway) -> None:
    with Client(gateway.grpc, timeout_s=120) as client:
        assert [client.pipeline(pool).pool for pool in ("", "one", "two")] == ["one", "one", "two"]
        with pytest.raises(PenstockError, match="there is one, two") as caught:
            client.pipeline("three")
    assert caught.value.code is ErrorCode.NOT_FOUND


def test_metrics_tell_each_pool(gateway: RunningGateway) -> None:
    for model in ("red", "blue", "blue"):
        ask(gateway, model)
    ask(gateway, "green")
    eventually(lambda: told(gateway, "penstock_open_streams") == {("one",): 0.0, ("two",): 0.0}, LIMIT_S)
    ended = told(gateway, "penstock_requests_total")
    assert (ended["stop", "one"], ended["stop", "two"], ended["rejected", ""]) == (1.0, 2.0, 1.0)
    assert told(gateway, "penstock_waiting_requests").keys() == {("one",), ("two",)}
    sessions = told(gateway, "penstock_sessions")
    assert sessions["gateway", "one", "alive"] == sessions["gateway", "two", "alive"] == 1.0
    page = httpx.get(f"{gateway.url}/metrics").text
    samples = [each for family in text_string_to_metric_families(page) for each in family.samples]
    keys = [(each.name, tuple(sorted(each.labels.items()))) for each in samples]
    assert len(set(keys)) == len(keys), "a series comes once"


def test_a_gateway_of_several_pools_drains_all_of_them(site: Site) -> None:
    for name, model in (("one", "/models/red"), ("two", "/models/blue")):
        site.add(name, model).script = silent
    gateway = site.start()
    site.wait_for(gateway, "red", "blue")
    listeners = [Listener(gateway, model) for model in ("red", "blue")]
    requests = [pipeline.wait_for(1)[0] for pipeline in site.pipelines.values()]
    gateway.stop.drain()
    for request in requests:
        request.send(request.row("a", finish=1))
    assert [listener.end() for listener in listeners] == ["a", "a"]
    assert gateway.thread is not None
    gateway.thread.join(60)
    assert not gateway.thread.is_alive()
    assert [gateways_of(site, name) for name in ("one", "two")] == [0, 0]


def test_what_cannot_be_at_the_start_is_refused(site: Site) -> None:
    site.add("one", "/models/red")
    for content, said in (("", "it has no pool"), ('{"name": "x", "redis_url": "ftp://h"}', "the pool x cannot")):
        site.file.write_text(content)
        with pytest.raises(PenstockError, match=said) as caught:
            GatewayService(GatewaySettings(pools=site.file))
        assert caught.value.code is ErrorCode.INTERNAL
    site.write()
    with pytest.raises(PenstockError, match="give each pool of the file its `models`"):
        GatewayService(GatewaySettings(pools=site.file, served_model_name=("a",)))
    with pytest.raises(PenstockError, match="No such file"):
        GatewayService(GatewaySettings(pools=site.folder / "none"))


def test_a_server_that_is_not_fit_keeps_only_its_own_pool_away(site: Site, log: Any) -> None:
    site.add("one", "/models/red")
    site.add("two", "/models/blue", entry={"num_shards": 9})
    shape = tuple(pool_shape(4).items())
    site.pipelines["two"].call(Hello(b"s" * 16, SessionKind.DETOKENIZER, "d", "", 600_000, shape=shape))
    gateway = site.start()
    eventually(lambda: "a pool cannot be joined" in log.getvalue(), LIMIT_S)
    assert text_of(ask(gateway, "red")) == "one"
    assert up(gateway) == {"one": 1.0, "two": 0.0}


def told(gateway: RunningGateway, name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by those of its labels, which are in the order of their names."""
    page = httpx.get(f"{gateway.url}/metrics", timeout=120).text
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
