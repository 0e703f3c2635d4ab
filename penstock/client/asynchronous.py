"""The client for asyncio."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc import aio

from contract.v1 import inference_pb2, inference_pb2_grpc
from penstock.client.chats import ChatOptions, ChatReply, encode_chat
from penstock.client.events import Accepted, Event
from penstock.client.questions import Question, R
from penstock.client.resumption import CANCEL_S, Resumption
from penstock.client.tls import ClientTls
from penstock.client.unary import AsyncUnaryCalls
from penstock.client.wire import (
    CHANNEL_OPTIONS,
    Chat,
    Generation,
    ParamsLike,
    call_metadata,
    decode_error,
    encode_call,
    full_params,
    target,
)


class AsyncClient(AsyncUnaryCalls):
    """Calls one gateway from the running event loop. Methods and errors are those of `Client`."""

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
        tenant: str | None = None,
        control_token: str | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        """As `Client`; must be made while the loop runs."""
        if tls is None:
            self._channel = aio.insecure_channel(target(address), options=CHANNEL_OPTIONS)
        else:
            self._channel = aio.secure_channel(target(address), tls.credentials(), options=CHANNEL_OPTIONS)
        self._inference: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)
        self._timeout_s = timeout_s
        self._metadata = call_metadata(api_key, tenant, control_token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all calls and the connection."""
        await self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        params: ParamsLike = None,
        *,
        messages: Chat | None = None,
        model: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        resumable: bool = False,
        idempotency_key: str | None = None,
        cache_salt: str | None = None,
        stream_interval: int = 0,
        return_prompt_token_ids: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """As `Client.generate`; `aclose` before its end, or a cancelled task, cancels the request."""
        call = encode_call(
            prompt,
            messages,
            params,
            model,
            priority,
            resumable=resumable,
            idempotency_key=idempotency_key,
            cache_salt=cache_salt,
            stream_interval=stream_interval,
            return_prompt_token_ids=return_prompt_token_ids,
        )
        return self._events(call, timeout_s or self._timeout_s)

    async def complete(
        self,
        prompt: str | Sequence[int] | None = None,
        params: ParamsLike = None,
        *,
        messages: Chat | None = None,
        model: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        resumable: bool = False,
        idempotency_key: str | None = None,
        cache_salt: str | None = None,
    ) -> Generation:
        """As `generate`, all at once."""
        call = encode_call(
            prompt,
            messages,
            params,
            model,
            priority,
            resumable=resumable,
            idempotency_key=idempotency_key,
            cache_salt=cache_salt,
        )
        generation: Generation | None = None
        async for event in self._events(call, timeout_s or self._timeout_s):
            if isinstance(event, Accepted):
                generation = Generation.begin(event, full_params(params))
            elif generation is not None:
                generation.extend(event)
        return Generation.ended(generation)

    def stream_chat(
        self, messages: Chat, params: ParamsLike = None, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[Event, None]:
        """As `Client.stream_chat`; `aclose` before its end, or a cancelled task, cancels the request."""
        return self._events(encode_chat(messages, params, **options), options.get("timeout_s") or self._timeout_s)

    async def chat(self, messages: Chat, params: ParamsLike = None, **options: Unpack[ChatOptions]) -> ChatReply:
        """As `Client.chat`."""
        reply: ChatReply | None = None
        async for event in self.stream_chat(messages, params, **options):
            if reply is None:
                reply = ChatReply.begun(event, full_params(params).n)
            reply.extend(event)
        return ChatReply.ended(reply)

    async def _ask(self, question: Question[R]) -> R:
        call = getattr(self._inference, question.method)
        timeout_s = question.timeout_s or self._timeout_s
        try:
            reply = await call(question.message, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise decode_error(error) from None
        return question.read(reply)

    async def _events(
        self, message: inference_pb2.GenerateCall, timeout_s: float | None
    ) -> AsyncGenerator[Event, None]:
        resumption = Resumption(message, time.monotonic())
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            call = self._begin(resumption.next_call, None if end_s is None else end_s - time.monotonic())
            try:
                async for event in call:
                    if (new := resumption.take(event, time.monotonic())) is not None:
                        yield new
            except grpc.RpcError as error:
                told = decode_error(error)
                pause_s = resumption.pause_s(told, time.monotonic())
                if pause_s is None:
                    raise told from None
            except (GeneratorExit, asyncio.CancelledError):
                await self._abandon(message, resumption)
                raise
            else:
                return
            finally:
                call.cancel()
            await asyncio.sleep(pause_s)

    def _begin(
        self, message: inference_pb2.GenerateCall | inference_pb2.ResumeCall, timeout_s: float | None
    ) -> "aio.UnaryStreamCall[Any, inference_pb2.GenerateEvent]":
        if isinstance(message, inference_pb2.ResumeCall):
            return self._inference.Resume(message, timeout=timeout_s, metadata=self._metadata)
        return self._inference.Generate(message, timeout=timeout_s, metadata=self._metadata)

    async def _abandon(self, message: inference_pb2.GenerateCall, resumption: Resumption) -> None:
        """A request that outlives its calls must be told that it is not wanted; without a word its grace ends it."""
        if message.resumable and resumption.request_id and not resumption.has_ended:
            with suppress(grpc.RpcError):
                await self._inference.Cancel(
                    inference_pb2.CancelCall(request_id=resumption.request_id),
                    timeout=CANCEL_S,
                    metadata=self._metadata,
                )
