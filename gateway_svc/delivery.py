"""Requests being served: submitted once, their text handed to clients exactly once, cancelled when nobody listens."""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import structlog

from gateway_svc import wire
from gateway_svc.core.admission import Limits, admit
from gateway_svc.core.stats import GatewayStats, Outcome
from gateway_svc.core.streams import ClientStream, Refusal
from gateway_svc.link import Link
from penstock.domain.errors import ErrorCode, Fault, PenstockError
from penstock.domain.finish import CancelReason, FinishReason
from penstock.domain.request import Request, format_request_id
from penstock.domain.rows import TextRow
from servicekit.bus.calls import Attach, Attachment, Cancel, Submit, SubmitOutcome
from servicekit.bus.calls import Call as BusCall
from servicekit.bus.interface import BusFull, BusUnavailable

PROBE_S = 2.0  # a request that is silent for so long asks again for its text, then half as often each time
MAX_PROBE_S = 60.0
ATTACH_ANSWER_S = 1.0  # how long the text of a re-attachment is waited for before asking again
RETRY_S = 0.2
_GONE = (FinishReason.CANCELLED, FinishReason.ERROR)
_logger = structlog.stdlib.get_logger(__name__)


class Sink(Protocol):
    """Where the text of a call goes. Nothing here waits, and nothing is called after `fail` or the last row."""

    @property
    def has_room(self) -> bool:
        """Whether a row can be taken; if not, `Delivery.resume` is called when it can."""
        ...

    def take(self, prompt: int, row: TextRow) -> None:
        """The next row of the prompt with this index."""
        ...

    def end(self) -> None:
        """All requests of the call have ended; the last row was taken."""
        ...

    def fail(self, error: PenstockError) -> None:
        """The call ends with an error."""
        ...


class Served:
    """One request of a call."""

    __slots__ = ("call", "is_behind", "last_s", "next_attach_s", "probe_s", "prompt", "request_id", "stream")

    def __init__(self, call: "Call", prompt: int, request: Request) -> None:
        self.call = call
        self.prompt = prompt
        self.request_id = request.header.request_id
        self.stream = ClientStream(request.params.n)
        self.is_behind = False  # the client is slow and rows were let go
        self.last_s = 0.0  # when tokens last came
        self.next_attach_s = 0.0
        self.probe_s = PROBE_S


class Call:
    """What one client asked for: one request, or one for each of its prompts."""

    __slots__ = ("accepted_s", "deadline", "is_over", "is_submitted", "num_open", "served", "sink", "tenant")

    def __init__(self, requests: Sequence[Request], sink: Sink, now_s: float) -> None:
        self.sink = sink
        self.tenant = requests[0].header.tenant
        self.served = [Served(self, prompt, request) for prompt, request in enumerate(requests)]
        self.num_open = len(requests)
        self.accepted_s = now_s
        self.is_submitted = False
        self.is_over = False
        self.deadline: asyncio.TimerHandle | None = None


