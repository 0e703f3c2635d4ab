"""Messages of a gateway to the bus: submits and wanted cancels at once, all else once the server is there."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import CancelReason
from contract.domain.request import Prompt, Request
from gateway_svc import wire
from gateway_svc.call import Served
from gateway_svc.core.admission import retry_after_s
from gateway_svc.core.auth import KeyLimits
from gateway_svc.core.idempotency import IDEMPOTENCY_KEY
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.large import off_loop
from gateway_svc.limits import metered, over_limit
from gateway_svc.link import Link
from gateway_svc.witness import Witness
from servicekit.bus.calls import (
    Attach,
    Attachment,
    Bounds,
    Cancel,
    Delivered,
    Fetch,
    Metered,
    OverLimit,
    Overload,
    ReadPromptOutput,
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
DELIVERED_S = 0.1  # for so long ends are gathered: nobody waits to hear that they were delivered
MANY = 64  # of them in one call: none may keep the server busy for long
ASKING = 4  # calls of clients that the server is asked for at once: whatever others ask waits after all of them
BYTES_PER_TOKEN = 4  # of a text that nobody has tokenized yet, roughly
_logger = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Submitted:
    """The outcome of a call's requests; indices are those of its prompts."""

    created: list[int]
    existing: list[int]  # submitted before, by the same idempotency key
    refusal: PenstockError | None  # why the others were not taken
    submissions: list[Submit]  # by prompt


