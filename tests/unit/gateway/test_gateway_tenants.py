"""Tenants that a header names, where the gateway is told to trust it: whose a request is, and what that bounds."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from running_gateway import RunningGateway, eventually
from scripted_pipeline import Incoming

from contract.domain.api_keys import TENANT_HEADER, hash_api_key
from contract.domain.errors import ErrorCode, PenstockError
from contract.v1 import inference_pb2, inference_pb2_grpc, requests_pb2
from gateway_svc.core.auth import Caller, HeaderAuthenticator
from penstock.client import Client

Launch = Callable[..., RunningGateway]
BODY = {"model": "tiny", "prompt": "x"}


def of(tenant: str) -> dict[str, str]:
    return {"X-Penstock-Tenant": tenant}


def post(gateway: RunningGateway, *, headers: Any = None, **fields: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/completions", json=BODY | fields, headers=headers, timeout=300)


@pytest.fixture
def gateway(launch: Launch) -> RunningGateway:
    return launch(trust_tenant_header=True, max_tenants=2, max_waiting_requests_per_tenant=1)


def test_a_request_is_the_named_tenants_over_http_and_grpc(gateway: RunningGateway) -> None:
    assert post(gateway, headers=of("one")).status_code == 200
    assert post(gateway).status_code == 200
    with Client(gateway.grpc, timeout_s=120, tenant="two") as client:
        client.complete("x")
    assert [request.header.tenant for request in gateway.pipeline.incoming] == ["one", "", "two"]


def test_unless_it_is_told_to_a_gateway_does_not_look_at_the_header(launch: Launch) -> None:
    gateway = launch()
    assert post(gateway, headers=of("no such name!")).status_code == 200
    with Client(gateway.grpc, timeout_s=120, tenant="one") as client:
        client.complete("x")
    assert [request.header.tenant for request in gateway.pipeline.incoming] == ["", ""]


def test_with_api_keys_the_keys_tenant_counts(launch: Launch, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"tenant": "of-key", "sha256": hash_api_key("k").hex()}) + "\n")
    gateway = launch(trust_tenant_header=True, api_keys_file=keys)
    assert post(gateway, headers=of("one") | {"authorization": "Bearer k"}).status_code == 200
    assert post(gateway, headers=of("one")).status_code == 401
    assert [request.header.tenant for request in gateway.pipeline.incoming] == ["of-key"]


@pytest.mark.parametrize("name", ["", "with space", "x" * 65, "one, two", "ü"])
def test_a_name_is_short_and_plain(gateway: RunningGateway, name: str) -> None:
    reply = post(gateway, headers=[(TENANT_HEADER.encode(), name.encode())])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, TENANT_HEADER)
    assert gateway.pipeline.incoming == []


def test_a_name_beside_that_of_the_proxy_is_refused(gateway: RunningGateway) -> None:
    names = [(TENANT_HEADER, "victim"), (TENANT_HEADER, "one")]
    assert post(gateway, headers=names).status_code == 400
    call = inference_pb2.GenerateCall(request=requests_pb2.GenerateRequest(text="x"))
    with grpc.insecure_channel(gateway.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        list(inference_pb2_grpc.InferenceStub(channel).Generate(call, metadata=tuple(names)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert HeaderAuthenticator().authenticate({TENANT_HEADER: "one"}) == Caller("one")


def test_a_client_does_not_send_what_cannot_be_a_name() -> None:
    with pytest.raises(PenstockError, match="a tenant's name is"):
        Client(tenant="with space")


def test_another_tenants_request_is_not_known(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.retire(request.row("a", finish=1)) and None
    request_id = post(gateway, headers=of("one")).headers["x-penstock-request-id"]
    path = f"{gateway.url}/v1/requests/{request_id}"
    for headers, status in ((of("two"), 404), ({}, 404), (of("one"), 200)):
        assert httpx.get(path, headers=headers, timeout=300).status_code == status
        assert httpx.get(f"{path}/events", headers=headers, timeout=300).status_code == status
        assert httpx.delete(path, headers=headers, timeout=300).status_code == status
    for tenant, is_known in (("two", False), (None, False), ("one", True)):
        with Client(gateway.grpc, timeout_s=120, tenant=tenant) as client:
            assert client.cancel(request_id) is is_known


def test_the_same_idempotency_key_of_another_tenant_is_another_request(gateway: RunningGateway) -> None:
    ids = {
        post(gateway, headers=of(name) | {"idempotency-key": "k"}).headers["x-penstock-request-id"]
        for name in ("a", "b")
    }
    assert len(ids) == 2


def wait(gateway: RunningGateway, headers: dict[str, str]) -> threading.Thread:
    """A client that waits for a reply."""
    count = len(gateway.pipeline.incoming)
    thread = threading.Thread(target=lambda: post(gateway, headers=headers))
    thread.start()
    gateway.pipeline.wait_for(count + 1)
    return thread


def test_what_may_wait_is_bounded_for_each(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: None if request.header.tenant == "one" else request.say("fine")
    waiting = wait(gateway, of("one"))
    refused = post(gateway, headers=of("one"))
    assert (refused.status_code, refused.json()["error"]["message"][:18]) == (429, "1 requests of your")
    assert post(gateway, headers=of("two")).status_code == 200
    gateway.pipeline.wait_for()[0].say("a")
    waiting.join(300)


def test_names_made_up_by_the_thousand_do_not_grow_anything(gateway: RunningGateway) -> None:
    served: list[Incoming] = gateway.pipeline.incoming
    gateway.pipeline.script = lambda request: None
    threads = [wait(gateway, of(name)) for name in ("one", "two")]
    refused = post(gateway, headers=of("three"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert "2 other tenants" in refused.json()["error"]["message"]
    with Client(gateway.grpc, timeout_s=120, tenant="three") as client, pytest.raises(PenstockError) as caught:
        client.complete("x")
    assert caught.value.code is ErrorCode.OVERLOADED
    # Who is served already is not turned away for it, only for its own bound.
    assert "1 requests of yours" in post(gateway, headers=of("two")).text
    for request in served:
        request.say("a")
    for thread in threads:
        thread.join(300)
    eventually(lambda: gateway.service.stats.num_streams == 0)
    gateway.pipeline.script = lambda request: request.say("a")
    assert [post(gateway, headers=of(f"t{number}")).status_code for number in range(20)] == [200] * 20
    assert not gateway.service.pools.all[0].delivery._crowd._tenants
    told = [each for each in httpx.get(f"{gateway.url}/metrics", timeout=300).text.splitlines() if "t19" in each]
    assert {each.partition("{")[0] for each in told} == {"penstock_tenant_tokens_total"}, "which names so many at most"
