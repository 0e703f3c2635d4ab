"""OpenAI's HTTP API and what operators ask: health, readiness, metrics, version."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway_svc.call import Call, Sink
from gateway_svc.core.admission import RETRY_AFTER_S
from gateway_svc.core.auth import Door
from gateway_svc.core.event_ids import LAST_EVENT_ID, parse_event_id
from gateway_svc.core.idempotency import IDEMPOTENCY_KEY, check_key
from gateway_svc.core.models import Catalogue, ServedModel
from gateway_svc.core.openai import Ask, parse_chat, parse_completion
from gateway_svc.core.recollection import request_fields
from gateway_svc.core.replies import Reply, encode, error_fields
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.sse import SseFormat
from gateway_svc.core.stats import GatewayStats, Outcome
from gateway_svc.core.streams import SequenceState
from gateway_svc.delivery import Delivery
from gateway_svc.intake import (
    EVENT_IDS_HEADER,
    RESUMABLE_HEADER,
    TIMEOUT_HEADER,
    Intake,
    parse_switch,
    parse_timeout,
    too_large_error,
)
from gateway_svc.reception import Reception
from gateway_svc.sinks import ReplySink, SseSink, error_headers
from gateway_svc.turnstile import Turnstile
from penstock import __version__
from penstock.domain import request as domain
from penstock.domain.errors import ErrorCode, PenstockError
from penstock.domain.finish import CancelReason
from servicekit.bus.calls import RequestState
from servicekit.logs import is_debugging

_logger = structlog.stdlib.get_logger(__name__)
_STATES = {
    RequestState.PROMPT: "waiting",
    RequestState.READY: "waiting",
    RequestState.RUNNING: "running",
    RequestState.ENDED: "ended",
}
_SEND = "penstock.send"  # in a request's scope
_STATUS_CODES = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.INVALID_ARGUMENT}


class Vitals(Protocol):
    """What the service says of itself."""

    def trouble(self) -> str:
        """Why the gateway makes no progress; empty: it does."""
        ...

    def is_ready(self) -> bool:
        """Whether it takes new requests."""
        ...


@dataclass(frozen=True, slots=True)
class HttpApi:
    """The handlers."""

    delivery: Delivery
    reception: Reception
    intake: Intake
    auth: Door
    catalogue: Callable[[], Catalogue]
    vitals: Vitals
    stats: GatewayStats
    registry: CollectorRegistry
    max_body_bytes: int
    max_backlog_bytes: int
    sse_keep_alive_s: float
    all_resumable: bool
    turnstile: Turnstile = field(default_factory=Turnstile)

    def app(self) -> ASGIApp:
        """The ASGI application."""
        return _direct(
            self._starlette(), {"/v1/completions": self.completions, "/v1/chat/completions": self.chat_completions}
        )

    def _starlette(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/requests/{request_id}", self.request, methods=["GET"]),
            Route("/v1/requests/{request_id}", self.cancel, methods=["DELETE"]),
            Route("/v1/requests/{request_id}/events", self.events, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
        ]
        handlers: dict[Any, Any] = {PenstockError: _on_error, HTTPException: _on_http_exception}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        return await self._begin(request, parse_completion)

    async def chat_completions(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        return await self._begin(request, parse_chat)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        self.auth.authenticate(request.headers)
        return _json({"object": "list", "data": [_model_fields(model) for model in self.catalogue().models]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        self.auth.authenticate(request.headers)
        return _json(_model_fields(self.catalogue().find(request.path_params["name"])))

    async def request(self, request: Request) -> Response:
        """GET /v1/requests/{id}: where the request is and, for a while after its end, its reply or error."""
        caller = self.auth.authenticate(request.headers)
        found = await self.reception.recall(_request_id(request), caller.tenant)
        return _json(request_fields(found.form, _STATES[found.state], found.rows))

    async def events(self, request: Request) -> ASGIApp:
        """GET /v1/requests/{id}/events: the stream of a request behind `Last-Event-ID`, without it from its start."""
        caller = self.auth.authenticate(request.headers)
        form = await self.reception.form_of(_request_id(request), caller.tenant)
        last, have = request.headers.get(LAST_EVENT_ID), _nothing(form)
        if last is not None:
            have = parse_event_id(last, form.request_ids[0], form.num_choices)

        def begin(sink: Sink) -> Awaitable[Call]:
            return self.reception.resume(form, caller.tenant, sink, have)

        return _CallReply(self.delivery, form, begin, self._stream(have, with_ids=True))

    async def cancel(self, request: Request) -> Response:
        """DELETE /v1/requests/{id}: the request ends soon; its client gets an error that says so."""
        caller = self.auth.authenticate(request.headers)
        text = request.path_params["request_id"]
        if not await self.reception.cancel(_request_id(request), caller.tenant):
            raise PenstockError(ErrorCode.NOT_FOUND, f"there is no request {text}", param="request_id")
        return _json({"id": text, "object": "request", "cancelled": True})

    async def health(self, _request: Request) -> Response:
        """GET /health: whether the gateway makes progress, not only whether its process lives."""
        trouble = self.vitals.trouble()
        return _state({"status": "stalled" if trouble else "ok", "reason": trouble}, is_good=not trouble)

    async def ready(self, _request: Request) -> Response:
        """GET /ready: whether the gateway takes new requests."""
        ready = self.vitals.is_ready()
        return _state({"ready": ready}, is_good=ready)

    async def metrics(self, _request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(await asyncio.to_thread(generate_latest, self.registry), media_type=CONTENT_TYPE_LATEST)

    async def version(self, _request: Request) -> Response:
        """GET /version."""
        return _json({"version": __version__})

    async def _begin(self, request: Request, parse: Callable[[bytes], Ask]) -> ASGIApp:
        try:
            caller = self.auth.authenticate(request.headers)
            self.reception.expect()
            timeout_s = parse_timeout(request.headers.get(TIMEOUT_HEADER))
            resumable = parse_switch(RESUMABLE_HEADER, request.headers.get(RESUMABLE_HEADER))
            with_ids = parse_switch(EVENT_IDS_HEADER, request.headers.get(EVENT_IDS_HEADER))
            key = request.headers.get(IDEMPOTENCY_KEY)
            key = None if key is None else check_key(key)
            body = await read_body(request, self.max_body_bytes)
            await self.turnstile.enter()
            ask = parse(body)
            requests = self.intake.requests(
                ask.prompts,
                ask.params,
                model=ask.model,
                tenant=caller.tenant,
                priority=caller.priority(ask.priority),
                traceparent=request.headers.get("traceparent", ""),
                timeout_s=timeout_s,
                idempotency_key=key,
            )
            form = _form_of(ask, requests)
            if key is not None:
                form = await self.reception.agreed(form, caller.tenant)
            if resumable or ask.is_resumable or key is not None or self.all_resumable:
                form = replace(form, is_resumable=True)
        except PenstockError:
            self.stats.outcomes[Outcome.REJECTED] += 1
            raise
        if is_debugging():
            _logger.debug(
                "request",
                request_id=domain.format_request_id(requests[0].header.request_id),
                client_request_id=request.headers.get("x-request-id", "")[:64],
                num_requests=len(requests),
                ignored_fields=ask.ignored_fields,
            )

        def begin(sink: Sink) -> Awaitable[Call]:
            return self.reception.open(requests, form, sink, is_idempotent=key is not None)

        stream = None
        if ask.stream:
            with_ids = with_ids or form.is_resumable
            stream = self._stream(_nothing(form), with_ids=with_ids)
        return _CallReply(self.delivery, form, begin, stream)

    def _stream(self, have: Sequence[SequenceState], *, with_ids: bool) -> "_Stream":
        return _Stream(have, self.max_backlog_bytes, self.sse_keep_alive_s, with_ids)


def _direct(app: ASGIApp, posted: Mapping[str, Callable[[Request], Awaitable[ASGIApp]]]) -> ASGIApp:
    """Calls who answers a POST to some paths at once: Starlette's way there takes longer than most of what they do.

    The server's own `send` is kept for event streams: to pass through what Starlette puts around it takes each event
    longer than to be made.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SEND] = send
        answer = posted.get(scope["path"]) if scope.get("method") == "POST" else None
        if answer is None:
            await app(scope, receive, send)
            return
        try:
            reply = await answer(Request(scope, receive))
        except PenstockError as error:
            reply = error_response(error)
        await reply(scope, receive, send)

    return called