class Delivery:
    """All calls of a gateway. Lives in one event loop."""

    def __init__(self, link: Link, limits: Limits, max_waiting: int, stats: GatewayStats) -> None:
        self._link = link
        self._limits = limits
        self._max_waiting = max_waiting
        self._stats = stats
        self._served: dict[bytes, Served] = {}
        self._cancels: dict[bytes, Cancel] = {}
        self._attaches: dict[bytes, Served] = {}
        self._outbox = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def num_streams(self) -> int:
        """Requests being served."""
        return len(self._served)

    async def open(self, requests: Sequence[Request], sink: Sink) -> Call:
        """Submits the requests of one call; from now on `sink` gets their text.

        Raises:
            PenstockError: not accepted; nothing will come.
        """
        loop = asyncio.get_running_loop()
        call = Call(requests, sink, loop.time())
        try:
            admit(
                self._limits,
                num_streams=len(self._served),
                num_new=len(requests),
                draining=self.draining,
                connected=self._link.connected,
            )
            self._register(call)
            await self._submit(requests)
        except PenstockError:
            self._stats.outcomes[Outcome.REJECTED] += len(requests)
            self._withdraw(call)
            raise
        except BaseException:
            self._stats.outcomes[Outcome.CANCELLED] += len(requests)
            self._withdraw(call)
            raise
        call.is_submitted = True
        deadline_ns = requests[0].header.deadline_ns
        if deadline_ns and not call.is_over:
            call.deadline = loop.call_later(max(0.0, (deadline_ns - time.time_ns()) * 1e-9), self._expire, call)
        return call

    def deliver(self, rows: Sequence[TextRow], now_s: float) -> None:
        """Hands rows of the text stream to their clients."""
        stats = self._stats
        for row in rows:
            served = self._served.get(row.request_id)
            if served is None:
                stats.num_stray_rows += 1
                continue
            try:
                self._take(served, row, now_s)
            except Exception:
                # One client's reply must not take the others with it.
                _logger.exception("delivery failed", request_id=format_request_id(row.request_id))
                self._break(served.call)

    def close(self, call: Call, reason: CancelReason) -> None:
        """Nobody listens any more: what has not ended is cancelled."""
        if not call.is_over:
            self._stats.outcomes[Outcome.CANCELLED] += call.num_open
            self._cancel_open(call, reason)
            self._forget(call)

    def fail(self, call: Call, error: PenstockError, reason: CancelReason | None = None) -> None:
        """Ends a call with an error; with a reason, what goes on in the pipeline is cancelled."""
        if call.is_over:
            return
        self._stats.outcomes[_outcome_of(error)] += call.num_open
        if reason is not None:
            self._cancel_open(call, reason)
        self._forget(call)
        call.sink.fail(error)

    def resume(self, call: Call) -> None:
        """The sink of a call has room again."""
        for served in call.served:
            if served.is_behind:
                served.is_behind = False
                self._want_attach(served, 0.0)

    async def cancel(self, request_id: bytes, tenant: str) -> bool:
        """A client asks for the end of a request, and of those submitted with it; whether there is such a request.

        Raises:
            PenstockError: UNAVAILABLE: the server does not answer, or is out of memory.
        """
        served = self._served.get(request_id)
        ids = [request_id]
        if served is not None and served.call.tenant == tenant:
            ids = [each.request_id for each in served.call.served]
        if not self._link.connected:
            raise _unavailable()
        now_ns = time.time_ns()
        calls = [Cancel(each, int(CancelReason.CLIENT), now_ns, tenant) for each in ids]
        try:
            known: list[bool] = await self._link.execute(calls)
        except BusUnavailable as error:
            raise _unavailable() from error
        except BusFull as error:
            raise _full() from error
        return any(known)

    def attach_all(self) -> None:
        """The route changed, or the server may have lost text: every client's text is asked for again."""
        for served in self._served.values():
            if served.call.is_submitted and not served.is_behind:
                self._want_attach(served, 0.0)

    def probe(self, now_s: float) -> None:
        """Asks for the text of requests that have been silent for long: what was lost without a trace comes again."""
        for served in self._served.values():
            quiet_s = now_s - max(served.last_s, served.call.accepted_s, served.next_attach_s)
            if quiet_s > served.probe_s and served.call.is_submitted and not served.is_behind:
                served.probe_s = min(2 * served.probe_s, MAX_PROBE_S)
                self._want_attach(served, now_s)

    async def run_outbox(self) -> None:
        """Sends cancels and re-attachments for ever; while the server is away they wait."""
        while True:
            await self._outbox.wait()
            await self._link.wait_connected()
            self._outbox.clear()
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
                self._outbox.set()
                await asyncio.sleep(RETRY_S)
                continue
            for served, answer in zip(attaches, answers[len(cancels) :], strict=True):
                self._attached(served, answer)

    async def wait_idle(self) -> None:
        """Returns when nothing is being served."""
        await self._idle.wait()

    def fail_all(self, error: PenstockError, reason: CancelReason) -> None:
        """Ends every call."""
        for served in list(self._served.values()):
            self.fail(served.call, error, reason)

    async def flush(self) -> None:
        """Sends the cancels that wait; the last thing before the link closes."""
        cancels, self._cancels = self._cancels, {}
        if cancels and self._link.connected:
            try:
                await self._link.execute(list(cancels.values()))
            except (BusUnavailable, BusFull) as error:
                _logger.warning("cancels were not sent: %s", error, num_requests=len(cancels))

    def _register(self, call: Call) -> None:
        for served in call.served:
            self._served[served.request_id] = served
        self._stats.num_streams = len(self._served)
        self._idle.clear()

    async def _submit(self, requests: Sequence[Request]) -> None:
        now_ns = time.time_ns()
        calls = []
        for request in requests:
            header, body = wire.encode_header(request.header), wire.encode_request(request)
            digest = hashlib.blake2b(body, digest_size=16).digest()
            request_id, tenant = request.header.request_id, request.header.tenant
            calls.append(Submit(request_id, tenant, header, body, digest, self._link.sid, now_ns, self._max_waiting))
        try:
            outcomes: list[SubmitOutcome] = await self._link.execute(calls)
        except BusUnavailable as error:
            raise _unavailable() from error
        except BusFull as error:
            raise _full() from error
        for outcome in outcomes:
            if outcome is SubmitOutcome.OVERLOADED:
                raise PenstockError(
                    ErrorCode.OVERLOADED,
                    f"{self._max_waiting} requests wait already; send the request again later",
                )
            if outcome is SubmitOutcome.OUT_OF_MEMORY:
                raise _full()
            if outcome is SubmitOutcome.CONFLICT:
                raise PenstockError(ErrorCode.IDEMPOTENCY_CONFLICT, "another request has this id; send it again")

    def _withdraw(self, call: Call) -> None:
        """What was submitted of a call that is not accepted is cancelled; a lost answer may have been a yes."""
        if call.served[0].request_id in self._served:
            self._cancel_open(call, CancelReason.CLIENT)
        self._forget(call)

    def _take(self, served: Served, row: TextRow, now_s: float) -> None:
        call, stats = served.call, self._stats
        if not call.sink.has_room:
            if not served.is_behind:
                served.is_behind = True
                stats.num_lagging += 1
            return
        if served.is_behind:
            return
        taken = served.stream.accept(row)
        if isinstance(taken, Refusal):
            if taken is Refusal.KNOWN:
                stats.num_known_rows += 1
            else:
                stats.num_behind_rows += 1
                self._want_attach(served, now_s)
            return
        stats.num_rows += 1
        num_tokens = len(taken.token_ids)
        if num_tokens:
            stats.num_tokens += num_tokens
            if served.last_s:
                stats.inter_token.observe((now_s - served.last_s) / num_tokens)
            else:
                stats.time_to_first_token.observe(now_s - call.accepted_s)
            served.last_s = now_s
            served.probe_s = PROBE_S
        if taken.finish:
            self._take_end(served, taken, now_s)
        else:
            call.sink.take(served.prompt, taken)

    def _take_end(self, served: Served, row: TextRow, now_s: float) -> None:
        call = served.call
        if row.finish in _GONE:
            self.fail(call, _error_of(row), CancelReason.CLIENT)
            return
        if not served.stream.ended:
            # A stored result names the request's usage with every sample.
            call.sink.take(served.prompt, replace(row, usage=None))
            return
        call.sink.take(served.prompt, row)
        self._stats.outcomes[_outcome_of_stream(served.stream)] += 1
        self._stats.request.observe(now_s - call.accepted_s)
        self._drop(served)
        call.num_open -= 1
        if call.num_open == 0:
            self._forget(call)
            call.sink.end()

    def _break(self, call: Call) -> None:
        """Ends a call whose reply could not be written, if need be without a word."""
        error = PenstockError(ErrorCode.INTERNAL, "the gateway failed to write this reply; see its log")
        try:
            self.fail(call, error, CancelReason.CLIENT)
        except Exception:
            _logger.exception("a client was not told of a failure")

    def _attached(self, served: Served, answer: Attachment) -> None:
        self._stats.num_attaches += 1
        call = served.call
        if call.is_over or served.request_id not in self._served:
            return
        if not answer.known:
            lost = PenstockError(
                ErrorCode.UNAVAILABLE,
                "the pipeline does not know this request any more: the server lost it, or its result has expired; "
                "send it again",
            )
            self.fail(call, lost)
        elif answer.result is not None:
            self._take_result(served, answer.result)

    def _take_result(self, served: Served, result: bytes) -> None:
        """The request had ended: the rest is in its result."""
        try:
            rows = wire.decode_finished(served.request_id, result)
        except wire.PoisonMessageError as error:
            self.fail(served.call, PenstockError(ErrorCode.INTERNAL, f"the result cannot be read: {error}"))
            return
        self.deliver(rows, asyncio.get_running_loop().time())
        if served.request_id in self._served and not served.is_behind:
            diverged = PenstockError(
                ErrorCode.STREAM_DIVERGED,
                "the result does not extend what was delivered: the server lost writes; send the request anew",
            )
            self.fail(served.call, diverged)

    def _want_attach(self, served: Served, now_s: float) -> None:
        if now_s and now_s < served.next_attach_s:
            return
        served.next_attach_s = asyncio.get_running_loop().time() + ATTACH_ANSWER_S
        self._attaches[served.request_id] = served
        self._outbox.set()

    def _expire(self, call: Call) -> None:
        error = PenstockError(ErrorCode.DEADLINE_EXCEEDED, "the request's time is over")
        self.fail(call, error, CancelReason.DEADLINE)

    def _cancel_open(self, call: Call, reason: CancelReason) -> None:
        now_ns = time.time_ns()
        for served in call.served:
            if not served.stream.ended:
                self._cancels[served.request_id] = Cancel(served.request_id, int(reason), now_ns, call.tenant)
        self._outbox.set()

    def _forget(self, call: Call) -> None:
        call.is_over = True
        if call.deadline is not None:
            call.deadline.cancel()
        for served in call.served:
            self._drop(served)

    def _drop(self, served: Served) -> None:
        if self._served.pop(served.request_id, None) is not None:
            _logger.debug(
                "served",
                request_id=format_request_id(served.request_id),
                num_tokens=[sequence.num_tokens for sequence in served.stream.sequences],
                finish=[sequence.finish.name for sequence in served.stream.sequences],
            )
        self._stats.num_streams = len(self._served)
        if not self._served:
            self._idle.set()


def _unavailable() -> PenstockError:
    return PenstockError(
        ErrorCode.UNAVAILABLE, "the gateway cannot reach its Redis server at the moment; send the request again"
    )


def _full() -> PenstockError:
    return PenstockError(ErrorCode.UNAVAILABLE, "the Redis server is short of memory; send the request again later")


def _error_of(row: TextRow) -> PenstockError:
    if row.error is not None:
        return row.error.raised()
    if row.finish is FinishReason.CANCELLED:
        return PenstockError(ErrorCode.CANCELLED, "the request was cancelled")
    return PenstockError(ErrorCode.INTERNAL, "the request ended with an error that says nothing")


def _outcome_of(error: PenstockError) -> Outcome:
    if error.code in (ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED):
        return Outcome.CANCELLED
    return Outcome.REJECTED if error.fault is Fault.CALLER else Outcome.ERROR


def _outcome_of_stream(stream: ClientStream) -> Outcome:
    reasons = {state.finish for state in stream.sequences}
    return Outcome.LENGTH if FinishReason.LENGTH in reasons else Outcome.STOP
