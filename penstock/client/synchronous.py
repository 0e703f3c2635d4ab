"""The blocking client."""

import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from contract.v1 import inference_pb2, inference_pb2_grpc
from penstock.client.chats import ChatOptions, ChatReply, encode_chat
from penstock.client.events import Accepted, Event
from penstock.client.questions import Question, R
from penstock.client.resumption import CANCEL_S, Resumption
from penstock.client.tls import ClientTls
from penstock.client.unary import UnaryCalls
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


class Client(UnaryCalls):
    """Calls one gateway; may be used by several threads at once.

    Every method raises `PenstockError`: what the pipeline said, or UNAVAILABLE if it cannot be reached.
    """

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
        """Connects on first use.

        Args:
            address: host:port of a gateway's gRPC server, or several IPv4 ones separated by commas: if one goes, its
                calls end, and the next ones go to another.
            timeout_s: for every call that does not say otherwise; None: none.
            api_key: sent with every call; on a network that others can listen on, mind that nothing is encrypted.
            tenant: for whom every call is, where the gateway trusts who says so.
            tls: for a gateway with a certificate; None: nothing is encrypted.
            control_token: an operator's, for `pipeline` where the gateway asks for one.

        Raises:
            PenstockError: INVALID_ARGUMENT: key, token or tenant cannot be one.
        """
        if tls is None:
            self._channel = grpc.insecure_channel(target(address), options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target(address), tls.credentials(), options=CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._timeout_s = timeout_s
        self._metadata = call_metadata(api_key, tenant, control_token)

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
    ) -> Generator[Event, None, None]:
        """Generates for one prompt: first `Accepted`, then a `Delta` for each step of each sample.

        Closing the iterator before its end cancels the request.

        Args:
            prompt: text, or token ids; or else
            messages: a chat, each message with a `role` and a text as `content`.
            params: how to generate; of a mapping of some parameters, or None, the others are the model's defaults.
            model: empty: the one that is served.
            priority: lower is served first.
            timeout_s: the request's deadline; the pipeline gives it up then.
            resumable: the request outlives a broken connection, and the iterator goes on with it, for half a minute
                each time; every token comes once.
            idempotency_key: 1 to 255 visible ASCII characters; a request of the same tenant with the same key is the
                same request. It is told from its start, and anything else asked with this key is an error.
            cache_salt: 1 to 255 bytes; cached prefixes of requests with the same salt are found, and no others.
            stream_interval: tokens of a delta, up to 1024, after the first of its sample; 0: as they come.
            return_prompt_token_ids: `Accepted` has the ids of the prompt's tokens.

        Raises:
            PenstockError: the request is wrong, was refused, or failed.
        """
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

    def complete(
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
        for event in self._events(call, timeout_s or self._timeout_s):
            if isinstance(event, Accepted):
                generation = Generation.begin(event, full_params(params))
            elif generation is not None:
                generation.extend(event)
        return Generation.ended(generation)

    def stream_chat(
        self, messages: Chat, params: ParamsLike = None, **options: Unpack[ChatOptions]
    ) -> Generator[Event, None, None]:
        """Answers a chat: first `Accepted`, then a `Delta` for each step of each sample, whose `chat` says what it
        adds to what the model thinks, says and calls.

        Closing the iterator before its end cancels the request.

        Args:
            messages: each with a `role` and a text as `content`; of earlier turns also `reasoning`, `tool_calls` and
                `tool_call_id`, as `ChatReply.message` and OpenAI's clients have them.
            params: as of `generate`; where a mapping does not say `max_tokens`, that is what the context leaves.
            options: those of `ChatOptions`: tools, tool_choice and so on.

        Raises:
            PenstockError: the request is wrong, was refused, or failed.
        """
        return self._events(encode_chat(messages, params, **options), options.get("timeout_s") or self._timeout_s)

    def chat(self, messages: Chat, params: ParamsLike = None, **options: Unpack[ChatOptions]) -> ChatReply:
        """As `stream_chat`, with the same options, all at once."""
        reply: ChatReply | None = None
        for event in self.stream_chat(messages, params, **options):
            if reply is None:
                reply = ChatReply.begun(event, full_params(params).n)
            reply.extend(event)
        return ChatReply.ended(reply)

    def _ask(self, question: Question[R]) -> R:
        call = getattr(self._inference, question.method)
        timeout_s = question.timeout_s or self._timeout_s
        try:
            reply = call(question.message, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise decode_error(error) from None
        return question.read(reply)

    def _events(self, message: inference_pb2.GenerateCall, timeout_s: float | None) -> Generator[Event, None, None]:
        resumption = Resumption(message, time.monotonic())
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            call = self._begin(resumption.next_call, None if end_s is None else end_s - time.monotonic())
            try:
                for event in call:
                    if (new := resumption.take(event, time.monotonic())) is not None:
                        yield new
            except grpc.RpcError as error:
                told = decode_error(error)
                pause_s = resumption.pause_s(told, time.monotonic())
                if pause_s is None:
                    raise told from None
            except (GeneratorExit, KeyboardInterrupt):
                self._abandon(message, resumption)
                raise
            else:
                return
            finally:
                call.cancel()
            time.sleep(pause_s)

    def _begin(self, message: inference_pb2.GenerateCall | inference_pb2.ResumeCall, timeout_s: float | None) -> Any:
        if isinstance(message, inference_pb2.ResumeCall):
            return self._inference.Resume(message, timeout=timeout_s, metadata=self._metadata)
        return self._inference.Generate(message, timeout=timeout_s, metadata=self._metadata)

    def _abandon(self, message: inference_pb2.GenerateCall, resumption: Resumption) -> None:
        """A request that outlives its calls must be told that it is not wanted; without a word its grace ends it."""
        if message.resumable and resumption.request_id and not resumption.has_ended:
            with suppress(grpc.RpcError):
                self._inference.Cancel(
                    inference_pb2.CancelCall(request_id=resumption.request_id),
                    timeout=CANCEL_S,
                    metadata=self._metadata,
                )
