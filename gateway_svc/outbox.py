"""What a gateway tells the bus: submits and wanted cancels at once, all else once the server is there."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from gateway_svc import wire
from gateway_svc.call import Served
from gateway_svc.core.admission import retry_after_s
from gateway_svc.core.idempotency import IDEMPOTENCY_KEY
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.large import off_loop
from gateway_svc.link import Link
from gateway_svc.witness import Witness
from penstock.domain.errors import ErrorCode, PenstockError
from penstock.domain.finish import CancelReason
from penstock.domain.request import Request
from servicekit.bus.calls import (
    Attach,
    Attachment,
    Bounds,
    Cancel,
    Fetch,
    Overload,
    Recall,
    Recalled,
    Settling,
    StoredRequest,
    Submit,
    SubmitOutcome,
)
from servicekit.bus.calls import Call as BusCall
from servicekit.bus.interface import BusFull, BusUnavailable

RETRY_S = 0.2
ASKING = 4  # calls of clients that the server is asked for at once: whatever others ask waits behind all of them
BYTES_PER_TOKEN = 4  # of a text that nobody has tokenized yet, roughly
_logger = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of a call's requests; indices are those of its prompts."""

    created: list[int]
    existing: list[int]  # submitted before, by the same idempotency key
    refusal: PenstockError | None  # why the others were not taken
    submissions: list[Submit]  # by prompt


