"""The beginning of calls: requests are submitted, or gone on with if they were submitted before."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from contract.domain.errors import ErrorCode, PenstockError, PoisonMessageError
from contract.domain.finish import CancelReason
from contract.domain.request import Request, format_request_id
from contract.domain.rows import TextRow
from contract.domain.timeline import Timeline
from gateway_svc import wire
from gateway_svc.call import ClientCall, Sink
from gateway_svc.core.admission import Crowd, admit
from gateway_svc.core.auth import KeyLimits
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.stats import GatewayStats, Outcome
from gateway_svc.core.streams import DeliveredSequence
from gateway_svc.delivery import Delivery
from gateway_svc.large import off_loop
from gateway_svc.link import Link
from gateway_svc.outbox import RequestOutbox, num_bytes
from servicekit.bus.calls import Recalled, RequestState


@dataclass(frozen=True, slots=True)
class Recollection:
    """A call as the pool knows it."""

    form: ReplyForm
    requests: list[tuple[bytes, Recalled]]  # with their ids

    @property
    def state(self) -> RequestState:
        """That of the request that is least far."""
        return min((found.state for _, found in self.requests), key=list(RequestState).index)

    def rows(self) -> list[list[TextRow]]:
        """Of each request that has ended, one for each sample.

        Raises:
            PenstockError: INTERNAL: a result is another version's.
        """
        return [_rows(each, found.result) for each, found in self.requests if found.result is not None]

    def timelines(self) -> list[Timeline | None]:
        """Of each request; None: it has not ended.

        Raises:
            PenstockError: INTERNAL: a result is another version's.
        """
        return [None if found.result is None else _timeline(found.result) for _, found in self.requests]


class Reception:
    """The entrance of calls. Lives in the loop of its `Delivery`."""

    def __init__(
        self,
        delivery: Delivery,
        link: Link,
        outage_patience_s: float,
        stats: GatewayStats,
        crowd: Crowd,
        *,
        label: str = "",
    ) -> None:
        self._delivery = delivery
        self._link = link
        self._outage_patience_s = outage_patience_s
        self._stats = stats
        self._crowd = crowd
        self._label = label  # of its pool, in the ids that clients see

    def expect(self) -> None:
        """Somebody calls, so that those who would have to wake up can do so meanwhile."""
        if not self._stats.num_streams:
            self._link.ring()

    async def open(
        self,
        requests: Sequence[Request],
        form: ReplyForm,
        sink: Sink,
        *,
        is_idempotent: bool,
        client_id: str = "",
        limits: KeyLimits | None = None,
    ) -> ClientCall:
        """Submits the requests of one call; from now on `sink` gets their text.

        Args:
            requests: by prompt.
            form: how they are answered.
            sink: gets their text.
            is_idempotent: their ids follow from a key: they may be there already, then they are told from the start.
                What may have been submitted before an error is not cancelled, for the client asks again.
            client_id: what the client calls it, for the log.
            limits: of the key it came with; None: it has none.

        Raises:
            PenstockError: not accepted; nothing will come.
        """
        delivery = self._delivery
        self.expect()  # again: who has just turned its loop turns it faster when the request comes
        if limits is not None:
            form = replace(form, api_key=limits.key)
        if is_idempotent:
            form = replace(form, asked=await off_loop(num_bytes(requests), wire.asked_digest, requests))
        call = self._call(form, requests[0].header.tenant, sink)
        call.client_id = client_id
        await self._link.back_within(self._outage_patience_s)
        for served, request in zip(call.served, requests, strict=True):
            served.route = self._link.sid  # another one after an outage
            served.exemplar = replace(served.exemplar, trace_id=request.header.trace_id)
        # Who follows one of them here already is only let go if this call is the same.
        new = [each for each in call.served if delivery.find(each.request_id) is None]
        try:
            self._admit(len(new), call.tenant)
            delivery.register(new)
            submitted = await self._outbox.submit(requests, form, call.came_ms, limits)
        except BaseException as error:
            outcome = Outcome.REJECTED if isinstance(error, PenstockError) else Outcome.CANCELLED
            self._stats.outcomes[outcome] += len(requests)
            self._withdraw(call, is_idempotent=is_idempotent)
            raise
        for served, submission in zip(call.served, submitted.submissions, strict=True):
            served.submission = submission
        if submitted.refusal is not None:
            self._stats.outcomes[Outcome.REJECTED] += len(requests)
            waits = is_idempotent and submitted.refusal.code is not ErrorCode.IDEMPOTENCY_CONFLICT
            if waits and submitted.created:  # for its client, which asks again; of nothing else is there anything here
                delivery.detach(call)
            else:
                for prompt in submitted.created:
                    self._outbox.cancel_later(call.served[prompt], CancelReason.CLIENT)
                delivery.forget(call)
            raise submitted.refusal
        if call.is_over:  # who followed with the same key meanwhile has it now; this one was told
            return call
        if is_idempotent:  # else what exists was this submit, sent again after an outage
            # An earlier call with this key is registered for what is not new, though it may have been refused.
            mine = {each.prompt for each in new}.difference(submitted.existing)
            if others := [prompt for prompt in range(len(requests)) if prompt not in mine]:
                await self._take_over(call, others)
        self._begin(call)
        return call

    async def resume(
        self, form: ReplyForm, tenant: str, sink: Sink, have: Sequence[DeliveredSequence], *, client_id: str = ""
    ) -> ClientCall:
        """Goes on with a call after what its client has of each choice; who followed it until now is let go.

        Raises:
            PenstockError: UNAVAILABLE, OVERLOADED: not now.
        """
        self._admit(sum(self._delivery.find(each) is None for each in form.request_ids), tenant, is_return=True)
        call = self._call(replace(form, is_resumable=True), tenant, sink, have)
        call.client_id = client_id
        if form.continuous_usage:
            # The row that says it may have come to another connection.
            for served, num_tokens in zip(call.served, await self._outbox.count_prompts(form.request_ids), strict=True):
                self._delivery.learn(served, num_tokens)
        await self._take_over(call, range(len(call.served)))
        self._begin(call)
        return call

    async def form_of(self, request_id: bytes, tenant: str) -> ReplyForm:
        """Find the form in which the call of a request is answered.

        Raises:
            PenstockError: NOT_FOUND: there is none of this tenant; UNAVAILABLE: the server does not answer.
        """
        (recalled,) = await self._outbox.recall([request_id], tenant)
        form = self._form(request_id, recalled)
        if request_id in form.request_ids:
            return form
        first = form.request_ids[0]
        return self._form(first, (await self._outbox.recall([first], tenant))[0])

    async def agreed(self, form: ReplyForm, tenant: str) -> ReplyForm:
        """The form of a call that may have been accepted before: then with the times of the first time."""
        (recalled,) = await self._outbox.recall(form.request_ids[:1], tenant)
        if recalled is None:
            return form
        first = self._form(form.request_ids[0], recalled)
        return replace(form, arrival_ns=first.arrival_ns, deadline_ns=first.deadline_ns)

    async def recall(self, request_id: bytes, tenant: str) -> Recollection:
        """Ask what the pool knows of the call of a request.

        Raises:
            PenstockError: NOT_FOUND: there is none of this tenant; UNAVAILABLE: the server does not answer.
        """
        form = await self.form_of(request_id, tenant)
        recalled = await self._outbox.recall(form.request_ids, tenant)
        requests = []
        for each, found in zip(form.request_ids, recalled, strict=True):
            if found is None:
                raise self._unknown(each)
            requests.append((each, found))
        return Recollection(form, requests)

    async def has_ended(self, request_id: bytes, tenant: str) -> bool:
        """Return whether the call of a request is over, and its result still kept.

        Raises:
            PenstockError: UNAVAILABLE: the server does not answer.
        """
        try:
            form = await self.form_of(request_id, tenant)
        except PenstockError as error:
            if error.code is ErrorCode.UNAVAILABLE:
                raise
            return False
        found = await self._outbox.recall(form.request_ids, tenant)
        return all(each is not None and each.state is RequestState.ENDED for each in found)

    async def cancel(self, request_id: bytes, tenant: str) -> bool:
        """A client asks for the end of a request, and of those submitted with it; whether there is such a request.

        Raises:
            PenstockError: UNAVAILABLE: the server does not answer, or is out of memory.
        """
        try:
            ids: Sequence[bytes] = (await self.form_of(request_id, tenant)).request_ids
        except PenstockError as error:
            if error.code is ErrorCode.UNAVAILABLE:
                raise
            ids = [request_id]  # a mark is left for what is not there yet
        return await self._outbox.cancel(ids, tenant)

    @property
    def _outbox(self) -> RequestOutbox:
        return self._delivery.outbox

    def _admit(self, num_new: int, tenant: str, *, is_return: bool = False) -> None:
        admit(
            self._crowd.limits,
            num_streams=self._crowd.num_streams,
            num_new=num_new,
            num_other_tenants=self._crowd.num_tenants_beside(tenant),
            draining=self._delivery.draining,
            connected=self._link.connected,
            is_return=is_return,
            mean_stream_s=self._stats.e2e_request_latency.mean,
        )

    def _call(
        self, form: ReplyForm, tenant: str, sink: Sink, have: Sequence[DeliveredSequence] | None = None
    ) -> ClientCall:
        now_s = asyncio.get_running_loop().time()
        return ClientCall(form, tenant, sink, route=self._link.sid, now_s=now_s, came_ms=self._link.now_ms(), have=have)

    async def _take_over(self, call: ClientCall, prompts: Sequence[int]) -> None:
        several = [call.served[prompt] for prompt in prompts]
        for served in several:
            served.is_taken = False
        if not self._delivery.follow(call, several):
            return
        self._stats.num_resumes += 1
        try:
            await self._outbox.attach(several)
        except BaseException:
            # Whether it is here is not known: the grace runs, and ends what is.
            self._delivery.detach(call)
            raise

    def _begin(self, call: ClientCall) -> None:
        call.is_submitted = True
        if call.form.deadline_ns and not call.is_over:
            left_s = max(0.0, (call.form.deadline_ns - time.time_ns()) * 1e-9)
            call.deadline = asyncio.get_running_loop().call_later(left_s, self._delivery.expire, call)

    def _withdraw(self, call: ClientCall, *, is_idempotent: bool) -> None:
        """Cancel what may have been submitted of a call that is not accepted: a lost answer may be a yes."""
        registered = [each for each in call.served if self._delivery.find(each.request_id) is each]
        if is_idempotent and registered:
            self._delivery.detach(call)
            return
        for served in registered:
            self._outbox.cancel_later(served, CancelReason.CLIENT, anywhere=True)
        self._delivery.forget(call)

    def _form(self, request_id: bytes, recalled: Recalled | None) -> ReplyForm:
        if recalled is None:
            raise self._unknown(request_id)
        try:
            return replace(wire.decode_reply_form(recalled.reply), pool=self._label)
        except PoisonMessageError as error:
            raise PenstockError(ErrorCode.INTERNAL, f"the request was submitted by another version: {error}") from error

    def _unknown(self, request_id: bytes) -> PenstockError:
        text = format_request_id(request_id, self._label)
        return PenstockError(ErrorCode.NOT_FOUND, f"there is no request {text}", param="request_id")


def _rows(request_id: bytes, result: bytes) -> list[TextRow]:
    try:
        return wire.decode_finished(request_id, result)
    except PoisonMessageError as error:
        raise PenstockError(ErrorCode.INTERNAL, f"the result cannot be read: {error}") from error


def _timeline(result: bytes) -> Timeline:
    try:
        return wire.decode_finished_timeline(result)
    except PoisonMessageError as error:
        raise PenstockError(ErrorCode.INTERNAL, f"the result cannot be read: {error}") from error
