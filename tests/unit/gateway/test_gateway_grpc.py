"""`penstock.v1.Inference` with grpcio against a gateway on a real port."""

import struct
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
from running_gateway import RunningGateway, eventually
from scripted_pipeline import ERROR, LENGTH, STOP, Incoming, Row, with_logprobs

from penstock.v1 import common_pb2, inference_pb2, inference_pb2_grpc, requests_pb2

Stub = inference_pb2_grpc.InferenceStub


@pytest.fixture
def stub(gateway: RunningGateway) -> Iterator[Stub]:
    with grpc.insecure_channel(gateway.grpc) as channel:
        yield Stub(channel)


def call(**fields: object) -> inference_pb2.GenerateCall:
    given = {"text": "hi", **fields}
    return inference_pb2.GenerateCall(request=requests_pb2.GenerateRequest(**given))  # type: ignore[arg-type]


def test_generate_streams_deltas(gateway: RunningGateway, stub: Stub) -> None:
    first, *deltas = list(stub.Generate(call(seed=2**63 + 5)))
    (request,) = gateway.pipeline.wait_for()
    assert first.accepted.request_id == request.request_id.hex()
    assert (first.accepted.model, first.accepted.seed) == ("tiny", 2**63 + 5)
    assert request.header.seed == 2**63 + 5
    assert "".join(event.delta.text for event in deltas) == "Hello world"
    tokens = b"".join(event.delta.token_ids for event in deltas)
    assert struct.unpack("<2I", tokens) == (100, 101)
    last = deltas[-1].delta
    assert last.finish_reason == common_pb2.FINISH_REASON_STOP
    assert (last.usage.prompt_tokens, last.usage.output_tokens, last.usage.cached_tokens) == (7, 2, 3)


def test_parameters_arrive_and_samples_are_indexed(gateway: RunningGateway, stub: Stub) -> None:
    def script(request: Incoming) -> None:
        request.say("b", sequence=1, finish=LENGTH)
        request.send(request.row("a", finish=STOP, stop=9))

    gateway.pipeline.script = script
    sampling = requests_pb2.SamplingParameters(
        temperature=0, top_k=3, logit_bias_ids=struct.pack("<I", 4), logit_bias_values=struct.pack("<f", 1.5)
    )
    stopping = requests_pb2.StoppingParameters(max_tokens=4, stop_token_ids=struct.pack("<I", 9))
    asked = call(n=2, sampling=sampling, stopping=stopping, priority=-1)
    deltas = [event.delta for event in stub.Generate(asked) if event.HasField("delta")]
    assert {delta.sequence: delta.text for delta in deltas} == {0: "a", 1: "b"}
    assert {delta.sequence: delta.stop_token_id for delta in deltas} == {0: 9, 1: 0}
    body = gateway.pipeline.wait_for()[0].body
    assert (body.n, body.sampling.top_k, body.sampling.temperature, body.stopping.max_tokens) == (2, 3, 0, 4)
    assert struct.unpack("<f", body.sampling.logit_bias_values) == (1.5,)
    assert struct.unpack("<I", body.stopping.stop_token_ids) == (9,)
    assert gateway.pipeline.wait_for()[0].header.priority == -1