@dataclass(frozen=True, slots=True)
class _Stream:
    """How a call is streamed."""

    have: Sequence[SequenceState]  # what the client has of each choice
    max_backlog_bytes: int
    keep_alive_s: float
    with_ids: bool  # of events


class _CallReply:
    """Serves one call. All of its bytes are written by who reads the text stream; here only the client is watched."""

    def __init__(
        self,
        delivery: Delivery,
        form: ReplyForm,
        begin: Callable[[Sink], Awaitable[Call]],
        stream: _Stream | None,
    ) -> None:
        """A reply that is not begun; without a stream it is a plain one."""
        self._delivery = delivery
        self._form = form
        self._begin = begin
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form, stream = self._form, self._stream
        headers = [(b"x-request-id", domain.format_request_id(form.request_ids[0]).encode())]
        sink: SseSink | ReplySink
        if stream is None:
            sink = ReplySink(send, Reply(form.head), form.n, headers)
        else:
            sse = SseFormat(form.head, form.request_ids[0], stream.have, with_ids=stream.with_ids)
            sink = SseSink(scope[_SEND], sse, form.n, headers, stream.max_backlog_bytes)
        try:
            call = await self._begin(sink)
        except PenstockError as error:
            await error_response(error, headers)(scope, receive, send)
            return
        if isinstance(sink, SseSink) and stream is not None:
            sink.refill = lambda: self._delivery.refill(call)
            sink.keep_alive(stream.keep_alive_s)
        # Comes when the client has left, and when the reply is complete.
        while (await receive())["type"] != "http.disconnect":
            pass
        if isinstance(sink, SseSink):
            sink.close()
        self._delivery.close(call, CancelReason.CLIENT)


