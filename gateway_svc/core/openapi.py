"""The description of the HTTP API: every route, what it takes and every answer that it can give."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from contract import __version__
from contract.domain.api_keys import CONTROL_TOKEN_HEADER
from contract.domain.errors import ERROR_KINDS
from contract.domain.request import ID_PREFIXES
from gateway_svc.core import reply_schemas
from gateway_svc.core.anthropic.fields import MESSAGE_BODY
from gateway_svc.core.auth import API_KEY_HEADER
from gateway_svc.core.event_ids import LAST_EVENT_ID
from gateway_svc.core.idempotency import IDEMPOTENCY_KEY
from gateway_svc.core.openai import CHAT_BODY, COMPLETION_BODY
from gateway_svc.core.openapi_schemas import schema, schema_name, schemas_of
from gateway_svc.core.pooled.apis import RERANKS, SCORES
from gateway_svc.core.pooled.fields import EmbeddingBody, RerankBody, ScoreBody
from gateway_svc.core.responses.fields import RESPONSE_BODY
from gateway_svc.core.vocabulary import DetokenizeBody, TokenizeBody

MAX_TIMEOUT_S = 7 * 86400.0
MAX_CLIENT_ID_CHARS = 255
_JSON, _EVENTS, _TEXT, _HTML = "application/json", "text/event-stream", "text/plain", "text/html"
_CSS, _SCRIPT = "text/css", "text/javascript"
_EXAMPLES: dict[str, dict[str, Any]] = {
    "CompletionCall": {"prompt": "Once upon a time", "max_tokens": 16},
    "ChatCall": {"messages": [{"role": "user", "content": "Hi!"}], "max_completion_tokens": 16},
    "TokenizeCall": {"messages": [{"role": "user", "content": "Hi!"}], "return_token_strs": True},
    "DetokenizeCall": {"tokens": [7, 42]},
    "EmbeddingCall": {"input": ["Once upon a time", "Hi!"]},
    "ScoreCall": {"text_1": "Who is there?", "text_2": ["A fox.", "It rains."]},
    "RerankCall": {"query": "Who is there?", "documents": ["A fox.", "It rains."], "top_n": 1},
    "ResponseCall": {"input": "Hi!", "max_output_tokens": 16},
    "MessageCall": {"messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 16},
}
_VISIBLE = {"type": "string", "pattern": "^[!-~]+$", "maxLength": MAX_CLIENT_ID_CHARS}
_REQUEST_ID = f"^({'|'.join(ID_PREFIXES)})?([A-Za-z0-9._-]+-)?[0-9a-fA-F]{{32}}$"
_PATHS = {
    "name": {"type": "string", "minLength": 1},
    "request_id": {"type": "string", "pattern": _REQUEST_ID},
}
_SWITCH = {"type": "string", "enum": ["true", "false"]}
_CLIENT_ID = ("X-Request-Id", _VISIBLE, "what the caller calls it: told with the reply and logged")
_CALL_HEADERS = (
    _CLIENT_ID,
    (
        "X-Request-Timeout-S",
        {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
        "seconds after which the request is given up",
    ),
    ("X-Penstock-Resumable", _SWITCH, "the request outlives its connection"),
    ("X-Penstock-Event-Ids", _SWITCH, "events have ids"),
    (IDEMPOTENCY_KEY, _VISIBLE, "the same key is the same request"),
    ("traceparent", {"type": "string"}, "W3C trace context"),
)
_LAST_EVENT = ((LAST_EVENT_ID, {"type": "string"}, "the id of the last event that came"), _CLIENT_ID)

# What anything may end with: HTTP that is none, late, or too much of it, too many connections, a defect.
_ALWAYS = (400, 408, 429, 431, 500)
_KEYED = (*_ALWAYS, 401)
_ASKED = (*_KEYED, 404, 503)  # about something that may be unknown, and a server that may be away
_POSTED = (*_ASKED, 413, 415)
_COMPUTED = (*_POSTED, 403, 409, 499, 504)
_FOLLOWED = (*_ASKED, 405, 409, 499, 504)
_PROBED = (*_ALWAYS, 503)
_KEYS: dict[str, Any] = {
    "key": {"type": "http", "scheme": "bearer", "description": "With `--api-keys-file`"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": API_KEY_HEADER, "description": "The same key"},
}
_Header = tuple[str, dict[str, Any], str]


@dataclass(frozen=True, slots=True)
class _Operation:
    """One method of one route."""

    path: str
    method: str
    summary: str
    replies: Mapping[str, Any]  # by type of content: the struct of the answer, or a schema
    statuses: tuple[int, ...]  # of errors
    body: Any = None  # its struct
    headers: tuple[_Header, ...] = ()
    queries: tuple[_Header, ...] = ()
    is_probe: bool = False  # whose 503 says what its 200 says
    error: Any = reply_schemas.ErrorReply  # the struct of an error that its route tells


_STRING: dict[str, Any] = {"type": "string"}
_EVENT: dict[str, Any] = {}  # no schema says what a stream of events is
_OPERATIONS = (
    _Operation(
        "/v1/completions",
        "POST",
        "Go on with a text, texts or token ids",
        {_JSON: reply_schemas.CompletionReply, _EVENTS: _EVENT},
        _COMPUTED,
        COMPLETION_BODY,
        _CALL_HEADERS,
    ),
    _Operation(
        "/v1/chat/completions",
        "POST",
        "Answer a chat",
        {_JSON: reply_schemas.ChatReply, _EVENTS: _EVENT},
        _COMPUTED,
        CHAT_BODY,
        _CALL_HEADERS,
    ),
    _Operation(
        "/v1/responses",
        "POST",
        "Answer a conversation of items, as OpenAI's Responses",
        {_JSON: reply_schemas.ResponseReply, _EVENTS: _EVENT},
        _COMPUTED,
        RESPONSE_BODY,
        _CALL_HEADERS,
    ),
    _Operation(
        "/v1/messages",
        "POST",
        "Answer a conversation of blocks, as Anthropic's Messages",
        {_JSON: reply_schemas.MessageReply, _EVENTS: _EVENT},
        _COMPUTED,
        MESSAGE_BODY,
        _CALL_HEADERS,
        error=reply_schemas.MessageErrorReply,
    ),
    *(
        _Operation(path, "POST", summary, {_JSON: reply}, _COMPUTED, body, _CALL_HEADERS)
        for path, summary, reply, body in (
            ("/v1/embeddings", "Vectors of texts, token ids or a chat", reply_schemas.EmbeddingsReply, EmbeddingBody),
            ("/pooling", "The same, as vLLM tells it", reply_schemas.PoolingReply, EmbeddingBody),
            *((path, "The likeness of texts", reply_schemas.ScoreReply, ScoreBody) for path in SCORES.paths),
            *((path, "Documents by likeness", reply_schemas.RerankReply, RerankBody) for path in RERANKS.paths),
        )
    ),
    _Operation(
        "/v1/messages/count_tokens",
        "POST",
        "Tokens of the prompt of such a conversation",
        {_JSON: reply_schemas.CountReply},
        _POSTED,
        MESSAGE_BODY,
        (_CLIENT_ID,),
        error=reply_schemas.MessageErrorReply,
    ),
    _Operation(
        "/v1/chat/completions/render",
        "POST",
        "A chat as it would be computed",
        {_JSON: reply_schemas.RenderReply},
        _COMPUTED,
        CHAT_BODY,
        (_CLIENT_ID,),
    ),
    _Operation(
        "/tokenize",
        "POST",
        "Tokens of a text or a chat",
        {_JSON: reply_schemas.TokenizeReply},
        _POSTED,
        TokenizeBody,
        (_CLIENT_ID,),
    ),
    _Operation(
        "/detokenize",
        "POST",
        "Text of tokens",
        {_JSON: reply_schemas.DetokenizeReply},
        _POSTED,
        DetokenizeBody,
        (_CLIENT_ID,),
    ),
    _Operation("/v1/models", "GET", "The models that are served", {_JSON: reply_schemas.ModelsReply}, _KEYED),
    _Operation("/v1/models/{name}", "GET", "One of them", {_JSON: reply_schemas.ModelFields}, _ASKED),
    _Operation(
        "/v1/requests/{request_id}",
        "GET",
        "Where a request is, and its reply or error",
        {_JSON: reply_schemas.RequestReply},
        _ASKED,
    ),
    _Operation("/v1/requests/{request_id}", "DELETE", "Cancel it", {_JSON: reply_schemas.CancelReply}, _ASKED),
    _Operation(
        "/v1/requests/{request_id}/events",
        "GET",
        "Its event stream, after the last event or from the start",
        {_EVENTS: _EVENT},
        _FOLLOWED,
        headers=_LAST_EVENT,
    ),
    _Operation(
        "/v1/requests/{request_id}/timeline",
        "GET",
        "What happened to it when",
        {_JSON: reply_schemas.TimelineReply},
        _ASKED,
    ),
    _Operation(
        "/v1/pipeline",
        "GET",
        "The services of a pool, the hops between them and their KV blocks, now",
        {_JSON: reply_schemas.PipelineReply},
        _ASKED,
        headers=((CONTROL_TOKEN_HEADER, _STRING, "where there is a control token: it, instead of a key"),),
        queries=(("pool", _STRING, "its name, of a gateway that serves several"),),
    ),
    *(
        _Operation(
            path,
            method,
            "Whether the gateway makes progress",
            {_JSON: reply_schemas.HealthReply},
            _PROBED,
            is_probe=True,
        )
        for path, method in (("/health", "GET"), ("/ping", "GET"), ("/ping", "POST"))
    ),
    _Operation(
        "/ready",
        "GET",
        "Whether it takes new requests",
        {_JSON: reply_schemas.ReadyReply},
        _PROBED,
        is_probe=True,
    ),
    _Operation("/metrics", "GET", "For Prometheus", {_TEXT: _STRING}, _KEYED),
    _Operation("/load", "GET", "Requests that are served now", {_JSON: reply_schemas.LoadReply}, _ALWAYS),
    _Operation("/version", "GET", "The version of Penstock", {_JSON: reply_schemas.VersionReply}, _ALWAYS),
    _Operation("/openapi.json", "GET", "This description", {_JSON: {"type": "object"}}, _ALWAYS),
    _Operation("/docs", "GET", "A page of it", {_HTML: _STRING}, _ALWAYS),
    _Operation("/", "GET", "A page with a chat, and a pool drawn beside it", {_HTML: _STRING}, (*_ALWAYS, 404)),
    _Operation("/page/{name}", "GET", "A part of that page", {_CSS: _STRING, _SCRIPT: _STRING}, (*_ALWAYS, 404)),
)
_REASONS = {
    401: "No API key, or not one of this gateway's",
    405: "Not by this method",
    408: "It did not come in time",
    409: "The key was used for another request, or another call follows this one",
    413: "The body is too large",
    415: "The body does not say that it is JSON",
    429: "Too much at once: `Retry-After` says when to come back",
    431: "Path and headers are too large",
    499: "Somebody cancelled it",
    503: "A part of the pipeline is away: `Retry-After` says when to come back",
    504: "Its time is over",
}


def describe() -> dict[str, Any]:
    """The whole description, in OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": __version__,
            "description": "OpenAI's API with vLLM's fields; docs/api.md says what each does. Null is its default.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas_of(_structs()),
            "securitySchemes": _KEYS,
        },
    }


