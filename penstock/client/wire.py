"""Messages that clients send and get, and their protobuf."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import numpy as np

from contract.domain.api_keys import CONTROL_TOKEN_HEADER, TENANT_HEADER, is_tenant
from contract.domain.errors import ERROR_KINDS, ErrorCode, PenstockError, invalid
from contract.domain.finish import FinishReason, Usage
from contract.domain.generation_defaults import FILLED
from contract.domain.params import SamplingParams
from contract.domain.request import Message, check_cache_salt
from contract.domain.rows import TokenLogprob
from contract.v1 import inference_pb2, requests_pb2
from contract.wire import errors
from contract.wire.errors import ERROR_TRAILER
from contract.wire.generation_defaults import clear_unsaid
from contract.wire.requests import encode_message, encode_params
from contract.wire.tokens import decode_prompt_logprobs
from penstock.client.events import Accepted, ChatDelta, Delta, Event, PromptPart, ToolCallDelta
from penstock.outputs import CompletionOutput, Logprob, new_samples, prompt_entries

_TOO_LARGE = "message larger than max"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A gateway that was restarted, or another of those that the address names, is found soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # The time that a gateway has to answer a connection, whatever the name says: one on a busy machine needs more than
    # the pause before the next attempt.
    ("grpc.min_reconnect_backoff_ms", 5000),
)
_MESSAGE_KEYS = ("role", "content")
_U64 = 2**64
# The first code of each status: the most general one.
_CODES = {kind.grpc_status: code for code, kind in reversed(ERROR_KINDS.items())}

Chat: TypeAlias = Sequence[Message | Mapping[str, Any]]
ParamsLike: TypeAlias = SamplingParams | Mapping[str, Any] | None  # some of them: the others are the model's defaults


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is served."""

    name: str
    max_model_len: int  # tokens of prompt and output together, at most


@dataclass(slots=True)
class Generation:
    """A whole generation: what its events add up to."""

    accepted: Accepted
    outputs: list[CompletionOutput] = field(default_factory=list)  # one for each sample
    usage: Usage | None = None  # once all samples have ended
    system_fingerprint: str = ""  # of the model that answers, as OpenAI calls it; once it is known
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # if asked for, as `RequestOutput` has them

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.outputs[0].text

    def extend(self, delta: PromptPart | Delta) -> None:
        """Adds what one event brought."""
        if isinstance(delta, PromptPart):
            if self.prompt_logprobs is not None:
                self.prompt_logprobs += delta.logprobs
            return
        self.outputs[delta.sequence].extend(delta)
        self.usage = delta.usage or self.usage
        self.system_fingerprint = delta.system_fingerprint or self.system_fingerprint

    @classmethod
    def begin(cls, accepted: Accepted, params: SamplingParams) -> "Generation":
        """A generation that was accepted and has no tokens."""
        generation = cls(accepted, new_samples(params))
        if params.prompt_logprobs is not None:
            generation.prompt_logprobs = [None]
        return generation

    @staticmethod
    def ended(generation: "Generation | None") -> "Generation":
        """The generation, if its stream was one.

        Raises:
            PenstockError: INTERNAL: the stream ended well, but before all samples had.
        """
        if generation is None or not all(output.finished for output in generation.outputs):
            raise PenstockError(ErrorCode.INTERNAL, "the stream of events ended too early")
        return generation


def call_metadata(
    api_key: str | None, tenant: str | None = None, control_token: str | None = None
) -> tuple[tuple[str, str], ...]:
    """The metadata of every call.

    Raises:
        PenstockError: INVALID_ARGUMENT: key, token or tenant cannot be one; neither key nor token is quoted.
    """
    metadata: list[tuple[str, str]] = []
    for what, name, secret in (("an API key", "api_key", api_key), ("a control token", "control_token", control_token)):
        if secret is not None and (not secret or not all("!" <= character <= "~" for character in secret)):
            # gRPC would refuse it too, and quote it.
            raise invalid(f"{what} is made of visible ASCII characters without spaces", name)
    if api_key is not None:
        metadata.append(("authorization", f"Bearer {api_key}"))
    if control_token is not None:
        metadata.append((CONTROL_TOKEN_HEADER, control_token))
    if tenant is not None:
        if not is_tenant(tenant):
            raise invalid("a tenant's name is 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'", "tenant")
        metadata.append((TENANT_HEADER, tenant))
    return tuple(metadata)


