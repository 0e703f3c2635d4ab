"""What clients put on the wire and make of what comes back, against a gateway of this process."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode, aio

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import FinishReason, Usage
from contract.domain.params import SamplingParams
from contract.domain.request import Message
from contract.v1 import common_pb2, inference_pb2, inference_pb2_grpc, status_pb2
from penstock.client import Accepted, AsyncClient, Client, Delta
from penstock.client.wire import decode_error
from servicekit.rpc import RpcServer, RpcService

ACCEPTED = inference_pb2.GenerateEvent(accepted=inference_pb2.Accepted(request_id="ab" * 16, model="m", seed=2**64 - 1))


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def event(**fields: Any) -> inference_pb2.GenerateEvent:
    return inference_pb2.GenerateEvent(delta=inference_pb2.Delta(**fields))


def logprob(token_id: int) -> inference_pb2.TokenLogprob:
    top = [inference_pb2.TokenLogprob(token_id=9, logprob=-0.5, utf8=b"nine")]
    return inference_pb2.TokenLogprob(token_id=token_id, logprob=-1.5, utf8=b"x", top=top, rank=4)


EVENTS = [
    ACCEPTED,
    event(token_ids=u32(5, 6), text="he", logprobs=[logprob(5), logprob(6)]),
    inference_pb2.GenerateEvent(),  # of a later version
    event(token_ids=u32(7), token_offset=2, text="y", finish_reason=common_pb2.FINISH_REASON_STOP, stop_string="!",
          logprobs=[logprob(7)], usage=common_pb2.Usage(prompt_tokens=3, output_tokens=3, cached_tokens=1)),
]  # fmt: skip


class Gateway(inference_pb2_grpc.InferenceServicer):
    """Answers with what a test gave it and keeps what it was asked."""

    def __init__(self) -> None:
        self.events: list[inference_pb2.GenerateEvent] = EVENTS
        self.error: PenstockError | None = None
        self.hangs = False
        self.asked: Future[inference_pb2.GenerateCall] = Future()
        self.cancelled = threading.Event()
        self.remaining_s: float | None = None
        self.keys: list[str | None] = []

    def note_key(self, context: Any) -> None:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))

    async def Generate(self, request: Any, context: Any) -> None:
        self.note_key(context)
        self.asked.set_result(request)
        self.remaining_s = context.time_remaining()
        try:
            for each in self.events:
                await context.write(each)
            if self.error:
                raise self.error
            if self.hangs:
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Cancel(self, request: Any, context: Any) -> Any:
        self.note_key(context)
        return inference_pb2.CancelReply(known=request.request_id == "ab" * 16)

    async def ListModels(self, request: Any, context: Any) -> Any:
        self.note_key(context)
        return inference_pb2.ListModelsReply(models=[inference_pb2.Model(name="m", max_model_len=128)])

    async def GetPipeline(self, request: Any, context: Any) -> Any:
        self.note_key(context)
        return status_pb2.PipelineStatus(pool="p")


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def address(gateway: Gateway) -> Iterator[str]:
    """Serves the gateway from a loop in a thread."""
    started: Future[int] = Future()
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        add = inference_pb2_grpc.add_InferenceServicer_to_server
        server = RpcServer([RpcService("penstock.v1.Inference", add, gateway)])
        started.set_result(await server.start("127.0.0.1:0"))
        await end.wait()
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    yield f"127.0.0.1:{started.result(300)}"
    loop.call_soon_threadsafe(end.set)
    thread.join()
    loop.close()


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address) as client:
        yield client


@pytest.fixture
def late_address(address: str) -> Iterator[str]:
    """Of a gateway that answers a connection half a second after it was taken."""
    host, port = address.split(":")

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # either side may have closed
            while part := source.recv(1 << 16):
                sink.sendall(part)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def serve(taken: socket.socket) -> None:
        with taken:
            time.sleep(0.5)
            with socket.create_connection((host, int(port))) as onward:
                back = threading.Thread(target=pass_on, args=(onward, taken))
                back.start()
                pass_on(taken, onward)
                back.join()

    def listen() -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                threads.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
                threads[-1].start()

    threads: list[threading.Thread] = []
    listener = socket.create_server(("127.0.0.1", 0))
    listening = threading.Thread(target=listen)
    listening.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in (listening, *threads):
        thread.join()


def test_a_gateway_that_is_slow_to_answer_a_connection_is_waited_for(late_address: str) -> None:
    with Client(late_address) as client:
        assert client.complete("hi").text == "hey"

    async def complete() -> str:
        async with AsyncClient(late_address) as client:
            return (await client.models())[0].name

    assert asyncio.run(complete()) == "m"


def test_events_are_typed_values(client: Client) -> None:
    accepted, first, last = client.generate("hi")
    assert accepted == Accepted("ab" * 16, "m", 2**64 - 1)
    assert isinstance(first, Delta)
    assert (first.token_ids, first.text, first.finish, first.usage) == ((5, 6), "he", FinishReason.UNSPECIFIED, None)
    assert [(each.token_id, each.logprob, each.token_bytes, each.top, each.top_bytes) for each in first.logprobs] == [
        (token_id, -1.5, b"x", ((9, -0.5),), (b"nine",)) for token_id in (5, 6)
    ]
    assert [each.rank for each in first.logprobs] == [4, 4]
    assert isinstance(last, Delta)
    assert (last.finish, last.stop_reason, last.usage) == (FinishReason.STOP, "!", Usage(3, 3, 1))


def test_complete_adds_them_up(client: Client) -> None:
    generation = client.complete("hi", SamplingParams(logprobs=1))
    (output,) = generation.outputs
    assert (generation.text, output.token_ids, output.finish_reason, output.stop_reason) == (
        "hey",
        [5, 6, 7],
        "stop",
        "!",
    )
    assert output.cumulative_logprob == -4.5
    assert generation.usage == Usage(3, 3, 1)


def test_a_request_travels_whole(client: Client, gateway: Gateway) -> None:
    params = SamplingParams(
        n=1, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={3: 1.5, 2: -1.0}, seed=-1, max_tokens=9, min_tokens=2, stop=["a", "b"],
        stop_token_ids=[4], ignore_eos=True, logprobs=2, skip_special_tokens=False, include_stop_str_in_output=True,
    )  # fmt: skip
    client.complete([1, 2, 3], params, model="m", priority=-3)
    request = gateway.asked.result(300).request
    assert (request.model, request.priority, request.seed, request.n) == ("m", -3, 2**64 - 1, 1)
    assert request.token_ids.ids == u32(1, 2, 3)
    sampling, stopping, text = request.sampling, request.stopping, request.text_options
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5, -0.5)
    assert sampling.logit_bias_ids == u32(2, 3)
    assert sampling.logit_bias_values == np.array([-1.0, 1.5], "<f4").tobytes()
    assert sampling.num_logprobs == 2
    assert (stopping.max_tokens, stopping.min_tokens, stopping.ignore_eos) == (9, 2, True)
    assert stopping.stop_token_ids == u32(4)
    assert (list(text.stop), text.include_stop_str_in_output, text.skip_special_tokens) == (["a", "b"], True, False)


def test_without_a_seed_the_gateway_draws_one(client: Client, gateway: Gateway) -> None:
    client.complete("hi")
    assert not gateway.asked.result(300).request.HasField("seed")


def test_a_chat_keeps_the_other_keys_of_its_messages(client: Client, gateway: Gateway) -> None:
    client.complete(messages=[{"role": "user", "content": "hi", "name": "Ann"}, Message("assistant", "yes")])
    first, second = gateway.asked.result(300).request.messages.messages
    assert (first.role, first.content, first.extra_json) == ("user", "hi", '{"name":"Ann"}')
    assert (second.role, second.content, second.extra_json) == ("assistant", "yes", "")


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [(None, None), ("a", [{"role": "user", "content": "b"}]), (None, [{"role": "user"}]), ([-1], None), (["x"], None)],
)
def test_a_malformed_prompt_never_leaves(client: Client, gateway: Gateway, prompt: Any, messages: Any) -> None:
    with pytest.raises(PenstockError) as caught:
        client.generate(prompt, messages=messages)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert not gateway.asked.done()


def test_an_error_comes_back_as_it_was_raised(client: Client, gateway: Gateway) -> None:
    gateway.error = PenstockError(ErrorCode.STREAM_DIVERGED, "it does not fit", param="prompt")
    events = client.generate("hi")
    assert isinstance(next(events), Accepted)
    with pytest.raises(PenstockError, match="it does not fit") as caught:
        list(events)
    assert (caught.value.code, caught.value.param) == (ErrorCode.STREAM_DIVERGED, "prompt")


def test_a_stream_that_just_ends_is_no_result(client: Client, gateway: Gateway) -> None:
    gateway.events = EVENTS[:2]
    with pytest.raises(PenstockError, match="ended too early"):
        client.complete("hi", SamplingParams(logprobs=1))


def test_closing_the_iterator_cancels_the_call(client: Client, gateway: Gateway) -> None:
    gateway.hangs = True
    events = client.generate("hi")
    next(events)
    events.close()
    assert gateway.cancelled.wait(300)


def test_a_timeout_is_the_calls_deadline_and_a_typed_error(client: Client, gateway: Gateway) -> None:
    client.complete("hi", timeout_s=90)
    assert gateway.remaining_s is not None
    assert 0 < gateway.remaining_s <= 90.1  # gRPC rounds a timeout up, one of this length to tenths of a second
    gateway.hangs, gateway.asked = True, Future()
    with pytest.raises(PenstockError) as caught:
        client.complete("hi", timeout_s=0.5)
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED


def test_where_nobody_listens_the_gateway_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(PenstockError, match="cannot be reached") as caught:
        client.models()
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_a_call_that_a_gateway_dropped_as_it_ended_may_be_made_again() -> None:
    dropped = aio.AioRpcError(StatusCode.CANCELLED, aio.Metadata(), aio.Metadata(), details="CANCELLED")
    assert decode_error(dropped).code is ErrorCode.UNAVAILABLE


def test_the_other_calls(client: Client) -> None:
    assert [(model.name, model.max_model_len) for model in client.models()] == [("m", 128)]
    assert client.pipeline().pool == "p"
    assert client.cancel("ab" * 16)
    assert not client.cancel("00" * 16)


def awaited(address: str, test: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncClient(address) as client:
            await test(client)

    asyncio.run(run())


def test_the_client_for_asyncio_does_the_same(address: str, gateway: Gateway) -> None:
    async def test(client: AsyncClient) -> None:
        generation = await client.complete("hi", SamplingParams(logprobs=1))
        assert (generation.text, generation.usage) == ("hey", Usage(3, 3, 1))
        assert [model.name for model in await client.models()] == ["m"]
        assert (await client.pipeline()).pool == "p"
        assert await client.cancel("ab" * 16)

    awaited(address, test)


def test_aclose_cancels_and_errors_are_typed_for_asyncio_too(address: str, gateway: Gateway) -> None:
    async def test(client: AsyncClient) -> None:
        gateway.hangs = True
        events = client.generate("hi")
        await anext(events)
        await events.aclose()
        assert await asyncio.to_thread(gateway.cancelled.wait, 300)
        gateway.hangs, gateway.asked = False, Future()
        gateway.error = PenstockError(ErrorCode.NOT_FOUND, "gone")
        with pytest.raises(PenstockError, match="gone") as caught:
            await client.complete("hi", SamplingParams(logprobs=1))
        assert caught.value.code is ErrorCode.NOT_FOUND

    awaited(address, test)


def test_a_status_that_no_trailer_explains_still_has_a_code() -> None:
    async def run() -> None:
        server = aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(PenstockError, match="UNIMPLEMENTED") as caught:
                await client.models()
        assert caught.value.code is ErrorCode.UNIMPLEMENTED
        await server.stop(0)

    asyncio.run(run())


@pytest.mark.parametrize("key", ["", "two words", "line\n", "schlüssel"])
def test_what_cannot_be_a_key_is_refused_without_being_quoted(key: str) -> None:
    with pytest.raises(PenstockError, match="visible ASCII") as caught:
        Client("127.0.0.1:1", api_key=key)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert not key or key not in caught.value.message


def test_the_key_goes_with_every_call(gateway: Gateway, address: str) -> None:
    async def call_all() -> None:
        async with AsyncClient(address, api_key="psk_async") as client:
            await client.complete("hi")
            await client.cancel("00" * 16)
            await client.models()
            await client.pipeline()

    asyncio.run(call_all())
    gateway.asked = Future()
    with Client(address, api_key="psk_sync") as client:
        client.complete("hi")
        client.cancel("00" * 16)
        client.models()
        client.pipeline()
    assert gateway.keys == ["Bearer psk_async"] * 4 + ["Bearer psk_sync"] * 4