def _structs() -> list[Any]:
    """Those of all bodies, answers and errors."""
    structs = [each.body for each in _OPERATIONS if each.body is not None]
    structs += [of for each in _OPERATIONS for of in each.replies.values() if not isinstance(of, dict)]
    return structs + [each.error for each in _OPERATIONS]


def _describe(operation: _Operation) -> dict[str, Any]:
    told: dict[str, Any] = {"summary": operation.summary, "operationId": _operation_id(operation)}
    if parameters := list(_parameters(operation)):
        told["parameters"] = parameters
    if operation.body is not None:
        content = {"schema": schema(operation.body), "example": _EXAMPLES[schema_name(operation.body.__name__)]}
        told["requestBody"] = {"required": True, "content": {_JSON: content}}
    replies = {kind: {"schema": schema(of)} if of else {} for kind, of in operation.replies.items()}
    told["responses"] = {"200": {"description": operation.summary, "content": replies}}
    for status in sorted(operation.statuses):
        content = {_JSON: {"schema": _error_schema(operation, status)}}
        if operation.is_probe and status == 503:
            content = replies
        told["responses"][str(status)] = {"description": _reason(status), "content": content}
    if 401 in operation.statuses:
        told["security"] = [{}, *({name: []} for name in _KEYS)]
    return told


def _error_schema(operation: _Operation, status: int) -> dict[str, Any]:
    """That of the route, or where an error is older than the knowledge of the route, OpenAI's."""
    own, general = schema(operation.error), schema(reply_schemas.ErrorReply)
    return {"anyOf": [own, general]} if status in _ALWAYS and own != general else own


def _operation_id(operation: _Operation) -> str:
    words = operation.path.replace("{", "").replace("}", "").replace(".", "_").strip("/").split("/")
    return "_".join((operation.method.lower(), *words))


def _parameters(operation: _Operation) -> Iterator[dict[str, Any]]:
    for part in operation.path.split("/"):
        if part.startswith("{"):
            name = part.strip("{}")
            yield {"name": name, "in": "path", "required": True, "schema": _PATHS[name]}
    for place, named in (("query", operation.queries), ("header", operation.headers)):
        for name, form, meaning in named:
            yield {"name": name, "in": place, "required": False, "schema": form, "description": meaning}


def _reason(status: int) -> str:
    if status in _REASONS:
        return _REASONS[status]
    codes = [code.name.lower() for code, kind in ERROR_KINDS.items() if kind.http_status == status and code]
    return f"Code {', '.join(codes)}"
