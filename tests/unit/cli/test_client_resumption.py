"""A client whose stream breaks goes on behind what it has; every token comes once."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from contract.domain import chain
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import FinishReason
from contract.domain.params import SamplingParams
from contract.v1 import inference_pb2, inference_pb2_grpc
from penstock.client import Accepted, AsyncClient, Client, Delta
from penstock.client.resumption import PATIENCE_S, Resumption
from penstock.client.wire import encode_call, target
from servicekit.rpc import RpcServer, RpcService

ID = "ab" * 16
TOKENS = [5, 6, 7, 8, 9]
ACCEPTED = inference_pb2.GenerateEvent(accepted=inference_pb2.Accepted(request_id=ID, model="m"))
UNAVAILABLE = PenstockError(ErrorCode.UNAVAILABLE, "gone")
Event = inference_pb2.GenerateEvent


def delta(start: int, stop: int, *, sequence: int = 0, is_part: bool = False) -> Event:
    """A sample's tokens between two places, each a letter; the last one ends it."""
    told = inference_pb2.Delta(
        sequence=sequence,
        token_offset=start,
        text_offset=start,
        token_ids=np.array(TOKENS[start:stop], "<u4").tobytes(),
        text="abcde"[start:stop],
        finish_reason=1 if stop == len(TOKENS) else 0,  # type: ignore[arg-type]
    )
    if not is_part:
        told.chain_after = chain.extend(chain.CHAIN_START, TOKENS[:stop])
    return Event(delta=told)


# --- what is new ------------------------------------------------------------------------------------------------------


def resumption(n: int = 1, *, resumable: bool = True) -> Resumption:
    return Resumption(encode_call("hi", None, SamplingParams(n=n), "", 0, resumable=resumable), now_s=0.0)


def texts(state: Resumption, *events: Event) -> list[str]:
    found = [state.take(event, 0.0) for event in events]
    return [each.text for each in found if isinstance(each, Delta)]


def test_a_resumable_call_has_a_key_of_its_own() -> None:
    one, two = (encode_call("hi", None, SamplingParams(), "", 0, resumable=True) for _ in range(2))
    assert one.idempotency_key != two.idempotency_key != ""
    assert not encode_call("hi", None, SamplingParams(), "", 0).idempotency_key
    given = encode_call("hi", None, SamplingParams(), "", 0, resumable=True, idempotency_key="mine")
    assert given.idempotency_key == "mine"


def test_before_it_was_accepted_a_call_is_sent_again_and_then_resumed() -> None:
    state = resumption()
    assert isinstance(state.next_call, inference_pb2.GenerateCall)
    assert isinstance(state.take(ACCEPTED, 0.0), Accepted)
    assert state.take(ACCEPTED, 0.0) is None
    assert texts(state, delta(0, 2)) == ["ab"]
    asked = state.next_call
    assert isinstance(asked, inference_pb2.ResumeCall)
    assert asked.request_id == ID
    assert list(asked.offsets) == [
        inference_pb2.SampleOffset(tokens=2, characters=2, chain=chain.extend(chain.CHAIN_START, TOKENS[:2]))
    ]


def test_what_comes_again_is_left_out() -> None:
    state = resumption()
    assert texts(state, delta(0, 2), delta(0, 2), delta(1, 4), delta(0, 5), delta(0, 5)) == ["ab", "cd", "e"]
    assert state.has_ended


def test_behind_a_part_of_an_event_nothing_is_resumed() -> None:
    state = resumption()
    state.take(ACCEPTED, 0.0)
    assert texts(state, delta(0, 1), delta(1, 3, is_part=True)) == ["a", "bc"]
    asked = state.next_call
    assert isinstance(asked, inference_pb2.ResumeCall)
    assert asked.offsets[0].tokens == 1
    assert texts(state, delta(1, 5)) == ["de"]


def test_samples_are_counted_apart() -> None:
    state = resumption(n=2)
    state.take(ACCEPTED, 0.0)
    assert texts(state, delta(0, 5), delta(0, 1, sequence=1)) == ["abcde", "a"]
    assert not state.has_ended
    asked = state.next_call
    assert isinstance(asked, inference_pb2.ResumeCall)
    assert [(each.tokens, each.finish_reason) for each in asked.offsets] == [(5, FinishReason.STOP), (1, 0)]


def test_a_gap_is_an_error() -> None:
    with pytest.raises(PenstockError):
        texts(resumption(), delta(0, 1), delta(2, 3))


def test_only_what_passes_is_tried_again_and_not_for_ever() -> None:
    state = resumption()
    assert state.pause_s(PenstockError(ErrorCode.NOT_FOUND, "x"), 0.0) is None
    pauses = [state.pause_s(UNAVAILABLE, PATIENCE_S) for _ in range(9)]
    assert pauses == sorted(pauses)  # type: ignore[type-var]
    assert pauses[0] < pauses[-1] == 1.0  # type: ignore[operator]
    assert state.pause_s(UNAVAILABLE, PATIENCE_S + 1) is None
    state.take(ACCEPTED, 0.0)
    state.take(delta(0, 1), PATIENCE_S + 1)
    assert state.pause_s(UNAVAILABLE, PATIENCE_S + 1) == pauses[0]
    assert resumption(resumable=False).pause_s(UNAVAILABLE, 0.0) is None


