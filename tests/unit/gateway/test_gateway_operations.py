"""What operators ask a gateway, and how it ends."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import httpx
import pytest
from memory_bus import MemoryBus
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from running_gateway import RunningGateway, eventually
from scripted_pipeline import Incoming, ScriptedPipeline

from contract import __version__
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.model_kind import ModelKind
from gateway_svc.core.models import OfferedModel, catalogue
from gateway_svc.service import GatewayService
from gateway_svc.settings import GatewaySettings
from penstock.client import Client
from servicekit.bus.calls import Leave, Length, ListSessions
from servicekit.lifecycle import Stop

BODY = {"model": "tiny", "prompt": "x"}


def test_health_ready_version(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok", "reason": ""}
    assert http.get("/ready").json() == {"ready": True}
    assert http.get("/version").json() == {"version": __version__}


def test_health_fails_when_the_reader_stops(gateway: RunningGateway, http: httpx.Client) -> None:
    assert gateway.service.trouble() == ""
    while (reply := http.get("/health")).status_code == 200:  # the reader goes on once a second
        gateway.service.pools.all[0].progress_ns -= 60 * 10**9
    assert (reply.status_code, reply.json()["status"]) == (503, "stalled")
    assert "the text reader has not turned for" in reply.json()["reason"]


def test_a_server_that_is_away_is_no_reason_to_restart_a_gateway(gateway: RunningGateway, http: httpx.Client) -> None:
    gateway.bus.stop()
    eventually(lambda: http.get("/ready").status_code == 503)
    assert http.get("/health").status_code == 200
    gateway.bus.start()


def test_metrics_tell_what_was_served(gateway: RunningGateway, http: httpx.Client) -> None:
    http.post("/v1/completions", json=BODY).raise_for_status()
    http.post("/v1/completions", json={**BODY, "temperature": -1})
    text = http.get("/metrics").text
    assert 'penstock_requests_total{outcome="stop",pool="penstock"} 1.0' in text
    assert 'penstock_requests_total{outcome="rejected",pool="penstock"} 1.0' in text
    assert 'penstock_time_to_first_token_seconds_count{pool="penstock"} 1.0' in text
    assert 'penstock_inter_token_latency_seconds_count{pool="penstock"} 1.0' in text
    assert 'penstock_e2e_request_latency_seconds_count{pool="penstock"} 1.0' in text
    assert 'penstock_hop_wait_seconds_count{hop="text"} 2.0' in text
    for stream in ("prompts", "requests", "dead"):
        assert f'penstock_queue_depth{{pool="penstock",stream="{stream}"}}' in text
    assert 'penstock_open_streams{pool="penstock"} 0.0' in text
    assert 'penstock_bus_up{pool="penstock"} 1.0' in text


def test_exemplars_of_latencies_are_told_to_who_reads_openmetrics(gateway: RunningGateway, http: httpx.Client) -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    reply = http.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{trace_id}-{span_id}-01"})
    request_id = reply.headers["x-penstock-request-id"].rpartition("-")[2]
    page = http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"})
    assert page.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    families = {family.name: family for family in read_openmetrics(page.text)}
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        samples = families[f"penstock_{name}_seconds"].samples
        (exemplar,) = [sample.exemplar for sample in samples if sample.exemplar is not None]
        assert exemplar.labels == {"request_id": request_id, "trace_id": trace_id}
    plain = http.get("/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert request_id not in plain.text


def test_metrics_tell_of_the_pool(gateway: RunningGateway, http: httpx.Client) -> None:
    eventually(
        lambda: 'penstock_sessions{kind="gateway",pool="penstock",state="alive"} 1.0' in http.get("/metrics").text
    )
    text = http.get("/metrics").text
    assert 'penstock_sessions{kind="detokenizer",pool="penstock",state="dead"} 0.0' in text, "what is not there is told"
    info = {"model": "tiny", "digest": "", "version": __version__}  # a played worker has no weights
    labels = [
        sample.labels
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "penstock_model_info"
    ]
    assert labels == [info]
    gateway.bus.stop()
    eventually(lambda: 'penstock_bus_up{pool="penstock"} 0.0' in http.get("/metrics").text)
    gateway.bus.start()
    eventually(lambda: 'penstock_bus_up{pool="penstock"} 1.0' in http.get("/metrics").text)
    text = http.get("/metrics").text
    assert 'penstock_session_losses_total{pool="penstock",reason="unreachable"} 0.0' not in text
    assert 'penstock_session_losses_total{pool="penstock",reason="suspended"} 1.0' in text
    assert 'penstock_session_losses_total{pool="penstock",reason="fenced"} 0.0' in text


def test_a_request_is_cancelled_by_its_id(gateway: RunningGateway, http: httpx.Client) -> None:
    gateway.pipeline.script = lambda request: None
    client = threading.Thread(target=lambda: http.post("/v1/completions", json={**BODY, "prompt": ["a", "b"]}))
    client.start()
    first, second = gateway.pipeline.wait_for(2)
    assert http.delete(f"/v1/requests/cmpl-{first.request_id.hex()}").json()["cancelled"] is True
    ids = {request_id for request_id, reason in gateway.pipeline.cancels(2) if reason == 1}
    assert ids == {first.request_id, second.request_id}
    assert http.delete("/v1/requests/cmpl-" + "0" * 32).status_code == 404
    assert http.delete("/v1/requests/nonsense").status_code == 400
    first.send(first.row("", [], finish=3))
    client.join(300)
    assert not client.is_alive()


def test_a_name_can_be_given_to_the_model(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch(served_model_name=("story", "tale"))
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["story", "tale"]
        assert http.get("/v1/models/tale").json()["max_model_len"] == 512
        assert http.post("/v1/completions", json={"prompt": "x"}).json()["model"] == "story"
        assert http.post("/v1/completions", json={"prompt": "x", "model": "tale"}).json()["model"] == "tale"
        assert http.post("/v1/completions", json=BODY).status_code == 404


@pytest.mark.parametrize(
    ("model", "name"), [("/models/story-7b", "story-7b"), ("./story", "story"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")]
)
def test_a_model_is_called_by_its_directory_or_hub_id(model: str, name: str) -> None:
    served = catalogue((), [OfferedModel(model, 100, "b"), OfferedModel(model, 90, "a")], 5).models
    assert [(each.name, each.max_model_len) for each in served] == [(name, 90)]


def test_without_a_worker_the_gateway_is_not_ready_and_says_why() -> None:
    bus = MemoryBus()
    settings = GatewaySettings(http_address="127.0.0.1:0")
    gateway = RunningGateway(bus, ScriptedPipeline(bus), GatewayService(settings, bus))
    gateway.start()
    try:
        gateway.pipeline.call(Leave(gateway.pipeline.sid))
        eventually(lambda: not gateway.service.is_ready())
        with httpx.Client(base_url=gateway.url, timeout=300) as http:
            assert http.get("/ready").status_code == 503
            reply = http.post("/v1/completions", json=BODY)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert "no worker has registered" in reply.json()["error"]["message"]
    finally:
        gateway.close()
        gateway.pipeline.close()


def test_draining_refuses_new_requests_and_finishes_the_old_ones(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("first"))
    with (
        httpx.Client(base_url=gateway.url, timeout=300) as http,
        http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as reply_stream,
    ):
        gateway.stop.drain()
        eventually(lambda: not gateway.service.is_ready())
        eventually(lambda: is_refused(gateway.url))
        with pytest.raises(PenstockError, match="shut") as refused, Client(gateway.grpc) as other:
            other.complete([1])
        assert refused.value.code is ErrorCode.UNAVAILABLE
        gateway.pipeline.wait_for()[0].say(" last")
        assert reply_stream.read().endswith(b"data: [DONE]\n\n")
    assert gateway.thread is not None
    gateway.thread.join(300)
    assert not gateway.thread.is_alive()
    sessions = gateway.pipeline.call(ListSessions())
    assert [each.name for each in sessions if each.alive and each.sid != gateway.pipeline.tokenizer] == ["script"]
    route = gateway.pipeline.wait_for()[0].route
    assert gateway.pipeline.call(Length(gateway.bus.keys.text(route))) == 0


def test_a_call_that_waits_for_the_server_while_its_gateway_drains_is_told_so(gateway: RunningGateway) -> None:
    gateway.bus.stop()
    eventually(lambda: not gateway.service.is_ready())
    with Client(gateway.grpc) as client, ThreadPoolExecutor() as pool:
        call = pool.submit(client.complete, [1])
        eventually(lambda: gateway.service._servicer._num_streams == 1)
        gateway.stop.drain()
        eventually(lambda: is_refused(gateway.url))
        gateway.bus.start()
        with pytest.raises(PenstockError, match="this gateway is shutting down"):
            call.result(300)
    assert gateway.thread is not None
    gateway.thread.join(300)
    assert not gateway.thread.is_alive()


def is_refused(url: str) -> bool:
    """Return whether no new connection is taken."""
    with httpx.Client(base_url=url, timeout=300) as client:
        try:
            client.get("/ready")
        except httpx.ConnectError:
            return True
        except httpx.TransportError:  # taken at the last moment, and closed
            return False
    return False


def test_connections_without_a_call_are_closed_when_draining_begins(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("first"))
    with (
        httpx.Client(base_url=gateway.url, timeout=300) as http,
        socket.create_connection(("127.0.0.1", gateway.service.http_port), 300) as idle,
        http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as reply,
    ):
        idle.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")
        gateway.stop.drain()
        while idle.recv(65536):
            pass
        gateway.pipeline.wait_for()[0].say(" last")
        assert reply.read().endswith(b"data: [DONE]\n\n")


def test_streams_that_outlive_the_drain_end_with_an_error(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("first"))
    with (
        httpx.Client(base_url=gateway.url, timeout=300) as http,
        http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as reply,
    ):
        gateway.stop.end()
        text = reply.read()
    assert b'"code":"unavailable"' in text
    assert gateway.pipeline.cancels() == [(gateway.pipeline.wait_for()[0].request_id, 4)]


def test_an_address_in_use_is_told_to_the_operator(gateway: RunningGateway) -> None:
    settings = GatewaySettings(http_address=f"127.0.0.1:{gateway.service.http_port}")
    service = GatewayService(settings, MemoryBus())
    with pytest.raises(PenstockError, match="choose another http_address"):
        asyncio.run(service.run(Stop()))


class UnusableBus(MemoryBus):
    async def connect_async(self) -> NoReturn:
        raise PenstockError(ErrorCode.INTERNAL, "the server wants a password")


def test_a_server_that_cannot_be_used_is_told_to_the_operator() -> None:
    service = GatewayService(GatewaySettings(http_address="127.0.0.1:0"), UnusableBus())
    with pytest.raises(PenstockError, match="wants a password"):
        asyncio.run(service.run(Stop()))


def test_a_client_that_never_reads_does_not_hold_up_the_end(gateway: RunningGateway) -> None:
    is_sent = threading.Event()

    def script(request: Incoming) -> None:
        for _ in range(400):
            request.send(request.row("z" * 16384))
        is_sent.set()

    gateway.pipeline.script = script
    client = socket.create_connection(("127.0.0.1", gateway.service.http_port))
    body = json.dumps({**BODY, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    client.sendall(head % len(body) + body)
    eventually(lambda: gateway.service.stats.num_slow_clients > 0)
    assert is_sent.wait(300)
    gateway.stop.end()
    assert gateway.thread is not None
    looks = 0  # a time in which everything stands still is one
    while gateway.thread.is_alive():
        gateway.thread.join(0.1)
        looks += 1
        assert looks < 45  # lifecycle gives up after 5 s
    client.close()


def test_an_encoder_is_known_by_its_workers() -> None:
    worker = OfferedModel("/models/bert", 512, "d", kind=ModelKind.ENCODER)
    for names in ((), ("bert",), ("another",)):
        assert [each.kind for each in catalogue(names, [worker], 5).models] == [ModelKind.ENCODER]
    assert [each.kind for each in catalogue(("bert",), [], 5).models] == [None]
