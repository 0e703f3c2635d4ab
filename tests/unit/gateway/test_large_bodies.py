"""What is large does not hold up others: it is read and written in a thread."""

import json
import threading
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from running_gateway import RunningGateway

from contract.domain.errors import ErrorCode, PenstockError
from contract.v1 import inference_pb2, inference_pb2_grpc, requests_pb2
from contract.wire.requests import pack_u32, unpack_u32
from gateway_svc import outbox, wire
from gateway_svc.core import apis
from gateway_svc.core.openai import parse_chat, parse_completion

LIMIT_S = 180.0
LARGE = {"model": "tiny", "prompt": [7] * 100_000}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 100_000}]}


@pytest.mark.parametrize(
    ("module", "name", "body"),
    [
        (apis, "parse_completion", LARGE),
        (apis, "parse_chat", CHAT),
        (outbox.wire, "encode_prompt", LARGE),
        (outbox.wire, "encode_prompt", CHAT),
    ],
)
def test_others_are_answered_while_a_large_body_is_read(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, body: dict[str, Any]
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    inner = getattr(module, name)

    def slow(*given: Any, **named: Any) -> Any:
        begun.set()
        assert go_on.wait(LIMIT_S)
        return inner(*given, **named)

    monkeypatch.setattr(module, name, slow)
    replies: list[httpx.Response] = []
    path = "chat/completions" if "messages" in body else "completions"

    def call() -> None:
        replies.append(httpx.post(f"{gateway.url}/v1/{path}", json=body, timeout=2 * LIMIT_S))

    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(LIMIT_S)
    try:
        assert httpx.get(f"{gateway.url}/version", timeout=LIMIT_S / 2).status_code == 200
    finally:
        go_on.set()
        caller.join(LIMIT_S)
    assert replies[0].status_code == 200


def test_others_are_answered_while_a_large_grpc_message_is_read(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    inner = wire.decode_generate

    def slow(call: inference_pb2.GenerateCall, *given: Any) -> Any:
        begun.set()
        assert go_on.wait(LIMIT_S)
        return inner(call, *given)

    monkeypatch.setattr(wire, "decode_generate", slow)
    ids = requests_pb2.TokenIds(ids=pack_u32([7] * 100_000))
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = requests_pb2.GenerateRequest(token_ids=ids)
        events = stub.Generate(inference_pb2.GenerateCall(request=request), timeout=2 * LIMIT_S)
        assert begun.wait(LIMIT_S)
        try:
            stub.ListModels(inference_pb2.ListModelsCall(), timeout=LIMIT_S / 2)
        finally:
            go_on.set()
        assert list(events)


def test_a_large_prompt_arrives_as_it_was_sent(gateway: RunningGateway) -> None:
    ids = np.random.default_rng(0).integers(0, 2**32, 300_000).tolist()
    httpx.post(f"{gateway.url}/v1/completions", json={"prompt": ids}, timeout=LIMIT_S).raise_for_status()
    assert unpack_u32("ids", gateway.pipeline.incoming[0].body.token_ids.ids) == ids


@pytest.mark.parametrize("num", [0, 1, 65535, 65536, 65537, 200_000])
def test_packing_in_parts_is_packing(num: int) -> None:
    assert pack_u32(range(num)) == np.arange(num, dtype="<u4").tobytes()


@pytest.mark.parametrize("wrong", [-1, 2**32, "x", [1]])
def test_one_wrong_value_among_many_is_found_wherever_it_is(wrong: Any) -> None:
    for place in (0, 70_000, 139_999):
        ids: list[Any] = [5] * 140_000
        ids[place] = wrong
        with pytest.raises(PenstockError) as caught:
            parse_completion(json.dumps({"prompt": ids}).encode())
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "prompt")


@pytest.mark.parametrize("wrong", [7, "x", None, []])
def test_a_message_that_is_no_object_is_named(wrong: Any) -> None:
    messages = [{"role": "user", "content": "x"}, wrong]
    with pytest.raises(PenstockError, match="Expected `object`") as caught:
        parse_chat(json.dumps({"messages": messages}).encode())
    assert caught.value.param == "messages[1]"
