"""One gateway before two pools, each on a server of its own: where calls go, and what is told of each."""

import json

import grpc
import httpx
import pytest
from pool_sites import LIMIT_S, Listener, Site, ask, silent, text_of, told
from prometheus_client.parser import text_string_to_metric_families
from running_gateway import RunningGateway, eventually
from scripted_pipeline import Incoming

from contract.domain.errors import ErrorCode, PenstockError
from contract.v1 import inference_pb2, inference_pb2_grpc, requests_pb2
from penstock.client import Client


@pytest.fixture
def gateway(site: Site) -> RunningGateway:
    return site.start_two()


def test_a_call_goes_where_its_model_is(gateway: RunningGateway) -> None:
    assert [text_of(ask(gateway, model)) for model in ("red", "blue", "red")] == ["one", "two", "one"]
    assert text_of(httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "x"}, timeout=300)) == "one"
    chat = {"model": "blue", "messages": [{"role": "user", "content": "x"}]}
    reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=chat, timeout=300).json()
    assert (reply["model"], reply["choices"][0]["message"]["content"]) == ("blue", "two")
    with Client(gateway.grpc, timeout_s=120) as client:
        assert [each.name for each in client.models()] == ["red", "blue"]
        assert [client.complete("x", model=model).text for model in ("blue", "red", "")] == ["two", "one", "one"]
        with pytest.raises(PenstockError) as caught:
            client.complete("x", model="green")
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
    assert ask(gateway, "green").status_code == 404
    assert httpx.get(f"{gateway.url}/v1/models/blue", timeout=300).json()["id"] == "blue"
    assert httpx.get(f"{gateway.url}/v1/models/green", timeout=300).status_code == 404


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
            page = httpx.get(f"{url}/v1/requests/{name}", timeout=300).json()
            assert (page["id"], page["state"]) == (f"cmpl-{shown}", "running")
        for name in (request.request_id.hex(), f"one-{request.request_id.hex()}"):
            assert httpx.get(f"{url}/v1/requests/{name}", timeout=300).status_code == 404, "it is not in the first pool"
        refused = httpx.get(f"{url}/v1/requests/three-{request.request_id.hex()}", timeout=300)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "request_id")
        assert "'three'; there is one, two" in refused.json()["error"]["message"]
    request.afterwards.append(lambda: request.send(request.row("b", finish=1)))
    with httpx.stream("GET", f"{second.url}/v1/requests/cmpl-{shown}/events", timeout=300) as reply:
        chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert reply.headers["x-penstock-request-id"] == shown
    assert {chunk["id"] for chunk in chunks} == {f"cmpl-{shown}"}
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "ab"
    first.thread.join(300)
    assert first.headers["x-penstock-request-id"] == shown


def test_a_request_is_cancelled_in_its_pool(gateway: RunningGateway, site: Site) -> None:
    site.pipelines["two"].script = silent
    listeners = [Listener(gateway, "blue") for _ in range(2)]
    first, second = site.pipelines["two"].wait_for(2)
    path = f"{gateway.url}/v1/requests/cmpl-two-{first.request_id.hex()}"
    assert httpx.delete(path, timeout=300).json()["cancelled"] is True
    with Client(gateway.grpc, timeout_s=120) as client:
        assert client.cancel(f"two-{second.request_id.hex()}")
        assert not client.cancel(second.request_id.hex()), "in the first pool it is not"
    assert {request for request, _ in site.pipelines["two"].cancels(2)} == {first.request_id, second.request_id}
    for request in (first, second):
        request.send(request.row("", [], finish=3))
    for listener in listeners:
        listener.thread.join(300)
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
    page = httpx.get(f"{gateway.url}/metrics", timeout=300).text
    samples = [each for family in text_string_to_metric_families(page) for each in family.samples]
    keys = [(each.name, tuple(sorted(each.labels.items()))) for each in samples]
    assert len(set(keys)) == len(keys), "a series comes once"
