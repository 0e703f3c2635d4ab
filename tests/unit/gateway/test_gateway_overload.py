"""Clients that are turned away: when, how they are told, and what stays behind of them."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from memory_store import Hash
from running_gateway import RunningGateway, eventually

from contract.domain.api_keys import hash_api_key
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from contract.v1 import common_pb2, inference_pb2, inference_pb2_grpc, requests_pb2
from gateway_svc.core.admission import MAX_RETRY_AFTER_S, AdmissionLimits, admit, retry_after_s
from penstock.client import Client
from servicekit.bus.calls import Commit, CountWaiting, Waiting
from servicekit.bus.keys import Names

Launch = Callable[..., RunningGateway]
BODY = {"model": "tiny", "prompt": "x", "stream": True}


def overloaded(launch: Launch, *, num_waiting: int = 2, **settings: Any) -> RunningGateway:
    """A gateway of a pool in which so many requests wait and none gets a slot."""
    gateway = launch(**settings)
    gateway.pipeline.script = lambda request: None
    for number in range(1, 1 + num_waiting):
        leave_waiting(gateway, number)
    return gateway


def leave_waiting(gateway: RunningGateway, number: int, headers: dict[str, str] | None = None) -> None:
    """One more request waits, the `number`th; its client leaves, and nobody carries out the cancel."""
    client = gateway.post(BODY, headers)
    gateway.pipeline.wait_for(number)
    client.close()


def test_beyond_the_bound_on_requests_http_says_429_and_when_to_come_back(launch: Launch) -> None:
    gateway = overloaded(launch, max_waiting_requests=2)
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        reply = http.post("/v1/completions", json=BODY)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
    assert reply.json()["error"]["message"].startswith("2 requests may wait, and do")
    assert reply.headers["retry-after"] == "1"  # nothing has started yet: no rate is known


def test_retry_after_follows_what_waits_and_how_fast_it_starts(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = overloaded(launch, max_waiting_requests=2)
    pipeline = gateway.pipeline
    # One starts half a minute after the two came, and another one waits in its place.
    store = gateway.bus.server.store
    since_ms = int(store.made(gateway.bus.keys.key(Names.WAITING), Hash)[b"since"])
    monkeypatch.setattr(store, "now_ms", lambda: since_ms + 30_000)
    assert pipeline.call(Commit(pipeline.sid, (), "w", b"plan", pipeline.incoming[0].request_id))
    leave_waiting(gateway, 3)
    reply = httpx.post(f"{gateway.url}/v1/completions", json=BODY, timeout=300)
    # Half of the time and of the starts are forgotten: two wait, and one starts in 15 s.
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "30")


def test_beyond_the_bound_on_tokens_grpc_says_resource_exhausted_and_when_to_come_back(launch: Launch) -> None:
    gateway = overloaded(launch, num_waiting=1, max_waiting_tokens=100)
    call = inference_pb2.GenerateCall(request=requests_pb2.GenerateRequest(text="x" * 1000))
    with grpc.insecure_channel(gateway.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        list(inference_pb2_grpc.InferenceStub(channel).Generate(call))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(caught.value.trailing_metadata())
    told = common_pb2.Error.FromString(trailers["penstock-error-bin"])
    assert (told.code, told.retry_after_ms) == (common_pb2.ERROR_CODE_OVERLOADED, 1000)
    assert "prompts of 100 tokens may wait" in told.message
    assert trailers["grpc-retry-pushback-ms"] == "1000"
    with Client(gateway.grpc) as client, pytest.raises(PenstockError) as again:
        client.complete(list(range(200)), SamplingParams(max_tokens=4))
    assert (again.value.code, again.value.retry_after_s) == (ErrorCode.OVERLOADED, 1.0)


def test_a_tenant_has_a_bound_of_its_own_and_does_not_fill_the_pool_of_others(launch: Launch, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        "".join(json.dumps({"tenant": name, "sha256": hash_api_key(name).hex()}) + "\n" for name in ("one", "two"))
    )
    gateway = launch(api_keys_file=keys, max_waiting_requests_per_tenant=1)
    gateway.pipeline.script = lambda request: None if request.header.tenant == "one" else request.say("fine")
    as_one, as_two = ({"authorization": f"Bearer {name}"} for name in ("one", "two"))
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        leave_waiting(gateway, 1, as_one)
        refused = http.post("/v1/completions", json=BODY, headers=as_one)
        assert (refused.status_code, refused.json()["error"]["message"][:18]) == (429, "1 requests of your")
        assert http.post("/v1/completions", json=BODY, headers=as_two).status_code == 200


def test_nothing_stays_behind_of_a_request_that_was_refused(launch: Launch) -> None:
    gateway = overloaded(launch, num_waiting=1, max_waiting_requests=2)
    before = len(gateway.pipeline.cancels())
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        refused = http.post("/v1/completions", json=BODY | {"prompt": ["a", "b", "c"], "stream": False})
    assert refused.status_code == 429
    # Of its three requests one was taken, and is cancelled; the two others leave no mark for their ids.
    assert len(gateway.pipeline.cancels(before + 1)) == before + 1
    assert not [key for key in gateway.bus.server.store.values if key.startswith(gateway.bus.keys.key(Names.MARK))]
    eventually(lambda: gateway.service.stats.num_streams == 0)


def test_the_pool_is_told_the_tokens_and_the_deadline_of_a_prompt(launch: Launch) -> None:
    gateway = launch()
    gateway.pipeline.close()  # nobody takes it from the queue
    connection = gateway.bus.connect()
    with gateway.post({**BODY, "prompt": [1, 2, 3, 4, 5]}):
        eventually(lambda: connection.call(CountWaiting()) == Waiting(1, 5, 1, 5))
    with gateway.post({**BODY, "prompt": "x" * 4000}):
        eventually(lambda: connection.call(CountWaiting()).num_requests == 2)
    assert 1000 <= connection.call(CountWaiting()).num_tokens - 5 <= 1100
    eventually(lambda: figures(gateway)["penstock_waiting_requests"] == 2)
    assert 1000 <= figures(gateway)["penstock_waiting_tokens"] - 5 <= 1100
    first_s = figures(gateway)["penstock_expected_wait_seconds"]
    eventually(lambda: figures(gateway)["penstock_expected_wait_seconds"] > first_s, 300)  # nothing starts


def figures(gateway: RunningGateway) -> dict[str, float]:
    lines = httpx.get(f"{gateway.url}/metrics", timeout=300).text.replace('{pool="penstock"}', "").splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("penstock_")}


def test_a_gateway_with_all_its_streams_says_when_one_may_end() -> None:
    with pytest.raises(PenstockError) as caught:
        admit(AdmissionLimits(2), num_streams=2, num_new=1, draining=False, connected=True, mean_stream_s=10.0)
    assert caught.value.retry_after_s == 5.0
    assert retry_after_s(0.0) == 1.0
    assert retry_after_s(1e9) == MAX_RETRY_AFTER_S


@pytest.mark.parametrize(
    ("num_streams", "num_new", "is_let_in"), [(0, 2, True), (1, 1, True), (2, 0, True), (1, 2, False), (2, 1, False)]
)
def test_a_gateway_serves_as_many_streams_as_it_may_and_no_more(
    num_streams: int, num_new: int, is_let_in: bool
) -> None:
    with nullcontext() if is_let_in else pytest.raises(PenstockError, match="at most 2"):
        admit(AdmissionLimits(2), num_streams=num_streams, num_new=num_new, draining=False, connected=True)


@pytest.mark.parametrize(("num_streams", "is_let_in"), [(2, True), (3, True), (4, False)])
def test_who_returns_to_what_another_gateway_has_let_in_finds_twice_the_room(
    num_streams: int, *, is_let_in: bool
) -> None:
    gateway = {"num_new": 1, "draining": False, "connected": True, "is_return": True}
    with nullcontext() if is_let_in else pytest.raises(PenstockError, match="at most 4"):
        admit(AdmissionLimits(max_streams=2), num_streams=num_streams, **gateway)
    with nullcontext() if is_let_in else pytest.raises(PenstockError, match="at most 4"):
        admit(AdmissionLimits(max_tenants=2), num_streams=9, num_other_tenants=num_streams, **gateway)


def test_the_last_stream_that_fits_is_served_and_the_next_one_refused(launch: Launch) -> None:
    gateway = launch(max_streams=2)
    gateway.pipeline.script = lambda request: None
    with gateway.post(BODY), gateway.post(BODY):
        gateway.pipeline.wait_for(2)
        assert httpx.post(f"{gateway.url}/v1/completions", json=BODY, timeout=300).status_code == 429
    assert len(gateway.pipeline.incoming) == 2


def test_a_message_beyond_what_grpc_takes_is_too_large_to_our_client(launch: Launch) -> None:
    gateway = launch()
    with Client(gateway.grpc) as client:
        with pytest.raises(PenstockError) as caught:
            client.complete("x" * (65 << 20), SamplingParams(max_tokens=4))
        assert caught.value.code is ErrorCode.REQUEST_TOO_LARGE
        assert client.complete("x", SamplingParams(max_tokens=4)).text == "Hello world"
