"""The blocking client."""

from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Self

import grpc

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


class Client:
    """Calls one gateway; may be used by several threads at once.

    Every method raises `PenstockError`: what the pipeline said, or UNAVAILABLE if it cannot be reached.
    """

    def __init__(
        self, address: str = "127.0.0.1:50051", *, timeout_s: float | None = None, api_key: str | None = None
    ) -> None:
        """Connects on first use.

        Args:
            address: host:port of a gateway's gRPC server.
            timeout_s: for every call that does not say otherwise; None: none.
            api_key: sent with every call; on a network that others can listen on, mind that nothing is encrypted.

        Raises:
            PenstockError: INVALID_ARGUMENT: the key cannot be one.
        """
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._timeout_s = timeout_s
        self._metadata = call_metadata(api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls and the connection."""
        self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Chat | None = None,
        model: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Generator[Accepted | Delta, None, None]:
        """Generates for one prompt: first `Accepted`, then a `Delta` for each step of each sample.

        Closing the iterator before its end cancels the request.

        Args:
            prompt: text, or token ids; or else
            messages: a chat, each message with a `role` and a text as `content`.
            params: how to generate.
            model: empty: the one that is served.
            priority: lower is served first.
            timeout_s: the request's deadline; the pipeline gives it up then.

        Raises:
            PenstockError: the request is wrong, was refused, or failed.
        """
        call = encode_call(prompt, messages, params or SamplingParams(), model, priority)
        return self._events(call, timeout_s or self._timeout_s)

    def complete(
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
        for event in self._events(call, timeout_s or self._timeout_s):
            if isinstance(event, Accepted):
                generation = Generation.begin(event, params)
            elif generation is not None:
                generation.extend(event)
        return Generation.ended(generation)

    def cancel(self, request_id: str) -> bool:
        """Cancels a request; False: there is no such request."""
        try:
            reply = self._inference.Cancel(
                inference_pb2.CancelCall(request_id=request_id), timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise decode_error(error) from None
        return reply.known

    def models(self) -> list[ServedModel]:
        """The models that are served."""
        try:
            reply = self._inference.ListModels(
                inference_pb2.ListModelsCall(), timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise decode_error(error) from None
        return [ServedModel(model.name, model.max_model_len) for model in reply.models]

    def pipeline(self) -> status_pb2.PipelineStatus:
        """The state of the whole pipeline."""
        try:
            return self._inference.GetPipeline(
                inference_pb2.GetPipelineCall(), timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise decode_error(error) from None

    def _events(
        self, message: inference_pb2.GenerateCall, timeout_s: float | None
    ) -> Generator[Accepted | Delta, None, None]:
        call = self._inference.Generate(message, timeout=timeout_s, metadata=self._metadata)
        try:
            for event in call:
                if (decoded := decode_event(event)) is not None:
                    yield decoded
        except grpc.RpcError as error:
            raise decode_error(error) from None
        finally:
            call.cancel()
