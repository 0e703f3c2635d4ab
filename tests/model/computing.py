"""Workers, and schedulers that plan for them: epochs, and what comes of those that are over.

All workers here are incarnations of one: what `worker1` does while `worker0` lives is what a twin does. A plan carries
one token of one sample, whose slot it fills anew.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from clients import Client, prompt_output
from continuations import LIMITS, SHARD, Samples, model_of
from edges import next_entry
from explored_pool import ExploredPool, Fields
from generation import Epoch, SchedulerProcess, SchedulerState
from processes import Hold, Move, Process
from samplers import Kind, Samplers

from contract.domain.model_kind import ModelKind
from contract.domain.params import Sampling
from contract.domain.plan import NO_TOKENS, Admission, StepPlan, StepResult
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.models import Absences
from scheduler_svc.pairing import PairedWorker, Pairings, gap_plan
from scheduler_svc.wire import (
    ReceivedResult,
    WorkerOffer,
    decode_result,
    decode_worker_info,
    encode_plan,
    model_digest_of,
)
from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Append,
    Commit,
    Entry,
    KeepPromptOutput,
    Leave,
    ListSessions,
    ListWorkers,
    Pair,
    Pairing,
    RegisterWorker,
    SessionKind,
    WorkerEntry,
)
from worker_svc import wire as worker_wire
from worker_svc.core.epoch import EpochTracker, PlanVerdict
from worker_svc.core.interface import Limits
from worker_svc.core.whole_prompts import WholePrompts

NAME = "worker"
_PROMPT = (5, 6)
_LONG_AGO_NS = 10**12


class WorkerState(NamedTuple):
    hold: Hold
    position: bytes | None = None  # in its plans; None: not registered
    session: bytes = b""  # the epoch's scheduler
    step: int = 0
    is_over: bool = False  # the epoch ended badly: another incarnation must be drawn
    plan: tuple[int, bytes, int, tuple[int, ...]] | None = None  # step, request, sample, tokens before
    keeps_prompt: bool = False  # the plan's logprobs or vector are still to be kept
    pools: bool = False  # the plan's prompt becomes a vector


class WorkerProcess(Process):
    """Registers, carries out the plans of one epoch in order, and appends what they gave."""

    kind = SessionKind.WORKER

    def __init__(
        self,
        name: str,
        pool: ExploredPool,
        indices: dict[bytes, int],
        samplers: Samplers,
        kinds: tuple[Kind, ...],
        models: tuple[bytes, ...],
        limits: WorkerLimits = LIMITS,
    ) -> None:
        super().__init__(name, pool)
        self.indices = indices
        self.samplers = samplers
        self.kinds = kinds
        size, longest = limits.block_size, limits.max_model_len
        told = Limits(
            limits.num_blocks,
            size,
            limits.max_num_seqs,
            longest,
            longest,
            100,
            kinds=limits.kinds,
            model_kind=limits.model_kind,
            has_state=limits.has_state,
        )
        self.prompts = WholePrompts(told) if limits.model_kind is ModelKind.ENCODER else None
        self.model_digest = models[int(name[-1]) % len(models)]
        info = worker_wire.worker_info(
            told, model="model", home_shard=SHARD, world_size=1, device="cpu", model_digest=self.model_digest
        )
        self.info = info.SerializeToString()

    def born(self, number: int) -> WorkerState:
        return WorkerState(Hold(number))

    def recovered(self, me: WorkerState) -> WorkerState:
        """What is being computed is published all the same; a new session, or a new run, registers again."""
        if me.hold.is_lost or me.hold.new_run:
            return WorkerState(me.hold)
        return me

    def work(self, me: WorkerState, pool: int, clients: tuple[Client, ...]) -> Iterator[Move]:
        sid, keys = self.sid(me), self.pool.keys
        if me.is_over:
            _, changed = self.pool.call(pool, Leave(sid))
            yield Move(f"{self.name}: begins again", self.anew(WorkerState(me.hold)), changed)
        elif me.position is None:
            position, changed = self.pool.call(pool, RegisterWorker(sid, NAME, self.info, self.model_digest))
            registered = me._replace(position=position) if position else self.fenced(me)
            yield Move(f"{self.name}: registers", registered, changed)
        elif me.plan is not None:
            yield from self._finish(me, pool, me.plan)
        elif entry := next_entry(self.pool, pool, keys.steps(NAME), me.position):
            yield Move(f"{self.name}: reads a plan", self._planned(me, entry), pool)

    def _planned(self, me: WorkerState, entry: Entry) -> WorkerState:
        received = worker_wire.decode_plan(entry.fields[k.PAYLOAD])
        sid, plan = self.sid(me), received.plan
        tracker = EpochTracker(sid)
        if me.step:
            tracker._epoch, tracker._step = (me.session, sid), me.step
        me = me._replace(position=entry.entry_id)
        match tracker.admit(received.session, received.incarnation, plan.step):
            case PlanVerdict.GAP:
                return me._replace(is_over=True)
            case PlanVerdict.DROP:
                return me
        (admission,) = plan.admissions
        if self.prompts is not None:  # each is in its slot for one step
            self.prompts.update(replace(plan, step=1))
            self.prompts.take(plan)
        before = tuple(admission.token_ids[admission.num_prompt_tokens :].tolist())
        todo = (plan.step, admission.request_id, admission.slot, before)
        pools = admission.pooling is not None
        keeps = pools or admission.prompt_logprobs
        return me._replace(session=received.session, step=plan.step, plan=todo, keeps_prompt=keeps, pools=pools)

    def _finish(self, me: WorkerState, pool: int, plan: tuple[int, bytes, int, tuple[int, ...]]) -> Iterator[Move]:
        """The logprobs or the vector of the prompt, and then the result."""
        if me.keeps_prompt:
            yield self._keep(me, pool, plan[1])
        else:
            yield from self._publish(me, pool, plan)

    def _keep(self, me: WorkerState, pool: int, request_id: bytes) -> Move:
        kept = KeepPromptOutput(request_id, self.model_digest, prompt_output(self.model_digest))
        _, changed = self.pool.call(pool, kept)
        return Move(f"{self.name}: keeps what it computed of a prompt", me._replace(keeps_prompt=False), changed)

    def _publish(self, me: WorkerState, pool: int, plan: tuple[int, bytes, int, tuple[int, ...]]) -> Iterator[Move]:
        sid = self.sid(me)
        step, request_id, sequence, before = plan
        one, index = np.ones(1, np.uint32), self.indices[request_id]
        if me.pools:
            payload = self._payload(me, StepResult(step, one * sequence, one * 0, NO_TOKENS))
            _, changed = self.pool.call(pool, Append(self.pool.keys.results(NAME), payload, k.RESULTS_CAP))
            yield Move(f"{self.name}: step {step}, {index} is pooled", me._replace(plan=None), changed)
            return
        for kind in self.kinds:
            token_id = self.samplers.sample(me.session + sid, kind, index, sequence, before)
            result = StepResult(step, one * sequence, one, one * token_id)
            payload = self._payload(me, result)
            _, changed = self.pool.call(pool, Append(self.pool.keys.results(NAME), payload, k.RESULTS_CAP))
            name = f"{self.name}: step {step}, token {token_id} of {index}/{sequence} ({kind.name.lower()})"
            yield Move(name, me._replace(plan=None), changed)

    def _payload(self, me: WorkerState, result: StepResult) -> Fields:
        return Fields({k.PAYLOAD: worker_wire.encode_result(result, me.session, self.sid(me), 0)})


class PlanningScheduler(SchedulerProcess):
    """A scheduler whose tokens come from a worker, one plan after the other."""

    def take(self, me: SchedulerState, pool: int, dead: bytes) -> Iterator[Move]:
        if me.epoch is not None or not self._serves_elsewhere(me, pool):
            yield from super().take(me, pool, dead)

    def claim(self, me: SchedulerState, pool: int) -> Iterator[Move]:
        workers, _ = self.pool.call(pool, ListWorkers())
        if me.epoch is not None or not any(entry.alive for entry in workers):
            yield from super().claim(me, pool)

    def _serves_elsewhere(self, me: SchedulerState, pool: int) -> bool:
        workers, _ = self.pool.call(pool, ListWorkers())
        return any(entry.alive and entry.owner not in (None, self.sid(me)) for entry in workers)

    def generate(self, me: SchedulerState, pool: int) -> Iterator[Move]:
        yield from self._survey(me, pool)
        if me.epoch is None and me.held and self._serves_elsewhere(me, pool):
            _, changed = self.pool.call(pool, Leave(self.sid(me)))
            yield Move(f"{self.name}: hands its requests to others", self.anew(me), changed)
        epoch = me.epoch
        if epoch is not None:
            if epoch.unsent:
                yield self._send(me, pool, epoch, "sends its plan again")
                return
            if entry := next_entry(self.pool, pool, self.pool.keys.results(NAME), epoch.position):
                yield Move(f"{self.name}: reads a result", self._received(me, epoch, entry), pool)
            elif epoch.planned is None:
                yield from self._plan(me, pool, epoch)
        if me.unsent:
            yield self._commit(me, pool, me, me.unsent, "rows")
        else:
            yield from self._abandon(me, pool)

    def _survey(self, me: SchedulerState, pool: int) -> Iterator[Move]:
        sid = self.sid(me)
        workers, _ = self.pool.call(pool, ListWorkers())
        pairings = self._pairings(me)
        if me.epoch is not None and pairings.lost(workers, sid):
            yield Move(f"{self.name}: loses its worker", self._ended(me, me.epoch), pool)
            return
        for entry in pairings.to_end(workers, sid, _LONG_AGO_NS):
            if entry.incarnation not in me.told:
                yield self._tell(me, pool, entry)
        sessions, _ = self.pool.call(pool, ListSessions())
        for name in pairings.to_pair(workers, sessions, sid, 0):
            pairing, changed = self.pool.call(pool, Pair(sid, name))
            if isinstance(pairing, Pairing):
                offer = decode_worker_info(pairing.info)
                assert offer.limits == self.limits
                model_digest = offer.model_digest
                epoch = Epoch(pairing.incarnation, pairing.results_after, model_digest=model_digest)
                yield Move(f"{self.name}: pairs", me._replace(epoch=epoch), changed)

    def _pairings(self, me: SchedulerState) -> Pairings:
        """The service's own, with what this scheduler knows."""
        pairings = Pairings()
        if me.epoch is not None:
            offer = WorkerOffer("model", self.limits, SHARD)
            pairings.begin(PairedWorker(NAME, me.epoch.incarnation, offer, me.epoch.position, 0))
        pairings._ended = dict.fromkeys(me.over, 0)
        return pairings

    def _ended(self, me: SchedulerState, epoch: Epoch) -> SchedulerState:
        return me._replace(epoch=None, over=me.over | {epoch.incarnation})

    def _tell(self, me: SchedulerState, pool: int, entry: WorkerEntry) -> Move:
        plan = encode_plan(gap_plan(), self.sid(me), entry.incarnation, 0)
        done, changed = self.pool.call(pool, Commit(self.sid(me), (), NAME, plan))
        told = me._replace(told=me.told | {entry.incarnation})
        return Move(f"{self.name}: ends an epoch", told if done else self.fenced(me), changed)

    def _plan(self, me: SchedulerState, pool: int, epoch: Epoch) -> Iterator[Move]:
        """The next token of the first sample that goes on."""
        going_on = (
            (each, samples, i)
            for each, samples in me.held
            for i, s in enumerate(samples)
            if not s.has_ended and self.may_serve(epoch, samples)
        )
        request_id, samples, sequence = next(going_on, (b"", (), 0))
        if not request_id:
            return
        step = epoch.step + 1
        plan = encode_plan(self._step_plan(step, request_id, samples, sequence), self.sid(me), epoch.incarnation, 0)
        planned = epoch._replace(step=step, planned=(request_id, sequence), unsent=plan)
        yield self._send(me, pool, planned, f"plans step {step}")

    def _send(self, me: SchedulerState, pool: int, epoch: Epoch, what: str) -> Move:
        """The epoch's plan, and the rows that wait, in one commit."""
        rows = tuple((SHARD, row) for row in me.unsent)
        done, changed = self.pool.call(pool, Commit(self.sid(me), rows, NAME, epoch.unsent))
        sent = me._replace(epoch=epoch._replace(unsent=b""), unsent=()) if done else self.fenced(me)
        name = f"{self.name}: {what}" + ("" if done else ", is fenced")
        return Move(name, sent, changed, if_lost=self.disconnected(me._replace(epoch=epoch)))

    def _step_plan(self, step: int, request_id: bytes, samples: Samples, sequence: int) -> StepPlan:
        token_ids = np.array((*_PROMPT, *samples[sequence].token_ids), np.uint32)
        one = np.ones(1, np.uint32)
        admission = Admission(
            sequence,
            token_ids,
            len(_PROMPT),
            0,
            one if self.limits.kinds else NO_TOKENS,
            Sampling(num_prompt_logprobs=0),
            0,
            request_id=request_id,
            prompt_logprobs=self.asked[request_id].scores_prompt and not any(each.token_ids for each in samples),
            pooling=self.asked[request_id].request.pooling,
        )
        return StepPlan(step, admissions=(admission,), slots=one * sequence, num_tokens=one * len(token_ids))

    def _received(self, me: SchedulerState, epoch: Epoch, entry: Entry) -> SchedulerState:
        received = decode_result(entry.fields[k.PAYLOAD])
        epoch = epoch._replace(position=entry.entry_id)
        me = me._replace(epoch=epoch)
        result = received.result
        if not self.belongs(me, epoch, received) or result.step < epoch.step or epoch.planned is None:
            return me
        if result.step > epoch.step:
            return self._ended(me, epoch)
        request_id, sequence = epoch.planned
        me = me._replace(epoch=epoch._replace(planned=None))
        samples = dict(me.held).get(request_id)
        if samples is None or samples[sequence].has_ended:
            return me
        token_id = next(iter(result.token_ids.tolist()), None)  # None: its prompt is pooled
        after = self.continuations.advance(self.sid(me), request_id, samples, sequence, token_id, epoch.model_digest)
        me = me._replace(unsent=(*me.unsent, after.rows))
        return me.with_held(request_id, after.samples if after.is_live else None)

    def may_serve(self, epoch: Epoch, samples: Samples) -> bool:
        """Return whether a worker may go on with a request."""
        return model_of(samples) in (b"", epoch.model_digest)

    def _abandon(self, me: SchedulerState, pool: int) -> Iterator[Move]:
        """Requests whose model no worker has, while there is one with another, end after a long time."""
        workers, _ = self.pool.call(pool, ListWorkers())
        present = {model_digest_of(entry) for entry in workers if entry.alive} - {None}
        wanted = {model_of(samples): request_id for request_id, samples in me.held}
        wanted.pop(b"", None)
        for model_digest in Absences(0).note(wanted, {each for each in present if each is not None}, 0):
            request_id = wanted[model_digest]
            after = self.continuations.abandon(self.sid(me), request_id, dict(me.held)[request_id])
            ended = me._replace(unsent=(*me.unsent, after.rows)).with_held(request_id, None)
            yield Move(f"{self.name}: abandons a request", ended, pool, is_lazy=True)

    def belongs(self, me: SchedulerState, epoch: Epoch, received: ReceivedResult) -> bool:
        """Return whether a result is of the epoch that goes on."""
        return (received.session, received.incarnation) == (self.sid(me), epoch.incarnation)
