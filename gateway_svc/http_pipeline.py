"""The picture of a pool over HTTP."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from contract.domain.api_keys import CONTROL_TOKEN_HEADER
from contract.domain.errors import ErrorCode, PenstockError
from gateway_svc.core.auth import Authenticator
from gateway_svc.core.pipeline import pipeline_fields
from gateway_svc.http_replies import json_response
from gateway_svc.pool import Pool
from gateway_svc.pools import Pools
from gateway_svc.wire.pipeline import decode_services
from servicekit.tokens import TokenFile

ROUTES = (("/v1/pipeline", "pipeline", ["GET"]),)
_FRESH_S = 0.4  # one reading of a pool serves all pages that ask within this time


@dataclass(slots=True)
class _Reading:
    """The picture of one pool, read by one caller at a time."""

    fields: dict[str, Any] = field(default_factory=dict)
    read_s: float = float("-inf")  # monotonic
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def of(self, pool: Pool) -> dict[str, Any]:
        """The picture, read anew if it is old.

        Raises:
            PenstockError: UNAVAILABLE: the server does not answer.
        """
        async with self.lock:
            if time.monotonic() - self.read_s > _FRESH_S:
                reading = await pool.pipeline()
                self.fields = pipeline_fields(reading.pool, decode_services(reading), reading.lengths)
                self.read_s = time.monotonic()
            return self.fields


@dataclass(frozen=True, slots=True)
class PipelineCalls:
    """The handler."""

    pools: Pools
    auth: Authenticator
    control_token: TokenFile | None
    readings: dict[str, _Reading] = field(default_factory=dict)  # by pool

    async def pipeline(self, request: Request) -> Response:
        """GET /v1/pipeline: for operators, if there is a control token; else for every caller."""
        if self.control_token is None:
            self.auth.authenticate(request.headers)
        elif not self.control_token.admits(request.headers.get(CONTROL_TOKEN_HEADER)):
            raise PenstockError(
                ErrorCode.UNAUTHENTICATED,
                f"this is for who has the gateway's control token: send it as the header {CONTROL_TOKEN_HEADER}",
            )
        pool = self.pools.called(request.query_params.get("pool", ""))
        return json_response(await self.readings.setdefault(pool.name, _Reading()).of(pool))
