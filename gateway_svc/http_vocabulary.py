"""The HTTP calls that need a vocabulary and no model."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from contract.domain.errors import PenstockError
from contract.domain.request import format_request_id
from gateway_svc.core.anthropic.count import count_reply, parse_count, refused_count_field
from gateway_svc.core.apis import CHATS
from gateway_svc.core.ask import Ask
from gateway_svc.core.auth import Authenticator, Caller
from gateway_svc.core.field_names import in_words_of
from gateway_svc.core.openai import parse_chat
from gateway_svc.core.vocabulary import (
    DetokenizeAsk,
    TokenizeAsk,
    detokenize_reply,
    parse_detokenize,
    parse_tokenize,
    refused_vocabulary_field,
    render_reply,
    tokenize_reply,
)
from gateway_svc.http_calls import check_content_type, read_body
from gateway_svc.http_replies import ignored_fields_header
from gateway_svc.ignored_fields import IgnoredFields
from gateway_svc.intake import CLIENT_ID_HEADER, parse_client_id
from gateway_svc.large import off_loop
from gateway_svc.pool import Pool
from gateway_svc.pools import Pools

A = TypeVar("A", Ask, TokenizeAsk, DetokenizeAsk)
ROUTES = (
    ("/tokenize", "tokenize", ["POST"]),
    ("/detokenize", "detokenize", ["POST"]),
    ("/v1/chat/completions/render", "render", ["POST"]),
    ("/v1/messages/count_tokens", "count_tokens", ["POST"]),
)
_TOKEN_BYTES = 8  # about, of a token in a reply


@dataclass(frozen=True, slots=True)
class VocabularyCalls:
    """The handlers."""

    pools: Pools
    auth: Authenticator
    max_body_bytes: int
    strict_fields: bool
    ignored_fields: IgnoredFields

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""

        async def answer(_caller: Caller, pool: Pool, ask: TokenizeAsk) -> bytes:
            found = await pool.vocabulary.tokenize(ask)
            return await off_loop(_TOKEN_BYTES * len(found.token_ids), tokenize_reply, found)

        return await self._answer(request, parse_tokenize, refused_vocabulary_field, answer)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""

        async def answer(_caller: Caller, pool: Pool, ask: DetokenizeAsk) -> bytes:
            return detokenize_reply(await pool.vocabulary.detokenize(ask))

        return await self._answer(request, parse_detokenize, refused_vocabulary_field, answer)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""

        async def answer(_caller: Caller, pool: Pool, ask: TokenizeAsk) -> bytes:
            return count_reply(await pool.vocabulary.tokenize(ask))

        return await self._answer(
            request, lambda body: parse_count(body, self.pools.routes), refused_count_field, answer
        )

    async def render(self, request: Request) -> Response:
        """POST /v1/chat/completions/render."""

        async def answer(caller: Caller, pool: Pool, ask: Ask) -> bytes:
            (asked,) = pool.intake.requests(ask, caller)
            shown_id = parse_client_id(ask.client_id, "request_id")
            shown_id = shown_id or format_request_id(asked.header.request_id, pool.label)
            prepared = await pool.vocabulary.prepare(asked)
            size = _TOKEN_BYTES * len(prepared.token_ids)
            return await off_loop(size, render_reply, ask, asked, prepared, shown_id)

        return await self._answer(
            request,
            lambda body: parse_chat(body, self.pools.routes.defaults, self.pools.routes.formats),
            CHATS.refusal,
            answer,
        )

    async def _answer(
        self,
        request: Request,
        parse: Callable[[bytes], A],
        refusal_of: Callable[[A], PenstockError | None],
        answer: Callable[[Caller, Pool, A], Awaitable[bytes]],
    ) -> Response:
        caller = self.auth.authenticate(request.headers)
        check_content_type(request.headers)
        parse_client_id(request.headers.get(CLIENT_ID_HEADER))  # it is told with the reply
        body = await read_body(request, self.max_body_bytes)
        ask = await off_loop(len(body), parse, body)
        pool = self.pools.of_model(ask.model)
        pool.catalogue.find(ask.model)  # there must be one
        if self.strict_fields and (refusal := refusal_of(ask)) is not None:
            raise refusal
        with in_words_of(ask.names):
            told = await answer(caller, pool, ask)
        response = Response(told, media_type="application/json")
        if ask.ignored_fields:
            response.raw_headers.append(ignored_fields_header(ask.ignored_fields))
            self.ignored_fields.note(ask.ignored_fields)
        return response
