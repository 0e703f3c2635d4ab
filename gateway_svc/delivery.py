"""Requests being served: submitted once, their text handed to clients exactly once, cancelled when nobody listens."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import structlog

from contract.domain.errors import ErrorCode, Fault, PenstockError, PoisonMessageError
from contract.domain.finish import CancelReason, FinishReason, Usage
from contract.domain.request import format_request_id
from contract.domain.rows import TextRow
from gateway_svc import wire
from gateway_svc.call import PROBE_S, ClientCall, NoClient, Served
from gateway_svc.core.admission import Crowd
from gateway_svc.core.stats import GatewayStats, Outcome
from gateway_svc.core.streams import ClientStream, Refusal, error_of
from gateway_svc.link import Link
from gateway_svc.outbox import RETRY_S, RequestOutbox
from gateway_svc.witness import Witness
from servicekit.bus.calls import Attachment, Bounds
from servicekit.logs import is_debugging

MAX_PROBE_S = 60.0
ATTACH_ANSWER_S = 1.0  # how long the text of a re-attachment is waited for before asking again
_logger = structlog.stdlib.get_logger(__name__)


class Delivery:
    """All calls of a gateway in one pool. Lives in one event loop."""

    def __init__(
        self,
        link: Link,
        bounds: Bounds,
        *,
        resume_grace_s: float,
        outage_patience_s: float,
        stats: GatewayStats,
        crowd: Crowd,
    ) -> None:
        """Serves nobody yet.

        Args:
            link: what is sent over.
            bounds: how much may wait in the pool.
            resume_grace_s: for so long a resumable call waits for its client to come back.
            outage_patience_s: for so long a submit waits for a server that is away.
            stats: where is counted.
            crowd: for whom the gateway serves, which this adds to.
        """
        self._stats = stats
        self._resume_grace_s = resume_grace_s
        self._detached: set[ClientCall] = set()
        self._served: dict[bytes, Served] = {}
        self._crowd = crowd
        self._witness = Witness(lambda: link.heard_s)
        self.outbox = RequestOutbox(link, bounds, self._attached, self._witness, outage_patience_s)
        link.restart_calls = lambda: self._witness.restart_calls(self._served.values(), link.sid)
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def register(self, several: Sequence[Served]) -> None:
        """From now on their sinks get their text; who followed one of them until now is let go."""
        for served in several:
            before = self._served.get(served.request_id)
            if before is not None and before.call is not served.call:
                served.stream.remember(before.stream)
                served.submission = served.submission or before.submission
                self._let_go(before.call)
            if not self._is_served(served):
                self._crowd.enter(served.call.tenant)
            self._served[served.request_id] = served
        self._stats.num_streams = len(self._served)
        self._idle.clear()

    def follow(self, call: ClientCall, several: Sequence[Served]) -> bool:
        """As `register`, unless the client of one of them has come here again meanwhile: then `call` is let go."""
        followed = [before.call for each in several if (before := self.find(each.request_id)) is not None]
        if any(each.accepted_s > call.accepted_s for each in followed):
            self._let_go(call)
            return False
        self.register(several)
        return True

    def find(self, request_id: bytes) -> Served | None:
        """The request, if it is served here."""
        return self._served.get(request_id)

    def deliver(self, rows: Sequence[TextRow], now_s: float) -> None:
        """Hands rows of the text stream to their clients: those that begin a sample which goes on before all others.

        First tokens are waited for, stand at the end of a step, and to write to a hundred streams takes milliseconds.
        """
        stats = self._stats
        for row in sorted(rows, key=_goes_on):
            served = self._served.get(row.request_id)
            if served is None:
                stats.num_unknown_rows += 1
                continue
            try:
                if row.num_prompt_tokens and not served.num_prompt_tokens:
                    if not any(each.num_tokens for each in served.stream.sequences):  # else it was counted before
                        stats.of_tenant(served.call.tenant).num_prompt += row.num_prompt_tokens
                    self.learn(served, row.num_prompt_tokens)
                if not served.model_digest and row.model_digest:
                    served.model_digest = row.model_digest
                    served.call.sink.learn_model(served.prompt, row.model_digest)
                self._take(served, row, now_s)
            except Exception:
                # One client's reply must not take the others with it.
                _logger.exception("delivery failed", request_id=format_request_id(row.request_id))
                self._break(served.call)

    def learn(self, served: Served, num_prompt_tokens: int) -> None:
        """Take the number of tokens of a request's prompt, for clients that are told with every chunk."""
        served.num_prompt_tokens = num_prompt_tokens
        served.call.sink.learn(served.prompt, num_prompt_tokens)

    def close(self, call: ClientCall, reason: CancelReason) -> None:
        """Nobody listens any more: what has not ended is cancelled, at once or when its client had time to return."""
        if call.is_over:
            return
        if call.form.is_resumable and reason is CancelReason.CLIENT:
            self.detach(call)
        else:
            self._give_up(call, reason)

    def detach(self, call: ClientCall) -> None:
        """A call goes on without its client for as long as the grace lasts."""
        if call.is_over:
            return
        call.sink = NoClient()
        if self.draining:
            # When this gateway has left, the detokenizers wait as long as for one that died.
            self.forget(call)
            return
        self._detached.add(call)
        self._stats.num_detached = len(self._detached)
        loop = asyncio.get_running_loop()
        call.grace = loop.call_later(self._resume_grace_s, self._give_up, call, CancelReason.CLIENT)
        self.refill(call)

    def fail(self, call: ClientCall, error: PenstockError, reason: CancelReason | None = None) -> None:
        """Ends a call with an error; with a reason, what goes on in the pipeline is cancelled."""
        if call.is_over:
            return
        self._stats.outcomes[_outcome_of(error)] += call.num_open
        if reason is not None:
            self._cancel_open(call, reason)
        self.forget(call)
        call.sink.fail(error)

    def refill(self, call: ClientCall) -> None:
        """The sink of a call has room again."""
        for served in call.served:
            if served.is_behind:
                served.is_behind = False
                self._want_attach(served, 0.0)

    def ask_again(self, request_id: bytes) -> None:
        """Another gateway may have taken a request."""
        served = self._served.get(request_id)
        if served is not None and served.call.is_submitted:
            self._want_attach(served, 0.0)

    def attach_all(self) -> None:
        """The route changed, or the server may have lost text: every client's text is asked for again."""
        for served in self._served.values():
            if served.call.is_submitted and not served.is_behind:
                self._want_attach(served, 0.0)

    def probe(self, now_s: float) -> None:
        """Asks for the text of requests that have been silent for long: what was lost without a trace comes again."""
        self._witness.forget()
        for served in self._served.values():
            quiet_s = now_s - max(served.last_s, served.call.accepted_s, served.next_attach_s)
            if quiet_s > served.probe_s and served.call.is_submitted and not served.is_behind:
                served.probe_s = min(2 * served.probe_s, MAX_PROBE_S)
                self._want_attach(served, now_s)

    async def wait_idle(self) -> None:
        """Returns when nothing is being served."""
        await self._idle.wait()

    def drain(self) -> None:
        """No new calls are to come. Nobody waits here for clients that are gone: they come back to another gateway."""
        self.draining = True
        for call in list(self._detached):
            self.forget(call)

    def fail_all(self, error: PenstockError, reason: CancelReason) -> None:
        """Ends every call; the requests of those that can go on through another gateway are left to it."""
        for served in list(self._served.values()):
            self.fail(served.call, error, None if served.call.form.is_resumable else reason)

    def _take(self, served: Served, row: TextRow, now_s: float) -> None:
        call, stats = served.call, self._stats
        if not call.sink.has_room:
            if not served.is_behind:
                served.is_behind = True
                stats.num_slow_clients += 1
            return
        if served.is_behind:
            return
        taken = served.accept(row)
        if isinstance(taken, Refusal):
            if taken is Refusal.KNOWN:
                stats.num_duplicate_rows += 1
            elif taken is Refusal.DIVERGED:
                self._diverge(served)
            else:
                stats.num_gap_rows += 1
                self._want_attach(served, now_s)
            return
        stats.num_rows += 1
        num_tokens = len(taken.token_ids)
        if num_tokens:
            stats.num_tokens += num_tokens
            stats.of_tenant(call.tenant).num_output += num_tokens
            if served.last_s:
                stats.inter_token_latency.observe((now_s - served.last_s) / num_tokens, served.exemplar)
            else:
                stats.time_to_first_token.observe(now_s - call.accepted_s, served.exemplar)
            served.last_s = now_s
            served.probe_s = PROBE_S
        if taken.finish:
            self._take_end(served, taken, now_s)
        else:
            call.sink.take(served.prompt, taken, served.stream.sequences[taken.sequence].chain)

    def _take_end(self, served: Served, row: TextRow, now_s: float) -> None:
        call = served.call
        if (error := error_of(row)) is not None:
            if error.code is ErrorCode.STREAM_DIVERGED:
                self._diverge(served)
                if served.stream.sequences[row.sequence].claim < 0:  # it got all it had from here: nobody has the rest
                    self.outbox.cancel_later(served, CancelReason.CLIENT)
            else:
                self.fail(call, call.form.told_error(error, served.prompt), CancelReason.CLIENT)
            return
        chain = served.stream.sequences[row.sequence].chain
        if not served.stream.ended:
            # A stored result names the request's usage with every sample.
            call.sink.take(served.prompt, replace(row, usage=None), chain)
            return
        call.sink.take(served.prompt, row, chain)
        self._end(served, row.usage or Usage(), now_s)

    def _end(self, served: Served, usage: Usage, now_s: float) -> None:
        call = served.call
        served.usage = usage
        self._stats.outcomes[_outcome_of_stream(served.stream)] += 1
        self._stats.e2e_request_latency.observe(now_s - call.accepted_s, served.exemplar)
        self._drop(served)
        self.outbox.delivered_later(served)
        call.num_open -= 1
        if call.num_open == 0:
            self.forget(call)
            call.sink.end([each.usage for each in call.served])

    def _break(self, call: ClientCall) -> None:
        """Ends a call whose reply could not be written, if need be without a word."""
        error = PenstockError(ErrorCode.INTERNAL, "the gateway failed to write this reply; see its log")
        try:
            self.fail(call, error, CancelReason.CLIENT)
        except Exception:
            _logger.exception("a client was not told of a failure")

    def _attached(self, served: Served, answer: Attachment) -> None:
        self._stats.num_attaches += 1
        call = served.call
        if call.is_over or not self._is_served(served):
            return
        if answer.is_elsewhere:
            self._let_go(call)
        elif answer.is_settling:
            asyncio.get_running_loop().call_later(RETRY_S, self._want_attach, served, 0.0)
        elif not answer.known:
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
        except PoisonMessageError as error:
            self.fail(served.call, PenstockError(ErrorCode.INTERNAL, f"the result cannot be read: {error}"))
            return
        now_s = asyncio.get_running_loop().time()
        self.deliver(rows, now_s)
        if not self._is_served(served) or served.is_behind:
            return
        if served.stream.ended:  # when its client came back already
            self._end(served, rows[-1].usage or Usage(), now_s)
        else:
            self._diverge(served)

    def _diverge(self, served: Served) -> None:
        """End a stream that does not extend what the client has; who has its beginning may come yet."""
        error = PenstockError(
            ErrorCode.STREAM_DIVERGED,
            "what goes on does not extend what you have: it was given wrongly, or the server lost writes; begin anew",
        )
        self.fail(served.call, error)

    def _let_go(self, call: ClientCall) -> None:
        """A client follows its requests through another call, which goes on where that client says."""
        if not call.is_over:
            self.forget(call)
            call.sink.fail(PenstockError(ErrorCode.SUPERSEDED, "another call follows this request now"))

    def _want_attach(self, served: Served, now_s: float) -> None:
        if now_s and now_s < served.next_attach_s:
            return
        served.next_attach_s = asyncio.get_running_loop().time() + ATTACH_ANSWER_S
        self.outbox.attach_later(served)

    def expire(self, call: ClientCall) -> None:
        """The deadline of a call has come."""
        error = PenstockError(ErrorCode.DEADLINE_EXCEEDED, "the request's time is over")
        self.fail(call, error, CancelReason.DEADLINE)

    def _give_up(self, call: ClientCall, reason: CancelReason) -> None:
        self._stats.outcomes[Outcome.CANCELLED] += call.num_open
        self._cancel_open(call, reason)
        self.forget(call)

    def _cancel_open(self, call: ClientCall, reason: CancelReason) -> None:
        for served in call.served:
            if self._is_served(served) and not served.stream.ended:
                self.outbox.cancel_later(served, reason)

    def forget(self, call: ClientCall) -> None:
        """The call is over; nothing becomes of its requests here."""
        call.is_over = True
        for timer in (call.deadline, call.grace):
            if timer is not None:
                timer.cancel()
        self._detached.discard(call)
        self._stats.num_detached = len(self._detached)
        for served in call.served:
            self._drop(served)

    def _is_served(self, served: Served) -> bool:
        return self._served.get(served.request_id) is served

    def _drop(self, served: Served) -> None:
        if self._is_served(served):
            del self._served[served.request_id]
            self._crowd.leave(served.call.tenant)
            self._witness.end(served)
            if is_debugging():
                _logger.debug(
                    "served",
                    request_id=format_request_id(served.request_id),
                    client_request_id=served.call.client_id,
                    num_tokens=[sequence.num_tokens for sequence in served.stream.sequences],
                    finish=[sequence.finish.name for sequence in served.stream.sequences],
                )
        self._stats.num_streams = len(self._served)
        if not self._served:
            self._idle.set()


def _goes_on(row: TextRow) -> bool:
    """Return whether its sample had tokens before, or ends: the last end of a request has its usage."""
    return row.token_offset > 0 or row.finish != FinishReason.UNSPECIFIED


def _outcome_of(error: PenstockError) -> Outcome:
    if error.code in (ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED):
        return Outcome.CANCELLED
    return Outcome.REJECTED if error.fault is Fault.CALLER else Outcome.ERROR


def _outcome_of_stream(stream: ClientStream) -> Outcome:
    reasons = {state.finish for state in stream.sequences}
    if FinishReason.POOLED in reasons:
        return Outcome.POOLED
    if FinishReason.LENGTH in reasons:
        return Outcome.LENGTH
    return Outcome.REPETITION if FinishReason.REPETITION in reasons else Outcome.STOP
