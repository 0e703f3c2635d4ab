"""What a gateway tells the bus: submits and wanted cancels at once, all else once the server is there."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import structlog

from gateway_svc import wire
from gateway_svc.call import Served
from gateway_svc.core.admission import retry_after_s
from gateway_svc.link import Link
from penstock.domain.errors import ErrorCode, PenstockError
from penstock.domain.finish import CancelReason
from penstock.domain.request import Request
from servicekit.bus.calls import Attach, Attachment, Bounds, Cancel, Overload, Submit, SubmitOutcome
from servicekit.bus.calls import Call as BusCall
from servicekit.bus.interface import BusFull, BusUnavailable

RETRY_S = 0.2
BYTES_PER_TOKEN = 4  # of a text that nobody has tokenized yet, roughly
_logger = structlog.stdlib.get_logger(__name__)


class Outbox:
    """Each request has at most one cancel and one re-attachment waiting here."""

    def __init__(self, link: Link, bounds: Bounds, attached: Callable[[Served, Attachment], None]) -> None:
        """Sends nothing before `run`.

        Args:
            link: what it is sent over.
            bounds: how much may wait in the whole pool.
            attached: is told what a re-attachment found.
        """
        self._link = link
        self._bounds = bounds
        self._attached = attached
        self._cancels: dict[bytes, Cancel] = {}
        self._attaches: dict[bytes, Served] = {}
        self._woken = asyncio.Event()

    async def submit(self, requests: Sequence[Request]) -> PenstockError | None:
        """Gives requests to the pipeline: all of them or, what was refused says the answer, none.

        Raises:
            PenstockError: it is not known which of them were taken.
        """
        calls = [self._submission(request) for request in requests]
        outcomes: list[SubmitOutcome | Overload] = await self._ask(calls)
        refusal = next((error for outcome in outcomes if (error := self._refusal(outcome))), None)
        if refusal is not None:
            for request, outcome in zip(requests, outcomes, strict=True):
                if outcome is SubmitOutcome.CREATED:
                    self.cancel_later(request.header.request_id, request.header.tenant, CancelReason.CLIENT)
        return refusal

    def _submission(self, request: Request) -> Submit:
        header, body, token_ids = request.header, wire.encode_request(request), request.prompt.token_ids
        # Who is nobody's tenant is bound by the pool alone.
        bounds = self._bounds if header.tenant else replace(self._bounds, tenant_requests=0, tenant_tokens=0)
        return Submit(
            header.request_id,
            header.tenant,
            wire.encode_header(header),
            body,
            hashlib.blake2b(body, digest_size=16).digest(),
            self._link.sid,
            time.time_ns(),
            num_tokens=len(body) // BYTES_PER_TOKEN if token_ids is None else len(token_ids),
            deadline_ns=header.deadline_ns,
            bounds=bounds,
        )

    def _refusal(self, outcome: SubmitOutcome | Overload) -> PenstockError | None:
        match outcome:
            case Overload():
                return _overloaded(outcome, self._bounds)
            case SubmitOutcome.OUT_OF_MEMORY:
                return _full()
            case SubmitOutcome.CONFLICT:
                return PenstockError(ErrorCode.IDEMPOTENCY_CONFLICT, "another request has this id; send it again")
        return None

    async def cancel(self, request_ids: Sequence[bytes], tenant: str) -> bool:
        """Asks for the end of requests; whether there is one of them.

        Raises:
            PenstockError: UNAVAILABLE: the server does not answer, or is out of memory.
        """
        if not self._link.connected:
            raise _unavailable()
        now_ns = time.time_ns()
        known: list[bool] = await self._ask(
            [Cancel(each, int(CancelReason.CLIENT), now_ns, tenant) for each in request_ids]
        )
        return any(known)

    def cancel_later(self, request_id: bytes, tenant: str, reason: CancelReason) -> None:
        """The request ends once the server is there."""
        self._cancels[request_id] = Cancel(request_id, int(reason), time.time_ns(), tenant)
        self._woken.set()

    def attach_later(self, served: Served) -> None:
        """The text behind what the client has by then is asked for once the server is there."""
        self._attaches[served.request_id] = served
        self._woken.set()

    async def run(self) -> None:
        """Sends cancels and re-attachments for ever; while the server is away they wait."""
        while True:
            await self._woken.wait()
            await self._link.wait_connected()
            self._woken.clear()
            cancels, self._cancels = self._cancels, {}
            attaches = [served for served in self._attaches.values() if not served.call.is_over]
            self._attaches = {}
            route = self._link.sid
            calls: list[BusCall[Any]] = [
                *cancels.values(),
                *(
                    Attach(each.request_id, each.call.tenant, route, wire.encode_offsets(each.stream.offsets()))
                    for each in attaches
                ),
            ]
            if not calls:
                continue
            try:
                answers = await self._link.execute(calls)
            except (BusUnavailable, BusFull):
                self._cancels = {**cancels, **self._cancels}
                self._attaches = {each.request_id: each for each in attaches} | self._attaches
                self._woken.set()
                await asyncio.sleep(RETRY_S)
                continue
            for served, answer in zip(attaches, answers[len(cancels) :], strict=True):
                self._attached(served, answer)

    async def flush(self) -> None:
        """Sends the cancels that wait; the last thing before the link closes."""
        cancels, self._cancels = self._cancels, {}
        if cancels and self._link.connected:
            try:
                await self._link.execute(list(cancels.values()))
            except (BusUnavailable, BusFull) as error:
                _logger.warning("cancels were not sent: %s", error, num_requests=len(cancels))

    async def _ask(self, calls: Sequence[BusCall[Any]]) -> list[Any]:
        try:
            return await self._link.execute(calls)
        except BusUnavailable as error:
            raise _unavailable() from error
        except BusFull as error:
            raise _full() from error


def _overloaded(overload: Overload, bounds: Bounds) -> PenstockError:
    if overload.of_tenant:
        whose, num_requests, num_tokens = " of yours", bounds.tenant_requests, bounds.tenant_tokens
    else:
        whose, num_requests, num_tokens = "", bounds.requests, bounds.tokens
    what = f"prompts{whose} of {num_tokens} tokens" if overload.of_tokens else f"{num_requests} requests{whose}"
    return PenstockError(
        ErrorCode.OVERLOADED,
        f"{what} may wait, and do; send the request again later",
        retry_after_s=retry_after_s(overload.wait_ms / 1000),
    )


def _unavailable() -> PenstockError:
    return PenstockError(
        ErrorCode.UNAVAILABLE, "the gateway cannot reach its Redis server at the moment; send the request again"
    )


def _full() -> PenstockError:
    return PenstockError(ErrorCode.UNAVAILABLE, "the Redis server is short of memory; send the request again later")
