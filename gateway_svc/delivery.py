"""Requests being served: submitted once, their text handed to clients exactly once, cancelled when nobody listens."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import structlog

from gateway_svc import wire
from gateway_svc.call import PROBE_S, Call, Served, Sink
from gateway_svc.core.admission import Limits, admit
from gateway_svc.core.stats import GatewayStats, Outcome
from gateway_svc.core.streams import ClientStream, Refusal
from gateway_svc.link import Link
from gateway_svc.outbox import Outbox
from penstock.domain.errors import ErrorCode, Fault, PenstockError
from penstock.domain.finish import CancelReason, FinishReason
from penstock.domain.request import Request, format_request_id
from penstock.domain.rows import TextRow
from servicekit.bus.calls import Attachment, Bounds

MAX_PROBE_S = 60.0
ATTACH_ANSWER_S = 1.0  # how long the text of a re-attachment is waited for before asking again
_GONE = (FinishReason.CANCELLED, FinishReason.ERROR)
_logger = structlog.stdlib.get_logger(__name__)


class Delivery:
    """All calls of a gateway. Lives in one event loop."""

    def __init__(self, link: Link, limits: Limits, bounds: Bounds, stats: GatewayStats) -> None:
        self._link = link
        self._limits = limits
        self._stats = stats
        self._served: dict[bytes, Served] = {}
        self.outbox = Outbox(link, bounds, self._attached)
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
                mean_stream_s=self._stats.request.mean_s,
            )
            self._register(call)
            refusal = await self.outbox.submit(requests)
        except PenstockError:
            self._stats.outcomes[Outcome.REJECTED] += len(requests)
            self._withdraw(call)
            raise
        except BaseException:
            self._stats.outcomes[Outcome.CANCELLED] += len(requests)
            self._withdraw(call)
            raise
        if refusal is not None:
            self._stats.outcomes[Outcome.REJECTED] += len(requests)
            self._forget(call)
            raise refusal
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

    def refill(self, call: Call) -> None:
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
        return await self.outbox.cancel(ids, tenant)

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

    async def wait_idle(self) -> None:
        """Returns when nothing is being served."""
        await self._idle.wait()

    def fail_all(self, error: PenstockError, reason: CancelReason) -> None:
        """Ends every call."""
        for served in list(self._served.values()):
            self.fail(served.call, error, reason)

    def _register(self, call: Call) -> None:
        for served in call.served:
            self._served[served.request_id] = served
        self._stats.num_streams = len(self._served)
        self._idle.clear()

    def _withdraw(self, call: Call) -> None:
        """What may have been submitted of a call that is not accepted is cancelled: a lost answer may be a yes."""
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
            call.sink.take(served.prompt, taken, served.stream.sequences[taken.sequence].chain)

    def _take_end(self, served: Served, row: TextRow, now_s: float) -> None:
        call = served.call
        if row.finish in _GONE:
            self.fail(call, _error_of(row), CancelReason.CLIENT)
            return
        chain = served.stream.sequences[row.sequence].chain
        if not served.stream.ended:
            # A stored result names the request's usage with every sample.
            call.sink.take(served.prompt, replace(row, usage=None), chain)
            return
        call.sink.take(served.prompt, row, chain)
        served.usage = row.usage or served.usage
        self._stats.outcomes[_outcome_of_stream(served.stream)] += 1
        self._stats.request.observe(now_s - call.accepted_s)
        self._drop(served)
        call.num_open -= 1
        if call.num_open == 0:
            self._forget(call)
            call.sink.end([each.usage for each in call.served])

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
        self.outbox.attach_later(served)

    def _expire(self, call: Call) -> None:
        error = PenstockError(ErrorCode.DEADLINE_EXCEEDED, "the request's time is over")
        self.fail(call, error, CancelReason.DEADLINE)

    def _cancel_open(self, call: Call, reason: CancelReason) -> None:
        for served in call.served:
            if not served.stream.ended:
                self.outbox.cancel_later(served.request_id, call.tenant, reason)

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