def test_a_gateway_without_room_is_waited_for_once_another_has_let_the_request_in() -> None:
    state, overloaded = resumption(), PenstockError(ErrorCode.OVERLOADED, "full")
    assert state.pause_s(overloaded, 0.0) is None
    state.take(ACCEPTED, 0.0)
    assert state.pause_s(overloaded, 0.0)
    assert state.pause_s(overloaded, PATIENCE_S + 1) is None


def test_several_addresses_are_one_target() -> None:
    assert target("127.0.0.1:1,127.0.0.1:2") == "ipv4:127.0.0.1:1,127.0.0.1:2"
    assert target("gateway:50051") == "gateway:50051"
    assert target("ipv4:127.0.0.1:1,127.0.0.1:2") == "ipv4:127.0.0.1:1,127.0.0.1:2"


# --- both clients -----------------------------------------------------------------------------------------------------


class Gateway(inference_pb2_grpc.InferenceServicer):
    """Breaks its calls off where its script says: each call gets some events, then an error or None for its end."""

    def __init__(self, *script: tuple[list[Event], PenstockError | None]) -> None:
        self.script = list(script)
        self.asked: list[inference_pb2.GenerateCall | inference_pb2.ResumeCall] = []
        self.cancelled: list[str] = []

    async def Generate(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        events, error = self.script.pop(0)
        for event in events:
            await context.write(event)
        if error:
            raise error

    async def Resume(self, request: Any, context: Any) -> None:
        await self.Generate(request, context)

    async def Cancel(self, request: Any, context: Any) -> Any:
        self.cancelled.append(request.request_id)
        return inference_pb2.CancelReply(known=True)

    async def ListModels(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def GetPipeline(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def serve() -> Iterator[Callable[[Gateway], str]]:
    """Serves gateways, each from a loop in a thread."""
    ends: list[Callable[[], None]] = []

    def start(gateway: Gateway) -> str:
        started: Future[int] = Future()
        loop, end = asyncio.new_event_loop(), asyncio.Event()

        async def run() -> None:
            add = inference_pb2_grpc.add_InferenceServicer_to_server
            server = RpcServer([RpcService("penstock.v1.Inference", add, gateway)])
            started.set_result(await server.start("127.0.0.1:0"))
            await end.wait()
            await server.stop(0)

        def stop() -> None:
            loop.call_soon_threadsafe(end.set)
            thread.join()
            loop.close()

        thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
        thread.start()
        ends.append(stop)
        return f"127.0.0.1:{started.result(300)}"

    yield start
    for stop in ends:
        stop()


def told(address: str, kind: str, **fields: Any) -> list[Accepted | Delta]:
    if kind == "blocking":
        with Client(address) as client:
            return list(client.generate("hi", **fields))

    async def read() -> list[Accepted | Delta]:
        async with AsyncClient(address) as client:
            return [event async for event in client.generate("hi", **fields)]

    return asyncio.run(read())


@pytest.mark.parametrize("kind", ["blocking", "awaiting"])
def test_a_client_goes_on_by_itself(serve: Callable[[Gateway], str], kind: str) -> None:
    gateway = Gateway(
        ([], UNAVAILABLE),
        ([ACCEPTED, delta(0, 1)], UNAVAILABLE),
        ([ACCEPTED], UNAVAILABLE),
        ([ACCEPTED, delta(1, 3), delta(2, 5)], None),
    )
    accepted, *deltas = told(serve(gateway), kind, resumable=True)
    assert isinstance(accepted, Accepted)
    assert [each.text for each in deltas if isinstance(each, Delta)] == ["a", "bc", "de"]
    assert gateway.asked[0] == gateway.asked[1]
    assert [type(each).__name__ for each in gateway.asked] == ["GenerateCall"] * 2 + ["ResumeCall"] * 2
    assert gateway.cancelled == []


@pytest.mark.parametrize("kind", ["blocking", "awaiting"])
def test_a_client_that_was_not_asked_to_does_not(serve: Callable[[Gateway], str], kind: str) -> None:
    gateway = Gateway(([ACCEPTED, delta(0, 1)], UNAVAILABLE))
    address = serve(gateway)
    with pytest.raises(PenstockError) as raised:
        told(address, kind)
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert len(gateway.asked) == 1


@pytest.mark.parametrize("kind", ["blocking", "awaiting"])
def test_who_closes_a_resumable_request_cancels_it(
    serve: Callable[[Gateway], str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for client in ("synchronous", "asynchronous"):  # a cancel that a slow server does not hear in time is let go
        monkeypatch.setattr(f"penstock.client.{client}.CANCEL_S", 300.0)
    gateway = Gateway(([ACCEPTED, delta(0, 1), delta(1, 2)], None))
    address = serve(gateway)
    if kind == "blocking":
        with Client(address) as client:
            events = client.generate("hi", resumable=True)
            next(events)
            next(events)
            events.close()
    else:

        async def leave() -> None:
            async with AsyncClient(address) as client:
                events = client.generate("hi", resumable=True)
                await anext(events)
                await anext(events)
                await events.aclose()

        asyncio.run(leave())
    assert gateway.cancelled == [ID]


def test_a_client_finds_the_gateway_that_is_there(serve: Callable[[Gateway], str]) -> None:
    gateway = Gateway(([ACCEPTED, delta(0, 5)], None))
    _, only = told(f"127.0.0.1:1,{serve(gateway)}", "blocking", resumable=True)
    assert isinstance(only, Delta)
    assert only.text == "abcde"