class Outbox:
    """Each request has at most one cancel and one re-attachment waiting here."""

    def __init__(
        self,
        link: Link,
        bounds: Bounds,
        attached: Callable[[Served, Attachment], None],
        witness: Witness,
        patience_s: float,
    ) -> None:
        """Sends nothing before `run`.

        Args:
            link: what it is sent over.
            bounds: how much may wait in the whole pool.
            attached: is told what a re-attachment found.
            witness: is told which cancels were sent.
            patience_s: for so long a submit waits for a server that is away.
        """
        self._link = link
        self._bounds = bounds
        # Who is nobody's tenant is bound by the pool alone.
        self._bounds_of_nobody = replace(bounds, tenant_requests=0, tenant_tokens=0)
        self._attached = attached
        self._witness = witness
        self._patience_s = patience_s
        self._cancels: dict[bytes, Cancel] = {}
        self._attaches: dict[bytes, Served] = {}
        self._woken = asyncio.Event()
        self._asking = asyncio.Semaphore(ASKING)

    async def submit(self, requests: Sequence[Request], form: ReplyForm) -> Submitted:
        """Gives the requests of one call to the pipeline.

        Raises:
            PenstockError: it is not known which of them were taken.
        """
        calls = await off_loop(_num_bytes(requests), self._submissions, requests, form)
        outcomes: list[SubmitOutcome | Overload] = await self._ask_patiently(calls)
        return Submitted(
            [prompt for prompt, outcome in enumerate(outcomes) if outcome is SubmitOutcome.CREATED],
            [prompt for prompt, outcome in enumerate(outcomes) if outcome is SubmitOutcome.EXISTS],
            next((error for outcome in outcomes if (error := self._refusal(outcome))), None),
            calls,
        )

    def _submissions(self, requests: Sequence[Request], form: ReplyForm) -> list[Submit]:
        return [self._submission(request, form) for request in requests]

    def _submission(self, request: Request, form: ReplyForm) -> Submit:
        header, body, token_ids = request.header, wire.encode_request(request), request.prompt.token_ids
        bounds = self._bounds if header.tenant else self._bounds_of_nobody
        return Submit(
            header.request_id,
            header.tenant,
            wire.encode_header(header),
            body,
            _digest(form, body),
            self._link.sid,
            time.time_ns(),
            num_tokens=len(body) // BYTES_PER_TOKEN if token_ids is None else len(token_ids),
            deadline_ns=header.deadline_ns,
            bounds=bounds,
            reply=wire.encode_reply_form(form if header.request_id == form.request_ids[0] else form.of_another),
        )

    def _refusal(self, outcome: SubmitOutcome | Overload) -> PenstockError | None:
        match outcome:
            case Overload():
                return _overloaded(outcome, self._bounds)
            case SubmitOutcome.OUT_OF_MEMORY:
                return _full()
            case SubmitOutcome.CONFLICT:
                return PenstockError(
                    ErrorCode.IDEMPOTENCY_CONFLICT,
                    "the idempotency key was used for another request: send this one with a key of its own",
                    param=IDEMPOTENCY_KEY,
                )
        return None

    async def attach(self, several: Sequence[Served]) -> None:
        """Routes requests here, whoever has them, and tells what that found.

        Raises:
            PenstockError: UNAVAILABLE: the server does not answer, or is out of memory.
        """
        await self._link.back_within(self._patience_s)
        route = self._link.sid  # may be another one after an outage
        calls: list[BusCall[Any]] = [_attach(each, route) for each in several]
        answers = await self._ask([*calls, *(Fetch(each.request_id) for each in several)])
        for served, stored in zip(several, answers[len(calls) :], strict=True):
            if stored is not None and stored.body:
                served.submission = served.submission or _submitted(served, stored)
        self._tell(several, answers[: len(calls)], route)

    async def count_prompts(self, request_ids: Sequence[bytes]) -> list[int]:
        """Tokens of the requests' prompts; 0: a request has none yet, or has ended, and then its result says it.

        Raises:
            PenstockError: UNAVAILABLE: the server does not answer.
        """
        found: list[StoredRequest | None] = await self._ask_patiently([Fetch(each) for each in request_ids])
        return [0 if stored is None else wire.count_prompt_tokens(stored.meta) for stored in found]

    async def recall(self, request_ids: Sequence[bytes], tenant: str) -> list[Recalled | None]:
        """What the pool keeps of requests; None: not known, or another tenant's.

        Raises:
            PenstockError: UNAVAILABLE: the server does not answer, or was restarted and does not know so far.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._patience_s
        while True:
            found: list[Recalled | Settling | None] = await self._ask_patiently(
                [Recall(each, tenant) for each in request_ids]
            )
            if not any(isinstance(each, Settling) for each in found):
                return [each for each in found if not isinstance(each, Settling)]
            if loop.time() > until_s:
                raise _unavailable()
            await asyncio.sleep(RETRY_S)

    async def cancel(self, request_ids: Sequence[bytes], tenant: str) -> bool:
        """Asks for the end of requests; whether there is one of them.

        Raises:
            PenstockError: UNAVAILABLE: the server does not answer, or is out of memory.
        """
        now_ns = time.time_ns()
        cancels = [Cancel(each, int(CancelReason.CLIENT), now_ns, tenant) for each in request_ids]
        known: list[bool] = await self._ask(cancels)
        self._witness.cancel(cancels)
        return any(known)

    def cancel_later(self, served: Served, reason: CancelReason, *, anywhere: bool = False) -> None:
        """The request ends once the server is there, unless another gateway has it by then; or `anywhere`."""
        route = b"" if anywhere else served.route
        cancel = Cancel(served.request_id, int(reason), time.time_ns(), served.call.tenant, route=route)
        self._cancels[served.request_id] = cancel
        self._witness.give_up(served)
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
                *(_attach(each, route) for each in attaches),
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
            self._witness.cancel(cancels.values())
            self._tell(attaches, answers[len(cancels) :], route)

    async def flush(self) -> None:
        """Sends the cancels that wait; the last thing before the link closes."""
        cancels, self._cancels = self._cancels, {}
        if cancels and self._link.connected:
            try:
                await self._link.execute(list(cancels.values()))
            except (BusUnavailable, BusFull) as error:
                _logger.warning("cancels were not sent: %s", error, num_requests=len(cancels))

    def _tell(self, several: Sequence[Served], answers: Sequence[Attachment], route: bytes) -> None:
        for served, answer in zip(several, answers, strict=True):
            if answer.known and not answer.is_elsewhere:
                served.route, served.is_taken = route, True
            self._attached(served, answer)

    async def _ask_patiently(self, calls: Sequence[BusCall[Any]]) -> list[Any]:
        """As `_ask`, and again when a server that went away is back in time: these may be sent twice."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._patience_s
        while await self._link.back_within(until_s - loop.time()):
            async with self._asking:
                if not self._link.connected:
                    continue
                try:
                    return await self._link.execute(calls)
                except BusUnavailable as error:
                    _logger.info("submitting again: %s", error)
                except BusFull as error:
                    raise _full() from error
        raise _unavailable()

    async def _ask(self, calls: Sequence[BusCall[Any]]) -> list[Any]:
        if not self._link.connected:
            raise _unavailable()
        try:
            return await self._link.execute(calls)
        except BusUnavailable as error:
            raise _unavailable() from error
        except BusFull as error:
            raise _full() from error


def _digest(form: ReplyForm, body: bytes) -> bytes:
    """What makes two submits the same: a call with another number of prompts is another call."""
    return hashlib.blake2b(b"%d:" % len(form.request_ids) + body, digest_size=16).digest()


def _submitted(served: Served, stored: StoredRequest) -> Submit:
    """How a request was submitted that came here by an attachment, so that it can be told to a restarted server."""
    form = served.call.form
    return Submit(
        served.request_id,
        stored.tenant,
        stored.header,
        stored.body,
        _digest(form, stored.body),
        served.route,
        0,
        deadline_ns=form.deadline_ns,
        reply=wire.encode_reply_form(form),
    )


def _attach(served: Served, route: bytes) -> Attach:
    held = served.route if served.is_taken else b""
    return Attach(served.request_id, served.call.tenant, route, wire.encode_offsets(served.stream.offsets()), held)


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


def _num_bytes(requests: Sequence[Request]) -> int:
    """Of their prompts, roughly."""
    prompts = [each.prompt for each in requests]
    return sum(
        len(each.text or "")
        + BYTES_PER_TOKEN * len(each.token_ids or ())
        + sum(len(message.content or "") for message in each.messages or ())
        for each in prompts
    )