def target(address: str) -> str:
    """The gRPC target of an address: host:port, several IPv4 addresses separated by commas, or a target already."""
    return f"ipv4:{address}" if "," in address and not address.startswith("ipv") else address


def full_params(params: ParamsLike) -> SamplingParams:
    """All parameters: what is not given as `SamplingParams` has it.

    Raises:
        PenstockError: INVALID_ARGUMENT: one is out of bounds or of the wrong type, or there is none of its name.
    """
    if isinstance(params, SamplingParams):
        return params
    if unknown := [name for name in params or () if name not in SamplingParams.__dataclass_fields__]:
        raise invalid(f"there is no parameter {unknown[0]!r}; there are those of SamplingParams", str(unknown[0]))
    return SamplingParams(**(params or {}))


def encode_call(
    prompt: str | Sequence[int] | None,
    messages: Chat | None,
    params: ParamsLike,
    model: str,
    priority: int,
    *,
    resumable: bool = False,
    idempotency_key: str | None = None,
    cache_salt: str | None = None,
    stream_interval: int = 0,
    return_prompt_token_ids: bool = False,
    chat: inference_pb2.ChatOutput | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> inference_pb2.GenerateCall:
    """The input of `Generate`. A resumable call without a key gets one, so that it can be sent again.

    Raises:
        PenstockError: INVALID_ARGUMENT: not exactly one of prompt and messages, or one of the wrong type.
    """
    full = full_params(params)
    request = encode_params(full)
    if not isinstance(params, SamplingParams):
        left = FILLED.keys() - {name for name, value in (params or {}).items() if value is not None}
        request.stopping.max_tokens_is_default = "max_tokens" in left
        clear_unsaid(request, left - {"max_tokens"})
    request.model, request.priority = model, priority
    if cache_salt is not None:
        request.cache_salt = check_cache_salt(cache_salt)
    if full.seed is not None:
        request.seed = full.seed % _U64
    set_prompt(request, prompt, messages)
    if chat_template_kwargs:
        request.messages.template_kwargs_json = json.dumps(dict(chat_template_kwargs))
    key = secrets.token_hex(16) if resumable and idempotency_key is None else idempotency_key
    return inference_pb2.GenerateCall(
        request=request,
        resumable=resumable,
        idempotency_key=key or "",
        stream_interval=stream_interval,
        return_prompt_token_ids=return_prompt_token_ids,
        chat=chat,
    )


def set_prompt(
    call: requests_pb2.GenerateRequest | inference_pb2.EmbedCall | inference_pb2.TokenizePromptCall,
    prompt: str | Sequence[int] | None,
    messages: Chat | None,
) -> None:
    """Gives a call its prompt.

    Raises:
        PenstockError: INVALID_ARGUMENT: not exactly one of prompt and messages, or one of the wrong type.
    """
    if (prompt is None) == (messages is None):
        raise invalid("give either a prompt or messages", "prompt")
    if isinstance(prompt, str):
        call.text = prompt
    elif prompt is not None and not isinstance(call, inference_pb2.TokenizePromptCall):
        call.token_ids.ids = u32(prompt)
    else:
        call.messages.SetInParent()
        call.messages.messages.extend(_encode_message(message) for message in messages or ())


def decode_event(event: inference_pb2.GenerateEvent) -> Event | None:
    """One event of the stream; None for one that this version does not know."""
    match event.WhichOneof("event"):
        case "accepted":
            accepted = event.accepted
            token_ids = tuple(np.frombuffer(accepted.prompt_token_ids, "<u4").tolist())
            return Accepted(accepted.request_id, accepted.model, accepted.seed, token_ids)
        case "delta":
            return _decode_delta(event.delta)
        case "prompt_logprobs":
            return _decode_prompt_part(event.prompt_logprobs)
    return None


def decode_error(error: grpc.RpcError) -> PenstockError:
    """The error that ended a call: from the trailer, or made of the gRPC status if something else refused it."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return PenstockError(ErrorCode.INTERNAL, f"the call failed without a status: {error}")
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_TRAILER and isinstance(value, bytes) and (told := errors.decode_error(value)) is not None:
            return told
    status = error.code().name
    if _TOO_LARGE in (error.details() or ""):  # gRPC itself refuses what is far beyond the gateway's own bound
        return PenstockError(ErrorCode.REQUEST_TOO_LARGE, f"the request is too large: {error.details()}")
    if status == "CANCELLED":  # without a word of the gateway's: it ended as the call came
        status = "UNAVAILABLE"
    what = "the gateway cannot be reached" if status == "UNAVAILABLE" else f"the call ended with gRPC status {status}"
    return PenstockError(_CODES.get(status, ErrorCode.INTERNAL), f"{what}: {error.details() or 'no details'}")


def _encode_message(message: Message | Mapping[str, Any]) -> requests_pb2.ChatMessage:
    if not isinstance(message, Message):
        given = dict(message)
        role, content = (given.pop(key, None) for key in _MESSAGE_KEYS)
        if (
            not isinstance(role, str)
            or not isinstance(content, str | list | tuple | None)
            or (content is None and not given)
        ):
            raise invalid(
                f"a message has a text as role, and a text or text parts as content, got {message!r:.80}", "messages"
            )
        message = Message(role, tuple(content) if isinstance(content, list | tuple) else content, given or None)
    return encode_message(message)


def _decode_prompt_part(event: inference_pb2.PromptLogprobsEvent) -> PromptPart:
    part = event.part
    ids = np.frombuffer(part.spelled_ids, "<u4").tolist()
    ends = np.cumsum(np.frombuffer(part.byte_counts, "<u4")).tolist()
    spelled = {
        token_id: part.token_bytes[start:end] for token_id, start, end in zip(ids, [0, *ends[:-1]], ends, strict=True)
    }
    entries = prompt_entries(decode_prompt_logprobs(part), lambda token_id: spelled.get(token_id, b""))
    return PromptPart(event.position, tuple(entries))


def _decode_delta(delta: inference_pb2.Delta) -> Delta:
    stop = delta.WhichOneof("stop_reason")
    usage = None
    if delta.HasField("usage"):
        usage = Usage(delta.usage.prompt_tokens, delta.usage.output_tokens, delta.usage.cached_tokens)
    return Delta(
        sequence=delta.sequence,
        token_offset=delta.token_offset,
        token_ids=tuple(np.frombuffer(delta.token_ids, "<u4").tolist()),
        text=delta.text,
        logprobs=tuple(
            TokenLogprob(
                each.token_id,
                each.logprob,
                tuple((top.token_id, top.logprob) for top in each.top),
                each.utf8,
                tuple(top.utf8 for top in each.top),
                rank=each.rank,
            )
            for each in delta.logprobs
        ),
        finish=FinishReason(delta.finish_reason),
        stop_reason=None if stop is None else getattr(delta, stop),
        usage=usage,
        system_fingerprint=delta.system_fingerprint,
        chat=_decode_chat(delta.chat) if delta.HasField("chat") else None,
    )


def _decode_chat(chat: inference_pb2.ChatDelta) -> ChatDelta:
    calls = tuple(ToolCallDelta(each.index, each.id, each.name, each.arguments) for each in chat.tool_calls)
    return ChatDelta(
        chat.reasoning,
        chat.content,
        calls,
        chat.reasoning_tokens if chat.HasField("reasoning_tokens") else None,
    )


def u32(token_ids: Sequence[int]) -> bytes:
    """Token ids as calls have them.

    Raises:
        PenstockError: INVALID_ARGUMENT: they are none.
    """
    try:
        return np.array(token_ids, "<u4").tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise invalid(f"token ids are integers in [0, 2**32): {error}", "token_ids") from error
