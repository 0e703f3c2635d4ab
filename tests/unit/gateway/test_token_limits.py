"""Calls that limit which tokens may come: on both routes and over gRPC up to the stored request, or refused."""

from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from running_gateway import RunningGateway

from contract.v1 import inference_pb2_grpc
from penstock import PenstockError
from penstock.client import Client
from penstock.client.wire import encode_call

BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x"},
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


def post(gateway: RunningGateway, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/{path}", json={"model": "tiny", **BODIES[path], **fields}, timeout=300)


@pytest.mark.parametrize("path", BODIES)
def test_allowed_tokens_are_stored(launch: Callable[..., RunningGateway], path: str) -> None:
    gateway = launch()
    gateway.pipeline.follows = True
    assert post(gateway, path, allowed_token_ids=[9, 7, 9]).status_code == 200
    assert post(gateway, path, allowed_token_ids=None).status_code == 200
    limited, free = (each.body.sampling for each in gateway.pipeline.wait_for(2))
    assert list(memoryview(limited.allowed_token_ids).cast("I")) == [7, 9]
    assert not free.HasField("allowed_token_ids")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "wrong", [[], [-1], ["7"], 7, list(range(8193))], ids=["none", "negative", "text", "number", "many"]
)
def test_what_cannot_be_allowed_is_refused_by_name(
    launch: Callable[..., RunningGateway], path: str, wrong: object
) -> None:
    reply = post(launch(), path, allowed_token_ids=wrong)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("allowed_token_ids")


def test_clients_over_grpc_limit_tokens_too(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch()
    gateway.pipeline.follows = True
    with Client(gateway.grpc) as client:
        client.complete("x", params={"allowed_token_ids": [5]})
        with pytest.raises(PenstockError, match="allowed_token_ids must not be empty"):
            client.complete("x", params={"allowed_token_ids": []})
    assert list(memoryview(gateway.pipeline.wait_for()[0].body.sampling.allowed_token_ids).cast("I")) == [5]


@pytest.mark.parametrize("path", BODIES)
def test_bad_words_are_stored_as_they_are(launch: Callable[..., RunningGateway], path: str) -> None:
    gateway = launch()
    gateway.pipeline.follows = True
    assert post(gateway, path, bad_words=[" cat", "dog"]).status_code == 200
    assert post(gateway, path, bad_words=[]).status_code == 200
    assert [list(each.body.bad_words) for each in gateway.pipeline.wait_for(2)] == [[" cat", "dog"], []]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "wrong", ["cat", [""], [3], ["x"] * 65, ["x" * 257]], ids=["text", "empty", "id", "many", "long"]
)
def test_what_can_be_no_bad_word_is_refused_by_name(
    launch: Callable[..., RunningGateway], path: str, wrong: object
) -> None:
    reply = post(launch(), path, bad_words=wrong)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("bad_words")


def test_ids_of_bad_words_are_the_tokenizers_and_no_clients(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch()
    gateway.pipeline.follows = True
    call = encode_call("x", None, {"bad_words": ["cat"]}, "tiny", 0)
    call.request.sampling.bad_word_ids.add(ids=b"abcd")
    with grpc.insecure_channel(gateway.grpc) as channel:
        list(inference_pb2_grpc.InferenceStub(channel).Generate(call, timeout=300))
    body = gateway.pipeline.wait_for()[0].body
    assert (list(body.bad_words), list(body.sampling.bad_word_ids)) == (["cat"], [])
