"""Messages of gRPC clients, and those for them."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from contract.domain import chain
from contract.domain.errors import invalid
from contract.domain.finish import FinishReason, Usage
from contract.domain.params import SamplingParams
from contract.domain.pooling import Pooling, PoolingKind, PoolingParams
from contract.domain.request import Message, Prompt, check_cache_salt
from contract.domain.rows import TextRow
from contract.v1 import common_pb2, inference_pb2, requests_pb2, tokenizer_pb2
from contract.wire.deltas import encode_delta
from contract.wire.generation_defaults import unsaid
from contract.wire.requests import decode_message, decode_params, pack_u32, unpack_u32
from gateway_svc.core.ask import Form, Models
from gateway_svc.core.chat_outputs import ChatOutput, chat_output
from gateway_svc.core.field_names import FieldName, FieldNames, in_words_of
from gateway_svc.core.formats.choice import ModelFormats
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.idempotency import check_key
from gateway_svc.core.messages import MAX_MESSAGES, check_depth
from gateway_svc.core.openai import MAX_STREAM_INTERVAL
from gateway_svc.core.prompt_outputs import PromptVector
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.streams import DeliveredSequence, split
from gateway_svc.core.told import ToldChoice
from gateway_svc.core.vocabulary import DetokenizeAsk, TokenizeAsk, Tokenized
from gateway_svc.wire.chats import decode_chat, told_deltas

_U64 = 2**64
_DELTA_LOGPROBS = 2048 * 21  # of tokens and their alternatives
_DELTA_TOKENS = 2048
_DELTA_CHARS = 2**18
_ENDS = {
    int(each): each
    for each in (FinishReason.UNSPECIFIED, FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)
}


@dataclass(frozen=True, slots=True)
class GrpcAsk:
    """A checked `Generate` or `Embed` call."""

    model: str  # empty: the one that is served
    prompt: Prompt
    params: SamplingParams
    priority: int
    is_resumable: bool = False
    idempotency_key: str | None = None
    cache_salt: str = ""
    stream_interval: int = 0  # tokens of a delta; 0: as they come
    returns_prompt_ids: bool = False
    unsaid: frozenset[str] = frozenset()  # parameters that were left to the defaults
    pooling: Pooling | None = None  # of an `Embed` call
    reading: OutputReading | None = None  # of a chat whose outputs are told apart
    names: FieldNames = ()  # that the caller has for fields, where they are others

    @property
    def form(self) -> Form:
        """As what it is told over HTTP, if its client goes on there."""
        if self.pooling is not None:
            return Form.EMBEDDING
        return Form.COMPLETION if self.prompt.messages is None else Form.CHAT


def decode_generate(call: inference_pb2.GenerateCall, models: Models) -> GrpcAsk:
    """The request of a gRPC client, where it says nothing with the defaults of its model.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field; what `models` raises.
    """
    message, key = call.request, call.idempotency_key
    if call.stream_interval > MAX_STREAM_INTERVAL:
        raise invalid(f"stream_interval may be {MAX_STREAM_INTERVAL}, got {call.stream_interval}", "stream_interval")
    params = decode_params(message, _signed(message.seed) if message.HasField("seed") else None)
    left, prompt = unsaid(message), _prompt(message)
    output = ChatOutput(models.defaults(message.model).fill(params, left))
    if call.HasField("chat"):
        output = _chat_output(call.chat, prompt, output.params, models.formats(message.model))
        variables = {**(prompt.chat_template_kwargs or {}), **output.variables}
        required = (*prompt.required_variables, *output.variables)
        prompt = replace(prompt, chat_template_kwargs=variables or None, required_variables=required)
    return GrpcAsk(
        message.model,
        prompt,
        output.params,
        message.priority,
        is_resumable=call.resumable,
        idempotency_key=check_key(key) if key else None,
        cache_salt=check_cache_salt(message.cache_salt) if message.cache_salt else "",
        stream_interval=call.stream_interval,
        returns_prompt_ids=call.return_prompt_token_ids,
        unsaid=left,
        reading=output.reading or (OutputReading() if call.HasField("chat") else None),
        names=_prompt_names(message),
    )


def _chat_output(
    chat: inference_pb2.ChatOutput, prompt: Prompt, params: SamplingParams, formats: ModelFormats
) -> ChatOutput:
    if prompt.messages is None:
        raise invalid("chat is for a prompt of messages", "chat")
    return chat_output(decode_chat(chat), params, prompt.chat_template_kwargs or {}, formats)


def decode_embed(call: inference_pb2.EmbedCall, models: Models) -> GrpcAsk:
    """The prompt of a gRPC client that becomes a vector.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field; what `models` raises.
    """
    key = call.idempotency_key
    truncation = call.truncate_prompt_tokens if call.HasField("truncate_prompt_tokens") else None
    return GrpcAsk(
        call.model,
        _prompt(call),
        SamplingParams(temperature=0.0, max_tokens=1, truncate_prompt_tokens=truncation),
        call.priority,
        idempotency_key=check_key(key) if key else None,
        cache_salt=check_cache_salt(call.cache_salt) if call.cache_salt else "",
        pooling=_pooling(call, models),
        names=_prompt_names(call),
    )


def _prompt_names(message: requests_pb2.GenerateRequest | inference_pb2.EmbedCall) -> FieldNames:
    """The form of the prompt that was given, which is a field of its own."""
    return (FieldName("prompt", message.WhichOneof("prompt") or "prompt"),)


def _pooling(call: inference_pb2.EmbedCall, models: Models) -> Pooling:
    with in_words_of((FieldName("pooling_type", "kind"),)):
        wanted = PoolingParams(
            pooling_type=_kind_name(call.kind) if call.kind else None,
            normalize=call.normalize if call.HasField("normalize") else None,
            dimensions=call.dimensions or None,
        )
        return models.pooling(call.model).pooling(wanted)


def _kind_name(number: int) -> str:
    """The name of a kind of pooling; its number, where there is none."""
    return PoolingKind(number).name if number in PoolingKind.__members__.values() else str(number)


def decode_tokenize(call: inference_pb2.TokenizePromptCall) -> TokenizeAsk:
    """The text or chat of a gRPC client that becomes tokens.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field.
    """
    prompt = _prompt(call)
    is_chat = prompt.messages is not None
    adds = call.add_special_tokens if call.HasField("add_special_tokens") else not is_chat
    return TokenizeAsk(call.model, prompt, adds, call.return_token_strs)


def tokenize_reply(found: Tokenized) -> tokenizer_pb2.TokenizeReply:
    """The tokens of a text or a chat."""
    return tokenizer_pb2.TokenizeReply(
        token_ids=pack_u32(found.token_ids.tolist()),
        token_strs=found.strings or (),
        max_model_len=found.max_model_len,
    )


def decode_detokenize(call: inference_pb2.DetokenizeTokensCall) -> DetokenizeAsk:
    """The tokens of a gRPC client that become a text.

    Raises:
        PenstockError: INVALID_ARGUMENT: they are no column.
    """
    return DetokenizeAsk(call.model, tuple(unpack_u32("token_ids", call.token_ids)))


def embed_reply(form: ReplyForm, row: TextRow, vector: PromptVector) -> inference_pb2.EmbedReply:
    """The answer to an `Embed` call, whose request ended with this row."""
    usage = row.usage or Usage()
    return inference_pb2.EmbedReply(
        request_id=form.shown_id,
        model=form.model,
        values=vector.values.astype("<f4", copy=False).tobytes(),
        usage=common_pb2.Usage(
            prompt_tokens=usage.num_prompt_tokens,
            output_tokens=usage.num_output_tokens,
            cached_tokens=usage.num_cached_tokens,
        ),
        system_fingerprint=row.model_digest.hex(),
    )


def decode_offsets(call: inference_pb2.ResumeCall, num_choices: int) -> list[DeliveredSequence]:
    """Read what a gRPC client says it has of each choice of a call.

    Raises:
        PenstockError: INVALID_ARGUMENT: it cannot be.
    """
    if not call.offsets:
        return [DeliveredSequence() for _ in range(num_choices)]
    if len(call.offsets) != num_choices:
        raise invalid(f"the request has {num_choices} samples, got offsets of {len(call.offsets)}", "offsets")
    have = []
    for offset in call.offsets:
        end = _ENDS.get(offset.finish_reason)
        if end is None or (offset.characters and not offset.tokens):
            raise invalid("an offset says what cannot be", "offsets")
        known = offset.chain if offset.tokens else chain.CHAIN_START
        have.append(DeliveredSequence(offset.tokens, offset.characters, known, end, claim=offset.tokens))
    return have


def _prompt(
    message: requests_pb2.GenerateRequest | inference_pb2.EmbedCall | inference_pb2.TokenizePromptCall,
) -> Prompt:
    form = message.WhichOneof("prompt")
    if form is None:
        raise invalid("a request needs a prompt: text, token_ids or messages", "prompt")
    if form == "text":
        return Prompt(text=message.text)
    if form == "token_ids" and not isinstance(message, inference_pb2.TokenizePromptCall):
        ids = tuple(unpack_u32("token_ids.ids", message.token_ids.ids))
        if not ids:
            raise invalid("a prompt must have at least one token id", "token_ids")
        return Prompt(token_ids=ids)
    if not message.messages.messages:
        raise invalid("messages must have at least one message", "messages")
    if len(message.messages.messages) > MAX_MESSAGES:
        raise invalid(f"at most {MAX_MESSAGES} messages, got {len(message.messages.messages)}", "messages")
    messages = tuple(_message(f"messages[{index}]", each) for index, each in enumerate(message.messages.messages))
    kwargs = _object("messages.template_kwargs_json", message.messages.template_kwargs_json)
    return Prompt(
        messages=messages,
        chat_template_kwargs=kwargs,
        required_variables=tuple(message.messages.required_variables),
    )


def _message(where: str, each: requests_pb2.ChatMessage) -> Message:
    message = decode_message(where, each)
    parts = message.content if isinstance(message.content, tuple) else ()
    check_depth(where, [message.extra, *parts])
    return message


def _signed(seed: int) -> int:
    """An unsigned seed as the parameters have it: in [-2**63, 2**63)."""
    return seed if seed < _U64 // 2 else seed - _U64


def _object(where: str, text: str) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"{where} must be a JSON object: {error}", where) from error
    check_depth(where, found)
    return found


def accepted_event(form: ReplyForm) -> inference_pb2.GenerateEvent:
    """The first event of a call."""
    token_ids = form.prompts[0].token_ids if form.prompts else ()
    accepted = inference_pb2.Accepted(
        request_id=form.shown_id, model=form.model, seed=form.seed, prompt_token_ids=pack_u32(token_ids)
    )
    return inference_pb2.GenerateEvent(accepted=accepted)


def deltas(choice: int, row: TextRow, told: ToldChoice | None = None) -> list[inference_pb2.GenerateEvent]:
    """A choice's row as events: one, unless it would exceed the 4 MiB that gRPC clients take by default.

    Args:
        choice: prompt * n + sample.
        row: extends the choice's row before.
        told: of a choice that is told in parts, what its client was told so far; None: its text is told as it is.
    """
    num_each = 1 + max((len(each.top) for each in row.logprobs), default=0)
    num_tokens = min(_DELTA_TOKENS, _DELTA_LOGPROBS // num_each)
    if told is not None:
        return told_deltas(choice, row, told, num_tokens)
    parts = split(row, num_tokens, _DELTA_CHARS)
    events = [inference_pb2.GenerateEvent(delta=encode_delta(part, choice)) for part in parts]
    events[-1].delta.chain_after = chain.extend(row.chain, row.token_ids)
    return events
