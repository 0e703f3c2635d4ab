"""OpenAI's HTTP API and what operators ask: health, readiness, metrics, version."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import structlog
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from contract import __version__
from contract.domain import request as domain
from contract.domain.errors import ErrorCode, PenstockError
from gateway_svc import http_description, http_page, http_pipeline, http_vocabulary
from gateway_svc.call import ClientCall, Sink
from gateway_svc.call_pacer import CallPacer
from gateway_svc.core.api import Api
from gateway_svc.core.apis import APIS, api_of
from gateway_svc.core.auth import Authenticator
from gateway_svc.core.event_ids import LAST_EVENT_ID, parse_event_id
from gateway_svc.core.idempotency import IDEMPOTENCY_KEY, check_key
from gateway_svc.core.pooled.apis import no_stream
from gateway_svc.core.recollection import request_fields
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.stats import GatewayStats, Outcome
from gateway_svc.core.streams import DeliveredSequence
from gateway_svc.core.timeline import Passage, timeline_fields
from gateway_svc.http_calls import (
    CallReply,
    Stream,
    check_content_type,
    direct,
    id_headers,
    nothing,
    read_body,
)
from gateway_svc.http_description import DescriptionCalls
from gateway_svc.http_page import PageCalls
from gateway_svc.http_pipeline import PipelineCalls
from gateway_svc.http_replies import (
    IGNORED_FIELDS_HEADER,
    HttpError,
    ignored_fields_header,
    json_response,
    model_fields,
    on_error,
    on_http_exception,
    state_response,
)
from gateway_svc.http_vocabulary import VocabularyCalls
from gateway_svc.ignored_fields import IgnoredFields
from gateway_svc.intake import (
    CLIENT_ID_HEADER,
    EVENT_IDS_HEADER,
    RESUMABLE_HEADER,
    TIMEOUT_HEADER,
    parse_client_id,
    parse_switch,
    parse_timeout,
)
from gateway_svc.large import off_loop
from gateway_svc.pool import Pool
from gateway_svc.pools import Pools
from gateway_svc.prompt_outputs import read_prompts
from gateway_svc.told_prompts import with_prompts
from servicekit.bus.calls import RequestState
from servicekit.logs import is_debugging
from servicekit.metrics import bearer, metrics_page
from servicekit.tokens import TokenFile

_logger = structlog.stdlib.get_logger(__name__)
_STATES = {
    RequestState.PROMPT: "waiting",
    RequestState.READY: "waiting",
    RequestState.RUNNING: "running",
    RequestState.ENDED: "ended",
}
# Path, handler and methods. What two methods are for is one route: where neither is meant, `Allow` names both.
_ROUTES = (
    ("/v1/models", "models", ["GET"]),
    ("/v1/models/{name:path}", "model", ["GET"]),
    ("/v1/requests/{request_id}", "request", ["GET", "DELETE"]),
    ("/v1/requests/{request_id}/events", "events", ["GET"]),
    ("/v1/requests/{request_id}/timeline", "timeline", ["GET"]),
    ("/health", "health", ["GET"]),
    ("/ping", "ping", ["GET", "POST"]),
    ("/ready", "ready", ["GET"]),
    ("/metrics", "metrics", ["GET"]),
    ("/load", "load", ["GET"]),
    ("/version", "version", ["GET"]),
)
_CALLS = tuple((path, api.form.value, ["POST"]) for api in APIS for path in api.paths)
ROUTES = (
    *_CALLS,
    *_ROUTES,
    *http_vocabulary.ROUTES,
    *http_pipeline.ROUTES,
    *http_description.ROUTES,
    *http_page.ROUTES,
)
# Of replies, for pages of other origins.
_EXPOSED = (
    *("x-penstock-request-id", CLIENT_ID_HEADER, IGNORED_FIELDS_HEADER.decode()),
    *("retry-after", "x-should-retry"),
)


class GatewayHealth(Protocol):
    """The status that the service tells."""

    def trouble(self) -> str:
        """The reason why the gateway makes no progress; empty: it does."""
        ...

    def is_ready(self) -> bool:
        """Return whether it takes new requests."""
        ...


@dataclass(frozen=True, slots=True)
class HttpApi:
    """The handlers."""

    pools: Pools
    auth: Authenticator
    vitals: GatewayHealth
    stats: GatewayStats
    registry: CollectorRegistry
    max_body_bytes: int
    max_backlog_bytes: int
    sse_keep_alive_s: float
    strict_fields: bool
    cors_origins: Sequence[str]
    all_resumable: bool
    has_page: bool = True
    metrics_token: TokenFile | None = None
    control_token: TokenFile | None = None
    pacer: CallPacer = field(default_factory=CallPacer)
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)

    def app(self) -> ASGIApp:
        """The ASGI application."""
        posted = {path: partial(self._begin, api) for api in APIS for path in api.paths}
        app = direct(self._starlette(), posted)
        if not self.cors_origins:
            return app
        # Around all of it; only what browsers send from pages of other origins passes through it.
        return CORSMiddleware(
            app,
            allow_origins=self.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )

    def _starlette(self) -> Starlette:
        vocabulary = VocabularyCalls(
            self.pools, self.auth, self.max_body_bytes, self.strict_fields, self.ignored_fields
        )
        parts = (
            (self, _ROUTES),
            (vocabulary, http_vocabulary.ROUTES),
            (PipelineCalls(self.pools, self.auth, self.control_token), http_pipeline.ROUTES),
            (DescriptionCalls(), http_description.ROUTES),
            (PageCalls(), http_page.ROUTES if self.has_page else ()),
        )
        routes = [
            Route(path, getattr(part, handler), methods=methods)
            for part, table in parts
            for path, handler, methods in table
        ]
        # What is posted there does not come so far: this says by which method it must.
        routes += [Route(path, partial(self._begin, api), methods=["POST"]) for api in APIS for path in api.paths]
        handlers: dict[Any, Any] = {PenstockError: on_error, HTTPException: on_http_exception}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        self.auth.authenticate(request.headers)
        data = [model_fields(model, offer.catalogue.told_defaults) for model, offer in self.pools.routes.models]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        self.auth.authenticate(request.headers)
        name = request.path_params["name"]
        served = self.pools.routes.find(name).catalogue
        return json_response(model_fields(served.find(name), served.told_defaults))

    async def request(self, request: Request) -> Response:
        """GET /v1/requests/{id}: where the request is and, for a while after its end, its reply or error.

        DELETE: it ends soon, and its client gets an error that says so, unless it has ended already.
        """
        caller = self.auth.authenticate(request.headers)
        pool, request_id = self._asked(request)
        if request.method == "DELETE":
            return await self._cancel(request.path_params["request_id"], pool, request_id, caller.tenant)
        found = await pool.reception.recall(request_id, caller.tenant)
        rows = found.rows()
        prompts = await read_prompts(pool.prompt_reader(found.form), found.form, rows)
        return json_response(request_fields(found.form, _STATES[found.state], rows, prompts))

    async def timeline(self, request: Request) -> Response:
        """GET /v1/requests/{id}/timeline: what happened to the request when; all of it once it has ended."""
        caller = self.auth.authenticate(request.headers)
        pool, request_id = self._asked(request)
        found = await pool.reception.recall(request_id, caller.tenant)
        passages = [
            Passage(each, _STATES[known.state], timeline, known.delivered_ns)
            for (each, known), timeline in zip(found.requests, found.timelines(), strict=True)
        ]
        return json_response(timeline_fields(found.form, _STATES[found.state], passages))

    async def events(self, request: Request) -> ASGIApp:
        """GET /v1/requests/{id}/events: the stream of a request after `Last-Event-ID`, without it from its start."""
        if request.method == "HEAD":  # a look must not take the stream from who follows it
            raise HttpError(405, "an event stream cannot be asked for its head alone", headers={"allow": "GET"})
        caller = self.auth.authenticate(request.headers)
        client_id = parse_client_id(request.headers.get(CLIENT_ID_HEADER))
        pool, request_id = self._asked(request)
        form = await pool.reception.form_of(request_id, caller.tenant)
        if form.form.is_pooled:
            raise no_stream(form.form)
        last, have = request.headers.get(LAST_EVENT_ID), nothing(form)
        if last is not None:
            is_numbered = api_of(form.form).numbers_events
            have = parse_event_id(last, form.request_ids[0], form.num_choices, is_numbered=is_numbered)
        if is_debugging():
            first = domain.format_request_id(form.request_ids[0])
            _logger.debug("resumed", request_id=first, client_request_id=client_id)

        def begin(sink: Sink) -> Awaitable[ClientCall]:
            return pool.reception.resume(form, caller.tenant, sink, have, client_id=client_id)

        headers = id_headers(form, client_id)
        told = partial(pool.told_prompts, form=form)
        return CallReply(pool.delivery, form, begin, self._stream(have, with_ids=True), headers, told=told)

    async def health(self, _request: Request) -> Response:
        """GET /health: whether the gateway makes progress, not only whether its process lives."""
        trouble = self.vitals.trouble()
        return state_response({"status": "stalled" if trouble else "ok", "reason": trouble}, is_good=not trouble)

    async def ping(self, request: Request) -> Response:
        """GET and POST /ping: as `/health`, where SageMaker looks."""
        return await self.health(request)

    async def load(self, _request: Request) -> Response:
        """GET /load: the requests that this gateway serves now, as vLLM tells them."""
        return json_response({"server_load": sum(pool.stats.num_streams for pool in self.pools.all)})

    async def ready(self, _request: Request) -> Response:
        """GET /ready: whether the gateway takes new requests."""
        ready = self.vitals.is_ready()
        return state_response({"ready": ready}, is_good=ready)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        token = self.metrics_token
        if token is not None and not token.admits(bearer(request.headers.get("authorization"))):
            raise PenstockError(ErrorCode.UNAUTHENTICATED, "/metrics asks for its token: `Authorization: Bearer TOKEN`")
        page, content_type = await asyncio.to_thread(metrics_page, self.registry, request.headers.get("accept", ""))
        # As a header, since Starlette would say a second charset.
        return Response(page, headers={"content-type": content_type})

    async def version(self, _request: Request) -> Response:
        """GET /version."""
        return json_response({"version": __version__})

    async def _cancel(self, text: str, pool: Pool, request_id: bytes, tenant: str) -> Response:
        if await pool.reception.has_ended(request_id, tenant):
            return json_response({"id": text, "object": "request", "cancelled": False, "state": "ended"})
        if not await pool.reception.cancel(request_id, tenant):
            raise PenstockError(ErrorCode.NOT_FOUND, f"there is no request {text}", param="request_id")
        return json_response({"id": text, "object": "request", "cancelled": True})

    async def _begin(self, api: Api, request: Request) -> ASGIApp:
        try:
            caller = self.auth.authenticate(request.headers)
            check_content_type(request.headers)
            self.pools.expect()
            client_id = parse_client_id(request.headers.get(CLIENT_ID_HEADER))
            timeout_s = parse_timeout(request.headers.get(TIMEOUT_HEADER))
            resumable = parse_switch(RESUMABLE_HEADER, request.headers.get(RESUMABLE_HEADER))
            with_ids = parse_switch(EVENT_IDS_HEADER, request.headers.get(EVENT_IDS_HEADER))
            key = request.headers.get(IDEMPOTENCY_KEY)
            key = None if key is None else check_key(key)
            body = await read_body(request, self.max_body_bytes)
            await self.pacer.enter()
            ask = await off_loop(len(body), api.parse, body, self.pools.routes)
            client_id = client_id or parse_client_id(ask.client_id, "request_id")
            pool = self.pools.of_model(ask.model)
            if self.strict_fields and (refusal := api.refusal(ask)) is not None:
                raise refusal
            traceparent = request.headers.get("traceparent", "")
            requests = pool.intake.requests(
                ask, caller, traceparent=traceparent, timeout_s=timeout_s, idempotency_key=key
            )
            form = ReplyForm.of(ask, requests, pool.label)
            if key is not None:
                form = await pool.reception.agreed(form, caller.tenant)
            form = await with_prompts(pool.vocabulary, form, requests, echo=ask.echo)
            if resumable or ask.is_resumable or key is not None or self.all_resumable:
                form = replace(form, is_resumable=True)
        except PenstockError:
            self.stats.outcomes[Outcome.REJECTED] += 1
            raise
        if is_debugging():
            _logger.debug(
                "request",
                request_id=domain.format_request_id(requests[0].header.request_id),
                client_request_id=client_id,
                num_requests=len(requests),
            )
        headers = id_headers(form, client_id)
        if ask.ignored_fields:
            headers.append(ignored_fields_header(ask.ignored_fields))
            self.ignored_fields.note(ask.ignored_fields)

        def begin(sink: Sink) -> Awaitable[ClientCall]:
            return pool.reception.open(
                requests, form, sink, is_idempotent=key is not None, client_id=client_id, limits=caller.limits
            )

        stream = None
        if ask.stream:
            stream = self._stream(nothing(form), with_ids=with_ids or form.is_resumable)
        return CallReply(pool.delivery, form, begin, stream, headers, told=partial(pool.told_prompts, form=form))

    def _stream(self, have: Sequence[DeliveredSequence], *, with_ids: bool) -> Stream:
        return Stream(have, self.max_backlog_bytes, self.sse_keep_alive_s, with_ids)

    def _asked(self, request: Request) -> tuple[Pool, bytes]:
        return self.pools.of_request(request.path_params["request_id"])
