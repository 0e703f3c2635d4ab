"""Messages of gRPC clients, and those for them."""

from dataclasses import replace

from contract.domain import chain
from contract.domain.errors import invalid
from contract.domain.finish import FinishReason
from contract.domain.params import SamplingParams
from contract.domain.request import Prompt, Request, check_cache_salt
from contract.domain.rows import TextRow
from contract.v1 import inference_pb2, requests_pb2, tokenizer_pb2
from contract.wire.deltas import encode_delta
from contract.wire.generation_defaults import unsaid
from contract.wire.requests import decode_params, pack_u32, unpack_u32
from gateway_svc.core.ask import Ask, Form, Models
from gateway_svc.core.chat_outputs import ChatOutput, chat_output
from gateway_svc.core.formats.choice import ModelFormats
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.openai import MAX_STREAM_INTERVAL
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.streams import DeliveredSequence, split
from gateway_svc.core.told import ToldChoice
from gateway_svc.core.vocabulary import DetokenizeAsk, Prepared, TokenizeAsk, Tokenized
from gateway_svc.wire.chats import decode_chat, told_deltas
from gateway_svc.wire.prompts import decode_prompt, prompt_name
from gateway_svc.wire.requests import encode_request

_U64 = 2**64
_DELTA_LOGPROBS = 2048 * 21  # of tokens and their alternatives
_DELTA_TOKENS = 2048
_DELTA_CHARS = 2**18
_ENDS = {
    int(each): each
    for each in (FinishReason.UNSPECIFIED, FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)
}


def decode_generate(call: inference_pb2.GenerateCall, models: Models) -> Ask:
    """The request of a gRPC client, where it says nothing with the defaults of its model.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field; what `models` raises.
    """
    if call.stream_interval > MAX_STREAM_INTERVAL:
        raise invalid(f"stream_interval may be {MAX_STREAM_INTERVAL}, got {call.stream_interval}", "stream_interval")
    ask = _ask(call.request, call.chat if call.HasField("chat") else None, models)
    return replace(
        ask,
        is_resumable=call.resumable,
        stream_interval=call.stream_interval,
        returns_token_ids=call.return_prompt_token_ids,
    )


def decode_render(call: inference_pb2.RenderCall, models: Models) -> Ask:
    """The chat of a gRPC client whose tokens are asked for; raises as `decode_generate`."""
    ask = _ask(call.request, call.chat if call.HasField("chat") else None, models)
    if ask.form is not Form.CHAT:
        raise invalid("messages is missing: what is rendered is a chat", "messages")
    return ask


def _ask(message: requests_pb2.GenerateRequest, chat: inference_pb2.ChatOutput | None, models: Models) -> Ask:
    params = decode_params(message, _signed(message.seed) if message.HasField("seed") else None)
    left, prompt = unsaid(message), decode_prompt(message)
    output = ChatOutput(models.defaults(message.model).fill(params, left))
    if chat is not None:
        output = _chat_output(chat, prompt, output.params, models.formats(message.model))
        variables = {**(prompt.chat_template_kwargs or {}), **output.variables}
        required = (*prompt.required_variables, *output.variables)
        prompt = replace(prompt, chat_template_kwargs=variables or None, required_variables=required)
    return Ask(
        form=Form.COMPLETION if prompt.messages is None else Form.CHAT,
        model=message.model,
        prompts=(prompt,),
        params=output.params,
        priority=message.priority,
        wants_prompt_logprobs=output.params.prompt_logprobs is not None,
        cache_salt=check_cache_salt(message.cache_salt) if message.cache_salt else "",
        unsaid=left,
        reading=output.reading or (None if chat is None else OutputReading()),
        names=(prompt_name(message),),
    )


def _chat_output(
    chat: inference_pb2.ChatOutput, prompt: Prompt, params: SamplingParams, formats: ModelFormats
) -> ChatOutput:
    if prompt.messages is None:
        raise invalid("chat is for a prompt of messages", "chat")
    return chat_output(decode_chat(chat), params, prompt.chat_template_kwargs or {}, formats)


def decode_tokenize(call: inference_pb2.TokenizePromptCall) -> TokenizeAsk:
    """The text or chat of a gRPC client that becomes tokens.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field.
    """
    prompt = decode_prompt(call)
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


def render_reply(request: Request, prepared: Prepared, text: str) -> inference_pb2.RenderReply:
    """A request of which these tokens are the prompt, and their text."""
    message = requests_pb2.GenerateRequest.FromString(encode_request(request))
    message.token_ids.ids = pack_u32(prepared.token_ids.tolist())
    message.stopping.max_tokens = prepared.max_tokens
    message.stopping.max_tokens_is_default = False
    if request.params.seed is None:
        message.ClearField("seed")
    return inference_pb2.RenderReply(request=message, text=text)


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


def _signed(seed: int) -> int:
    """An unsigned seed as the parameters have it: in [-2**63, 2**63)."""
    return seed if seed < _U64 // 2 else seed - _U64


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
