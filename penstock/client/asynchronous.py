"""The client for asyncio."""

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self

import grpc
from grpc import aio

from penstock.client.wire import (
    CHANNEL_OPTIONS,
    Accepted,
    Chat,
    Delta,
    Generation,
    ServedModel,
    call_metadata,
    decode_error,
    decode_event,
    encode_call,
)
from penstock.domain.params import SamplingParams
from penstock.v1 import inference_pb2, inference_pb2_grpc, status_pb2


class AsyncClient:
    """Calls one gateway from the running event loop. Methods and errors are those of `Client`."""

    def __init__(
        self, address: str = "127.0.0.1:50051", *, timeout_s: float | None = None, api_key: str | None = None
    ) -> None:
        """As `Client`; must be made while the loop runs."""
        self._channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._inference: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)
        self._timeout_s = timeout_s
        self._metadata = call_metadata(api_key)

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
        params: SamplingParams | None = None,
        *,
        messages: Chat | None = None,
        model: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Accepted | Delta, None]:
        """As `Client.generate`; `aclose` before its end, or a cancelled task, cancels the request."""
        call = encode_call(prompt, messages, params or SamplingParams(), model, priority)
        return self._events(call, timeout_s or self._timeout_s)

    async def complete(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Chat | None = None,
        model: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Generation:
        """As `generate`, all at once."""
        params = params or SamplingParams()
        call = encode_call(prompt, messages, params, model, priority)
        generation: Generation | None = None
        async for event in self._events(call, timeout_s or self._timeout_s):
            if isinstance(event, Accepted):
                generation = Generation.begin(event, params)
            elif generation is not None:
                generation.extend(event)
        return Generation.ended(generation)

    async def cancel(self, request_id: str) -> bool:
        """Cancels a request; False: there is no such request."""
        call = inference_pb2.CancelCall(request_id=request_id)
        try:
            reply = await self._inference.Cancel(call, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise decode_error(error) from None
        return reply.known

    async def models(self) -> list[ServedModel]:
        """The models that are served."""
        try:
            reply = await self._inference.ListModels(
                inference_pb2.ListModelsCall(), timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise decode_error(error) from None
        return [ServedModel(model.name, model.max_model_len) for model in reply.models]

    async def pipeline(self) -> status_pb2.PipelineStatus:
        """The state of the whole pipeline."""
        try:
            return await self._inference.GetPipeline(
                inference_pb2.GetPipelineCall(), timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise decode_error(error) from None

    async def _events(
        self, message: inference_pb2.GenerateCall, timeout_s: float | None
    ) -> AsyncGenerator[Accepted | Delta, None]:
        call = self._inference.Generate(message, timeout=timeout_s, metadata=self._metadata)
        try:
            async for event in call:
                if (decoded := decode_event(event)) is not None:
                    yield decoded
        except grpc.RpcError as error:
            raise decode_error(error) from None
        finally:
            call.cancel()