class RequestOutbox:
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
        self._delivered: dict[bytes, int] = {}  # when clients had all of them, Unix time in nanoseconds
        self._woken = asyncio.Event()
        self._asking = asyncio.Semaphore(ASKING)

    async def submit(
        self, requests: Sequence[Request], form: ReplyForm, came_ms: int, limits: KeyLimits | None = None
    ) -> Submitted:
        """Gives the requests of one call to the pipeline.

        Args:
            requests: by prompt.
            form: how they are answered.
            came_ms: when their client came, by the server's clock.
            limits: of the key that the call came with.

        Raises:
            PenstockError: it is not known which of them were taken; INVALID_ARGUMENT: they are more than the key may
                have at once.
        """
        calls = await off_loop(num_bytes(requests), self._submissions, requests, form, came_ms)
        if limits is not None:
            calls = metered(calls, requests, limits)
        outcomes: list[SubmitOutcome | Overload | OverLimit] = await self._ask_patiently(calls)
        return Submitted(
            [prompt for prompt, outcome in enumerate(outcomes) if outcome is SubmitOutcome.CREATED],
            [prompt for prompt, outcome in enumerate(outcomes) if outcome is SubmitOutcome.EXISTS],
            next((error for outcome in outcomes if (error := self._refusal(outcome, limits))), None),
            calls,
        )

    def _submissions(self, requests: Sequence[Request], form: ReplyForm, came_ms: int) -> list[Submit]:
        return [self._submission(request, form, came_ms) for request in requests]

    def _submission(self, request: Request, form: ReplyForm, came_ms: int) -> Submit:
        header, token_ids = request.header, request.prompt.token_ids
        body, prompt = wire.encode_request(request), wire.encode_prompt(request.prompt)
        bounds = self._bounds if header.tenant else self._bounds_of_nobody
        return Submit(
            header.request_id,
            header.tenant,
            wire.encode_header(header),
            body,
            _digest(form, body + prompt),
            self._link.sid,
            time.time_ns(),
            num_tokens=len(prompt) // BYTES_PER_TOKEN if token_ids is None else len(token_ids),
            deadline_ns=header.deadline_ns,
            bounds=bounds,
            prompt=prompt,
            reply=wire.encode_reply_form(form if header.request_id == form.request_ids[0] else form.of_another),
            routed_ms=came_ms,
        )

    def _refusal(self, outcome: SubmitOutcome | Overload | OverLimit, limits: KeyLimits | None) -> PenstockError | None:
        match outcome:
            case OverLimit() if limits is not None:
                return over_limit(outcome, limits)
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
                # Not as this gateway would have submitted it: defaults may have changed since.
                served.submission = _submitted(served, stored)
        self._tell(several, answers[: len(calls)], route)

    async def count_prompts(self, request_ids: Sequence[bytes]) -> list[int]:
        """Tokens of the requests' prompts; 0: a request has none yet, or has ended, and then its result says it.

        Raises:
            PenstockError: UNAVAILABLE: the server does not answer.
        """
        found: list[StoredRequest | None] = await self._ask_patiently([Fetch(each) for each in request_ids])
        return [0 if stored is None else wire.count_prompt_tokens(stored.meta) for stored in found]

    async def recall(self, request_ids: Sequence[bytes], tenant: str) -> list[Recalled | None]:
        """Ask what the pool keeps of requests; None: not known, or another tenant's.

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

    async def read_prompt_output(self, request_id: bytes, model_digest: bytes) -> bytes | None:
        """What a worker kept of a request's prompt; None: nothing is there (any more).

        Raises:
            PenstockError: UNAVAILABLE: the server does not answer.
        """
        (found,) = await self._ask_patiently([ReadPromptOutput(request_id, model_digest)])
        payload: bytes | None = found
        return payload

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
        """The text after what the client has by then is asked for once the server is there."""
        self._attaches[served.request_id] = served
        self._woken.set()

    def delivered_later(self, served: Served) -> None:
        """The client of a request has all of it; told once the server is there, of several together."""
        if not self._delivered:
            asyncio.get_running_loop().call_later(DELIVERED_S, self._woken.set)
        self._delivered.setdefault(served.request_id, time.time_ns())

    async def run(self) -> None:
        """Sends cancels, re-attachments and what was delivered for ever; while the server is away they wait."""
        while True:
            await self._woken.wait()
            await self._link.wait_connected()
            self._woken.clear()
            cancels, self._cancels = self._cancels, {}
            attaches = [served for served in self._attaches.values() if not served.call.is_over]
            self._attaches = {}
            delivered, self._delivered = self._delivered, {}
            route = self._link.sid
            calls: list[BusCall[Any]] = [
                *cancels.values(),
                *(_attach(each, route) for each in attaches),
                *_delivered(delivered),
            ]
            if not calls:
                continue
            try:
                answers = await self._link.execute(calls)
            except (BusUnavailable, BusFull):
                self._cancels = {**cancels, **self._cancels}
                self._attaches = {each.request_id: each for each in attaches} | self._attaches
                self._delivered = self._delivered | delivered
                self._woken.set()
                await asyncio.sleep(RETRY_S)
                continue
            self._witness.cancel(cancels.values())
            self._tell(attaches, answers[len(cancels) : len(cancels) + len(attaches)], route)

    async def flush(self) -> None:
        """Sends the cancels that wait, and what was delivered; the last thing before the link closes."""
        cancels, self._cancels = self._cancels, {}
        delivered, self._delivered = self._delivered, {}
        calls: list[BusCall[Any]] = [*cancels.values(), *_delivered(delivered)]
        if calls and self._link.connected:
            try:
                await self._link.execute(calls)
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
    """The hash that makes two submits the same: a call with another number of prompts is another call.

    With an idempotency key, what was asked: defaults that have changed since make no other call of it.
    """
    return form.asked or hashlib.blake2b(b"%d:" % len(form.request_ids) + body, digest_size=16).digest()


def _submitted(served: Served, stored: StoredRequest) -> Submit:
    """The submission of a request that came here by an attachment, so that a restarted server can be told of it."""
    form = served.call.form
    return Submit(
        served.request_id,
        stored.tenant,
        stored.header,
        stored.body,
        _digest(form, stored.body + stored.prompt),
        served.route,
        0,
        deadline_ns=form.deadline_ns,
        reply=wire.encode_reply_form(form),
        prompt=stored.prompt,
        metered=Metered(form.api_key, served.request_id) if form.api_key else None,
    )


def _attach(served: Served, route: bytes) -> Attach:
    held = served.route if served.is_taken else b""
    offsets = wire.encode_offsets(served.offsets())
    return Attach(served.request_id, served.call.tenant, route, offsets, held, served.call.came_ms)


def _delivered(delivered: Mapping[bytes, int]) -> list[Delivered]:
    several = tuple(delivered.items())
    return [Delivered(several[first : first + MANY]) for first in range(0, len(several), MANY)]


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


def num_bytes(requests: Sequence[Request]) -> int:
    """Of their prompts, roughly."""
    return sum(prompt_bytes(each.prompt) for each in requests)


def prompt_bytes(prompt: Prompt) -> int:
    """Of one prompt, roughly."""
    return (
        len(prompt.text or "")
        + sum(map(len, prompt.pair or ()))
        + BYTES_PER_TOKEN * len(prompt.token_ids or ())
        + sum(len(message.content or "") for message in prompt.messages or ())
    )
