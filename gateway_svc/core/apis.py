"""The APIs that a gateway speaks."""

from functools import partial

from gateway_svc.core.anthropic.errors import message_error_fields
from gateway_svc.core.anthropic.fields import MESSAGE_FIELDS
from gateway_svc.core.anthropic.parse import parse_message
from gateway_svc.core.anthropic.writer import MessageWriter
from gateway_svc.core.api import Api, ErrorFields
from gateway_svc.core.ask import Form
from gateway_svc.core.openai import CHAT_FIELDS, COMPLETION_FIELDS, parse_chat, parse_completion
from gateway_svc.core.part_replies import PartEvents, PartReply
from gateway_svc.core.pooled.apis import POOLED_APIS
from gateway_svc.core.replies import Reply, error_fields
from gateway_svc.core.responses.fields import RESPONSE_FIELDS
from gateway_svc.core.responses.parse import parse_response
from gateway_svc.core.responses.writer import ResponseWriter
from gateway_svc.core.sse import SseFormat

COMPLETIONS = Api(
    form=Form.COMPLETION,
    paths=("/v1/completions",),
    parse=lambda body, models: parse_completion(body, models.defaults),
    known_fields=COMPLETION_FIELDS,
    reply=Reply,
    events=SseFormat,
    error_fields=error_fields,
)
CHATS = Api(
    form=Form.CHAT,
    paths=("/v1/chat/completions",),
    parse=lambda body, models: parse_chat(body, models.defaults, models.formats),
    known_fields=CHAT_FIELDS,
    reply=Reply,
    events=SseFormat,
    error_fields=error_fields,
)
RESPONSES = Api(
    form=Form.RESPONSE,
    paths=("/v1/responses",),
    parse=parse_response,
    known_fields=RESPONSE_FIELDS,
    reply=partial(PartReply, writer_of=ResponseWriter),
    events=partial(PartEvents, writer_of=ResponseWriter),
    error_fields=error_fields,
    numbers_events=True,
)
MESSAGES = Api(
    form=Form.MESSAGE,
    paths=("/v1/messages",),
    parse=parse_message,
    known_fields=MESSAGE_FIELDS,
    reply=partial(PartReply, writer_of=MessageWriter),
    events=partial(PartEvents, writer_of=MessageWriter),
    error_fields=message_error_fields,
    id_header=b"request-id",
    numbers_events=True,
)
APIS = (COMPLETIONS, CHATS, RESPONSES, MESSAGES, *POOLED_APIS)
_BY_FORM = {api.form: api for api in APIS}


def api_of(form: Form) -> Api:
    """The API in which a request was asked."""
    return _BY_FORM[form]


def errors_at(path: str) -> ErrorFields:
    """The shape of errors at a path: that of the API which is there, else OpenAI's."""
    above = (path, *(path[:at] for at, character in enumerate(path) if character == "/"))
    return next((api.error_fields for api in APIS if not set(above).isdisjoint(api.paths)), error_fields)
