"""The form of a call's answer, as it is kept beside its requests."""

from google.protobuf.message import DecodeError

from contract.domain.errors import PenstockError, PoisonMessageError
from contract.domain.rows import REQUEST_ID_BYTES
from contract.v1 import requests_pb2
from contract.wire.requests import pack_u32, unpack_u32
from gateway_svc.core.ask import Form
from gateway_svc.core.field_names import FieldName
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.replies import ToldPrompt
from gateway_svc.core.reply_form import ReplyForm

_KINDS = {
    Form.COMPLETION: requests_pb2.REPLY_KIND_COMPLETION,
    Form.CHAT: requests_pb2.REPLY_KIND_CHAT,
    Form.RESPONSE: requests_pb2.REPLY_KIND_RESPONSE,
    Form.MESSAGE: requests_pb2.REPLY_KIND_MESSAGE,
    Form.EMBEDDING: requests_pb2.REPLY_KIND_EMBEDDING,
    Form.POOLING: requests_pb2.REPLY_KIND_POOLING,
    Form.SCORE: requests_pb2.REPLY_KIND_SCORE,
    Form.RERANK: requests_pb2.REPLY_KIND_RERANK,
}
_FORMS = {kind: form for form, kind in _KINDS.items()}


def encode_reply_form(form: ReplyForm) -> bytes:
    """A penstock.v1.ReplyForm."""
    return requests_pb2.ReplyForm(
        request_ids=b"".join(form.request_ids),
        n=form.n,
        kind=_KINDS[form.form],
        model=form.model,
        arrival_unix_ns=form.arrival_ns,
        deadline_unix_ns=form.deadline_ns,
        seed=form.seed,
        logprobs=form.wants_logprobs,
        prompt_logprobs=form.wants_prompt_logprobs,
        echoes_logprobs=form.echoes_logprobs,
        without_output=form.without_output,
        tokens_as_ids=form.tokens_as_ids,
        include_usage=form.include_usage,
        resumable=form.is_resumable,
        continuous_usage=form.continuous_usage,
        asked=form.asked,
        api_key=form.api_key,
        stream_interval=form.stream_interval,
        prompts=[requests_pb2.ToldPrompt(text=each.text, token_ids=pack_u32(each.token_ids)) for each in form.prompts],
        returns_token_ids=form.returns_token_ids,
        reading=None if form.reading is None else _encode_reading(form.reading),
        context=form.context,
        names=[
            requests_pb2.FieldName(
                inner=each.inner, written=each.written, is_whole=each.is_whole, since_prompt=each.since
            )
            for each in form.names
        ],
    ).SerializeToString()


def _encode_reading(reading: OutputReading) -> requests_pb2.OutputReading:
    return requests_pb2.OutputReading(
        tool_format=reading.tool_format,
        reasoning_format=reading.reasoning_format,
        begins_thinking=reading.begins_thinking,
        without_reasoning=reading.without_reasoning,
        hidden=reading.hidden,
        closing_token_id=reading.closing_token_id,
        texts=[
            requests_pb2.FunctionTexts(function=function, parameters=parameters)
            for function, parameters in reading.texts
        ],
    )


def _decode_reading(message: requests_pb2.OutputReading) -> OutputReading:
    return OutputReading(
        tool_format=message.tool_format,
        reasoning_format=message.reasoning_format,
        begins_thinking=message.begins_thinking,
        without_reasoning=message.without_reasoning,
        hidden=tuple(message.hidden),
        closing_token_id=message.closing_token_id if message.HasField("closing_token_id") else None,
        texts=tuple((each.function, tuple(each.parameters)) for each in message.texts),
    )


def decode_reply_form(payload: bytes) -> ReplyForm:
    """The form of a request that some gateway submitted.

    Raises:
        PoisonMessageError: not a ReplyForm, or one of no request.
    """
    try:
        message = requests_pb2.ReplyForm.FromString(payload)
    except DecodeError as error:
        raise PoisonMessageError(f"not a ReplyForm: {error}") from error
    ids = message.request_ids
    if not ids or len(ids) % REQUEST_ID_BYTES or not message.n:
        raise PoisonMessageError("a ReplyForm without requests")
    return ReplyForm(
        request_ids=tuple(ids[at : at + REQUEST_ID_BYTES] for at in range(0, len(ids), REQUEST_ID_BYTES)),
        n=message.n,
        form=_FORMS.get(message.kind, Form.COMPLETION),
        model=message.model,
        arrival_ns=message.arrival_unix_ns,
        deadline_ns=message.deadline_unix_ns,
        seed=message.seed,
        wants_logprobs=message.logprobs,
        wants_prompt_logprobs=message.prompt_logprobs,
        echoes_logprobs=message.echoes_logprobs,
        without_output=message.without_output,
        tokens_as_ids=message.tokens_as_ids,
        include_usage=message.include_usage,
        is_resumable=message.resumable,
        continuous_usage=message.continuous_usage,
        asked=message.asked,
        api_key=message.api_key,
        stream_interval=message.stream_interval,
        prompts=tuple(_prompt(each) for each in message.prompts),
        returns_token_ids=message.returns_token_ids,
        reading=_decode_reading(message.reading) if message.HasField("reading") else None,
        context=message.context,
        names=tuple(
            FieldName(each.inner, each.written, is_whole=each.is_whole, since=each.since_prompt)
            for each in message.names
        ),
    )


def _prompt(message: requests_pb2.ToldPrompt) -> ToldPrompt:
    try:
        return ToldPrompt(message.text, tuple(unpack_u32("token_ids", message.token_ids)))
    except PenstockError as error:
        raise PoisonMessageError(f"a ReplyForm with a prompt that is none: {error.message}") from error