def _form_of(ask: Ask, requests: Sequence[domain.Request]) -> ReplyForm:
    first = requests[0]
    return ReplyForm(
        request_ids=tuple(each.header.request_id for each in requests),
        n=ask.params.n,
        form=ask.form,
        model=first.model,
        arrival_ns=first.header.arrival_ns,
        deadline_ns=first.header.deadline_ns,
        seed=first.header.seed,
        wants_logprobs=ask.params.logprobs is not None,
        tokens_as_ids=ask.tokens_as_ids,
        include_usage=ask.include_usage,
        continuous_usage=ask.continuous_usage,
    )


def _nothing(form: ReplyForm) -> list[SequenceState]:
    return [SequenceState() for _ in range(form.num_choices)]


def _request_id(request: Request) -> bytes:
    return domain.parse_request_id(request.path_params["request_id"])


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        PenstockError: REQUEST_TOO_LARGE, before more than that was read.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large_error(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise too_large_error(max_bytes)
        parts.append(part)
    return b"".join(parts)


def error_response(error: PenstockError, headers: list[tuple[bytes, bytes]] | None = None) -> Response:
    """An error with its status and OpenAI's body."""
    response = Response(encode(error_fields(error)), status_code=error.kind.http_status)
    response.raw_headers = [*response.raw_headers, *error_headers(error), *(headers or [])]
    if error.code is ErrorCode.REQUEST_TOO_LARGE:
        # The rest of the body is not read.
        response.raw_headers.append((b"connection", b"close"))
    return response


async def _on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _STATUS_CODES.get(error.status_code, ErrorCode.INVALID_ARGUMENT)
    response = error_response(PenstockError(code, f"{request.method} {request.url.path}: {error.detail}"))
    response.status_code = error.status_code
    return response


def _json(fields: dict[str, Any], status: int = 200) -> Response:
    return Response(encode(fields), status_code=status, media_type="application/json")


def _state(fields: dict[str, Any], *, is_good: bool) -> Response:
    response = _json(fields, 200 if is_good else 503)
    if not is_good:
        response.headers["retry-after"] = str(math.ceil(RETRY_AFTER_S))
    return response


def _model_fields(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "penstock",
        "max_model_len": model.max_model_len or None,
    }
