"""Calls over gRPC whose clients come back."""

from typing import Any

import grpc
import pytest
from returning_clients import RESUMABLE, Heard, events, hear, silent, streaming
from running_gateway import RunningGateway, eventually
from scripted_pipeline import LENGTH, STOP, Incoming

from contract.domain import chain
from contract.v1 import common_pb2, inference_pb2, inference_pb2_grpc, requests_pb2


def generate(gateway: RunningGateway, **fields: Any) -> inference_pb2.GenerateCall:
    return inference_pb2.GenerateCall(request=requests_pb2.GenerateRequest(text="hi", n=2), **fields)


def offsets(deltas: list[inference_pb2.Delta]) -> list[inference_pb2.SampleOffset]:
    found = [inference_pb2.SampleOffset() for _ in range(2)]
    for delta in deltas:
        offset = found[delta.sequence]
        offset.tokens = delta.token_offset + len(delta.token_ids) // 4
        offset.characters = delta.text_offset + len(delta.text)
        offset.chain = delta.chain_after
        offset.finish_reason = delta.finish_reason
    return found


def test_grpc_calls_go_on_behind_what_their_client_has(gateway: RunningGateway, second: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(
        request.row("a", finish=LENGTH), request.row("xx", sequence=1)
    )
    with grpc.insecure_channel(gateway.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate(gateway, resumable=True))
        accepted, *deltas = (next(call) for _ in range(3))
        call.cancel()
    eventually(lambda: gateway.service.stats.num_detached == 1)
    (request,) = gateway.pipeline.wait_for()
    request.afterwards.append(lambda: request.say("y", sequence=1))
    request_id = accepted.accepted.request_id
    with grpc.insecure_channel(second.grpc) as channel:
        asked = inference_pb2.ResumeCall(request_id=request_id, offsets=offsets([each.delta for each in deltas]))
        call = inference_pb2_grpc.InferenceStub(channel).Resume(asked)
        again = next(call)
        rest = [event.delta for event in call]
    assert again == accepted
    assert [(each.sequence, each.token_offset, each.text_offset, each.text) for each in rest] == [(1, 1, 2, "y")]
    assert rest[0].usage.output_tokens == 3


def test_a_call_of_several_prompts_goes_on_over_grpc(gateway: RunningGateway, second: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row(request.body.text), request.row("xx", sequence=1))

    gateway.pipeline.script = script
    with streaming(gateway, headers=RESUMABLE, prompt=["p", "q"], n=2) as (first, lines):
        hear(first, lines, lambda: first.texts == ["p", "xx", "q", "xx"])
    one, two = sorted(gateway.pipeline.incoming, key=lambda request: request.body.text)
    one.afterwards.append(lambda: one.say("1") or one.say("2", sequence=1))
    two.afterwards.append(lambda: two.say("3") or two.say("4", sequence=1))
    have = [
        inference_pb2.SampleOffset(tokens=1, characters=len(text), chain=chain.extend(chain.CHAIN_START, [100]))
        for text in first.texts
    ]
    with grpc.insecure_channel(second.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        accepted, *rest = stub.Resume(inference_pb2.ResumeCall(request_id=two.request_id.hex(), offsets=have))
        whole = list(stub.Resume(inference_pb2.ResumeCall(request_id=first.request_id)))[1:]
    assert accepted.accepted.request_id == first.request_id
    assert {each.delta.sequence: each.delta.text for each in rest} == {0: "1", 1: "2", 2: "3", 3: "4"}
    assert sorted(each.delta.usage.output_tokens for each in rest) == [0, 0, 4, 4]
    texts = [""] * 4
    for event in whole:
        texts[event.delta.sequence] += event.delta.text
    assert texts == ["p1", "xx2", "q3", "xx4"]


@pytest.mark.parametrize(
    "wrong",
    [
        [inference_pb2.SampleOffset()],
        [inference_pb2.SampleOffset(characters=3), inference_pb2.SampleOffset()],
        [inference_pb2.SampleOffset(finish_reason=common_pb2.FINISH_REASON_ERROR), inference_pb2.SampleOffset()],
    ],
)
def test_grpc_offsets_that_cannot_be_are_refused(
    gateway: RunningGateway, wrong: list[inference_pb2.SampleOffset]
) -> None:
    gateway.pipeline.script = silent
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        accepted = next(stub.Generate(generate(gateway, resumable=True)))
        asked = inference_pb2.ResumeCall(request_id=accepted.accepted.request_id, offsets=wrong)
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Resume(asked))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_grpc_call_that_is_taken_over_ends_with_aborted(gateway: RunningGateway, second: RunningGateway) -> None:
    gateway.pipeline.script = silent
    with grpc.insecure_channel(gateway.grpc) as channel, grpc.insecure_channel(second.grpc) as there:
        first = inference_pb2_grpc.InferenceStub(channel).Generate(generate(gateway, idempotency_key="k"))
        accepted = next(first)
        again = inference_pb2_grpc.InferenceStub(there).Generate(generate(gateway, idempotency_key="k"))
        assert next(again) == accepted
        with pytest.raises(grpc.RpcError) as raised:
            list(first)
        assert raised.value.code() is grpc.StatusCode.ABORTED
        (request,) = gateway.pipeline.wait_for()
        request.say("a")
        request.say("x", sequence=1)
        assert {event.delta.sequence: event.delta.text for event in again} == {0: "a", 1: "x"}


def test_a_grpc_request_can_be_followed_over_http(gateway: RunningGateway, other: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.retire(request.row("a", finish=STOP)) and None
    with grpc.insecure_channel(gateway.grpc) as channel:
        call = inference_pb2.GenerateCall(request=requests_pb2.GenerateRequest(text="hi"))
        accepted, *_ = inference_pb2_grpc.InferenceStub(channel).Generate(call)
    with events(other, Heard(request_id=accepted.accepted.request_id)) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.finishes) == (["a"], {0: "stop"})