def test_logprobs_carry_bytes(gateway: RunningGateway, stub: Stub) -> None:
    gateway.pipeline.script = with_logprobs
    asked = call(sampling=requests_pb2.SamplingParameters(num_logprobs=2))
    entries = [entry for event in stub.Generate(asked) for entry in event.delta.logprobs]
    assert [entry.token_id for entry in entries] == [5, 7, 9, 2]
    assert entries[1].utf8 + entries[2].utf8 == "雪".encode()
    assert [top.text for top in entries[0].top] == ["He", "Ho"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": requests_pb2.SamplingParameters(temperature=float("nan"))}, "temperature"),
        ({"sampling": requests_pb2.SamplingParameters(top_p=2)}, "top_p"),
        ({"sampling": requests_pb2.SamplingParameters(logit_bias_ids=b"\1\0\0\0")}, "logit_bias_values"),
        ({"sampling": requests_pb2.SamplingParameters(logit_bias_ids=b"\1")}, "sampling.logit_bias_ids"),
        ({"n": 0}, "n"),
        ({"token_ids": requests_pb2.TokenIds()}, "token_ids"),
        ({"messages": requests_pb2.ChatMessages()}, "messages"),
        ({"messages": requests_pb2.ChatMessages(
            messages=[requests_pb2.ChatMessage(role="user", extra_json="[")])}, "messages[0].extra_json"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_the_trailer(stub: Stub, fields: dict[str, object], param: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(call(**fields)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    trailer = dict(caught.value.trailing_metadata())["penstock-error-bin"]
    error = common_pb2.Error.FromString(trailer)
    assert (error.code, error.param) == (common_pb2.ERROR_CODE_INVALID_ARGUMENT, param)


def test_a_body_beyond_the_bound_of_http_is_refused_here_too(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch(max_body_bytes=2000)
    with grpc.insecure_channel(gateway.grpc) as channel:
        list(Stub(channel).Generate(call(text="x" * 1900)))
        with pytest.raises(grpc.RpcError, match="at most 2000 bytes") as caught:
            list(Stub(channel).Generate(call(text="x" * 2000)))
    error = common_pb2.Error.FromString(dict(caught.value.trailing_metadata())["penstock-error-bin"])
    assert error.code == common_pb2.ERROR_CODE_REQUEST_TOO_LARGE


def test_a_missing_prompt_and_an_unknown_model(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError, match="needs a prompt"):
        list(stub.Generate(inference_pb2.GenerateCall()))
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(call(model="other")))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_an_error_comes_behind_the_text_before_it(gateway: RunningGateway, stub: Stub) -> None:
    def script(request: Incoming) -> None:
        error = common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message="the worker broke")
        request.send(request.row("some"), request.row("", [], finish=ERROR, error=error))

    gateway.pipeline.script = script
    seen = []
    with pytest.raises(grpc.RpcError, match="the worker broke") as caught:
        seen.extend(event.delta.text for event in stub.Generate(call()))
    assert "some" in seen
    assert caught.value.code() is grpc.StatusCode.INTERNAL


def test_a_cancelled_call_cancels_its_request(gateway: RunningGateway, stub: Stub) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    stream = stub.Generate(call())
    assert next(stream).HasField("accepted")
    assert next(stream).delta.text == "a"
    stream.cancel()
    assert gateway.pipeline.cancels() == [(gateway.pipeline.wait_for()[0].request_id, 1)]
    eventually(lambda: gateway.service.stats.num_streams == 0)


def test_a_deadline_travels_and_cancels(gateway: RunningGateway, stub: Stub) -> None:
    gateway.pipeline.script = lambda request: None
    stub.ListModels(inference_pb2.ListModelsCall())  # the connection is there
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(call(), timeout=5))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    (request,) = gateway.pipeline.wait_for()
    assert 0 < request.header.deadline_unix_ns - request.header.arrival_unix_ns <= 5_100_000_000
    ((request_id, reason),) = gateway.pipeline.cancels()
    assert request_id == request.request_id
    assert reason in (1, 3)  # who notices first, the call or the timer


def test_without_a_deadline_there_is_none(gateway: RunningGateway, stub: Stub) -> None:
    list(stub.Generate(call()))
    assert gateway.pipeline.wait_for()[0].header.deadline_unix_ns == 0


def test_a_request_is_cancelled_by_its_id(gateway: RunningGateway, stub: Stub) -> None:
    gateway.pipeline.script = lambda request: None
    failures: list[grpc.RpcError] = []

    def client() -> None:
        try:
            list(stub.Generate(call()))
        except grpc.RpcError as error:
            failures.append(error)

    thread = threading.Thread(target=client)
    thread.start()
    (request,) = gateway.pipeline.wait_for()
    assert stub.Cancel(inference_pb2.CancelCall(request_id=request.request_id.hex())).known
    assert not stub.Cancel(inference_pb2.CancelCall(request_id="00" * 16)).known
    request.send(request.row("", [], finish=3))
    thread.join(300)
    assert failures[0].code() is grpc.StatusCode.CANCELLED
    with pytest.raises(grpc.RpcError, match="32 hexadecimal digits"):
        stub.Cancel(inference_pb2.CancelCall(request_id="x"))


def test_a_client_that_does_not_read_is_merged_and_bounded(launch: Callable[..., RunningGateway]) -> None:
    gateway = launch(max_backlog_bytes=20_000)
    served: list[Row] = []

    def script(request: Incoming) -> None:
        for _ in range(1500):
            served.append(request.row("z" * 4096))
            request.send(served[-1])

    gateway.pipeline.script = script
    with grpc.insecure_channel(gateway.grpc) as channel:
        stream = Stub(channel).Generate(call())
        assert next(stream).HasField("accepted")
        eventually(lambda: len(served) == 1500)
        (request,) = gateway.pipeline.wait_for()
        request.row("", finish=STOP)
        assert request.retire()
        text = "".join(event.delta.text for event in stream)
    assert text == "z" * 4096 * 1500
    assert gateway.service.stats.num_slow_clients > 0


def test_models_and_pipeline(gateway: RunningGateway, stub: Stub) -> None:
    (model,) = stub.ListModels(inference_pb2.ListModelsCall()).models
    assert (model.name, model.max_model_len) == ("tiny", 512)
    list(stub.Generate(call()))
    pipeline = stub.GetPipeline(inference_pb2.GetPipelineCall())
    assert pipeline.pool == "penstock"
    assert {each.kind for each in pipeline.sessions if each.alive} == {"gateway", "scheduler", "tokenizer"}
    streams = {each.stream: each.length for each in pipeline.streams}
    assert streams["text:g0"] == 2
    assert {"prompts", "requests", "cancels", "dead", "tokens:0", "attach:3", "steps:w0"} <= set(streams)
