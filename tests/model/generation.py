"""Schedulers: the real core says how requests go on, around it is the smallest process that makes the same calls."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from clients import Asked, Client
from continuations import LIMITS, MODELS, SHARD, Continuations, Sample, Samples, logged_model
from edges import next_entry
from explored_pool import ExploredPool
from processes import Hold, Move, Process, Stage
from samplers import Kind, Samplers

from contract.domain.timeline import Computed
from scheduler_svc.core.history import History, diverged_rows, restore
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.wire import decode_witness, encode_rows, read_loaded
from servicekit.bus import keys as k
from servicekit.bus.calls import (
    NOT_YET,
    Call,
    Claim,
    Commit,
    Entry,
    Leave,
    Load,
    Loaded,
    Owned,
    SessionKind,
    StoredRequest,
    Take,
)


class Epoch(NamedTuple):
    """What a scheduler knows of its worker."""

    incarnation: bytes
    position: bytes  # in its results
    step: int = 0  # planned last
    model_digest: bytes = MODELS[0]  # of the worker
    planned: tuple[bytes, int] | None = None  # the request and sample of the plan in flight
    unsent: bytes = b""  # that plan, if its answer was lost: it is sent again before another is made


class SchedulerState(NamedTuple):
    hold: Hold
    held: tuple[tuple[bytes, Samples], ...] = ()  # by request id
    unsent: tuple[bytes, ...] = ()  # TokenBatches for the next commit
    to_load: tuple[bytes, ...] = ()
    asks_owned: bool = False  # an answer was lost: it may own what it does not know
    cancels_read: bytes = b"0-0"
    early: frozenset[tuple[bytes, int, int]] = frozenset()  # cancels of requests that were not here
    epoch: Epoch | None = None
    over: frozenset[bytes] = frozenset()  # incarnations whose epoch has ended
    told: frozenset[bytes] = frozenset()  # those of them that were told
    aside: Any = None  # what it keeps only where a rule is switched off

    def with_held(self, request_id: bytes, samples: Samples | None) -> "SchedulerState":
        held = {**dict(self.held), request_id: samples}
        return self._replace(held=tuple(sorted((each, s) for each, s in held.items() if s is not None)))


class SchedulerProcess(Process):
    """Claims, takes over, and generates: it is its own worker, whose tokens nobody else would sample."""

    kind = SessionKind.SCHEDULER

    def __init__(
        self,
        name: str,
        pool: ExploredPool,
        asked: tuple[Asked, ...],
        samplers: Samplers,
        kinds: tuple[Kind, ...],
        limits: WorkerLimits = LIMITS,
    ) -> None:
        super().__init__(name, pool)
        self.limits = limits  # of workers
        self.asked = {each.request_id: each for each in asked}
        self.samplers = samplers
        self.continuations = Continuations(asked, limits)
        self.kinds = kinds

    def born(self, number: int) -> SchedulerState:
        return SchedulerState(Hold(number))

    def recovered(self, me: SchedulerState) -> SchedulerState:
        if me.hold.is_lost:
            return self.born(me.hold.number)._replace(hold=me.hold)
        return me

    def disconnected(self, me: SchedulerState) -> SchedulerState:
        return super().disconnected(me)._replace(asks_owned=True)

    def greeted(self, me: SchedulerState, hold: Hold) -> SchedulerState:
        """After a new run nothing that is held here need be true: the old session ends, another begins."""
        return me._replace(hold=hold._replace(stage=Stage.CONFIRM))

    def come_back(self, me: SchedulerState, pool: int, clients: tuple[Client, ...]) -> Iterator[Move]:
        if me.hold.stage is Stage.CONFIRM:
            _, changed = self.pool.call(pool, Leave(self.sid(me)))
            yield Move(f"{self.name}: leaves its old session", self.anew(me), changed)
        else:
            yield from super().come_back(me, pool, clients)

    def work(self, me: SchedulerState, pool: int, clients: tuple[Client, ...]) -> Iterator[Move]:
        sid, view = self.sid(me), self.pool.view(pool)
        if me.asks_owned:
            owned, changed = self.pool.call(pool, Owned(sid))
            yield Move(f"{self.name}: what it owns", self._found(me, owned), changed)
            return
        if me.to_load:
            yield from self.load(me, pool)
        if view.lengths.get(self.pool.keys.requests):
            yield from self.claim(me, pool)
        for dead, (kind, is_active, is_running) in view.sessions.items():
            if kind is SessionKind.SCHEDULER and dead != sid and not (is_active and is_running):
                yield from self.take(me, pool, dead)
        if entry := next_entry(self.pool, pool, self.pool.keys.cancels, me.cancels_read):
            yield Move(f"{self.name}: reads a cancel", self._cancelled(me, entry), pool)
        yield from self.generate(me, pool)

    def take(self, me: SchedulerState, pool: int, dead: bytes) -> Iterator[Move]:
        taken, changed = self.pool.call(pool, Take(self.sid(me), dead))
        if taken is not None and taken is not NOT_YET:
            yield Move(f"{self.name}: takes over {dead.decode().strip()}", self._found(me, taken), changed)

    def claim(self, me: SchedulerState, pool: int) -> Iterator[Move]:
        claimed, changed = self.pool.call(pool, Claim(self.sid(me), 1, SHARD))
        if claimed is None:
            yield Move(f"{self.name}: may not claim, is fenced", self.fenced(me), changed)
        elif claimed is not NOT_YET:
            after = self.added(me, [(each, ()) for each in claimed])
            wrong = self._what_is_wrong(me, after, changed)
            yield Move(f"{self.name}: claims {len(claimed)}", after, changed, wrong=wrong)

    def load(self, me: SchedulerState, pool: int) -> Iterator[Move]:
        loaded, changed = self.pool.call(pool, Load(self.sid(me), me.to_load))
        if loaded is NOT_YET:
            return
        after = self.fenced(me) if loaded is None else self.loaded(me, loaded)
        yield Move(f"{self.name}: loads", after, changed, wrong=self._what_is_wrong(me, after, changed))

    def _what_is_wrong(self, before: SchedulerState, after: SchedulerState, pool: int) -> str:
        requests, known = self.pool.view(pool).requests, dict(before.held)
        ignored = [each for each, _ in after.held if each not in known and requests[each].is_cancelled]
        return "a request goes on that was cancelled before" if ignored else ""

    def generate(self, me: SchedulerState, pool: int) -> Iterator[Move]:
        """Rows that wait, or else the next token of any sample."""
        if me.unsent:
            yield self._commit(me, pool, me, me.unsent, "ends")
            return
        for request_id, samples in me.held:
            if self.asked[request_id].has_search:
                yield from (self._search(me, pool, request_id, samples, kind) for kind in self.kinds)
                continue
            for sequence, sample in enumerate(samples):
                if not sample.has_ended:
                    for kind in self.kinds:
                        yield self._sample(me, pool, request_id, samples, sequence, kind)

    def _sample(
        self, me: SchedulerState, pool: int, request_id: bytes, samples: Samples, sequence: int, kind: Kind
    ) -> Move:
        index, sid = self.asked[request_id].index, self.sid(me)
        token_id = self.samplers.sample(sid, kind, index, sequence, samples[sequence].token_ids)
        after = self.continuations.advance(sid, request_id, samples, sequence, token_id)
        grown = me.with_held(request_id, after.samples if after.is_live else None)
        what = f"token {token_id} of {index}/{sequence} ({kind.name.lower()})"
        return self._commit(me, pool, grown, (after.rows,), what)

    def _search(self, me: SchedulerState, pool: int, request_id: bytes, samples: Samples, kind: Kind) -> Move:
        """A step of all beams: each finds a token of this kind, and two after which it goes on."""
        sid, asked = self.sid(me), self.asked[request_id]

        def tokens(before: tuple[int, ...]) -> list[int]:
            places = enumerate((kind, Kind.PLAIN, Kind.PLAIN))
            sequence = asked.sampled_as(0)
            return [self.samplers.sample(sid + b"%d" % at, k, asked.index, sequence, before) for at, k in places]

        after = self.continuations.search(sid, request_id, samples, kind, tokens)
        grown = me.with_held(request_id, after.samples if after.is_live else None)
        return self._commit(me, pool, grown, (after.rows,), f"a choice of {asked.index} ({kind.name.lower()})")

    def _commit(self, me: SchedulerState, pool: int, after: SchedulerState, rows: tuple[bytes, ...], what: str) -> Move:
        done, changed = self.pool.call(pool, self.commitment(me, rows))
        sent = after._replace(unsent=()) if done else self.fenced(me)
        name = f"{self.name}: commits {what}" + ("" if done else ", is fenced")
        return Move(name, sent, changed, if_lost=self.disconnected(after._replace(unsent=rows)))

    def commitment(self, me: SchedulerState, rows: tuple[bytes, ...]) -> Call[bool]:
        return Commit(self.sid(me), tuple((SHARD, row) for row in rows))

    def _found(self, me: SchedulerState, request_ids: Sequence[bytes] | None) -> SchedulerState:
        if request_ids is None:
            return self.fenced(me)
        known = dict(me.held)
        unknown = {each for each in request_ids if each not in known}
        return me._replace(to_load=tuple(sorted(unknown.union(me.to_load))), asks_owned=False)

    def loaded(self, me: SchedulerState, loaded: Loaded) -> SchedulerState:
        """As the dispatcher does: after what the log holds, unless that has ended."""
        return self.added(me._replace(to_load=()), read_loaded(loaded))

    def added(self, me: SchedulerState, found: Sequence[tuple[StoredRequest, Sequence[History]]]) -> SchedulerState:
        """Requests that are its own now: after what is known of them, by log and client."""
        for stored, known in found:
            if stored.request_id in dict(me.held):
                continue
            asked = self.asked[stored.request_id]
            histories = known or [History() for _ in range(asked.num_histories)]
            finish_of = self.continuations.finish_of(stored.request_id)
            model_digest = logged_model(stored, histories)
            witness, told = decode_witness(stored.witness, asked.num_samples)
            rows = restore(stored.request_id, histories, witness, told, finish_of, model_digest=model_digest)
            has_diverged = rows is None
            if rows is None:
                rows = diverged_rows(stored.request_id, histories[: asked.num_samples])
            if len(rows):
                me = me._replace(unsent=(*me.unsent, encode_rows(rows, self.sid(me), Computed())))
            if not has_diverged:
                samples = tuple(
                    Sample(tuple(each.token_ids), each.has_ended or index == asked.num_samples, each.model_digest)
                    for index, each in enumerate(histories)
                )
                me = self._queued(me, stored, samples)
        return me

    def _queued(self, me: SchedulerState, stored: StoredRequest, samples: Samples) -> SchedulerState:
        """A request goes to the core, with the cancels that came before it."""
        request_id, sid = stored.request_id, self.sid(me)
        steps = [self.continuations.add(sid, request_id, samples)]
        early = sorted(each for each in me.early if each[0] == request_id)
        cancels = [(reason, sequence) for _, reason, sequence in early]
        if stored.cancel_reason:
            cancels.append((stored.cancel_reason, -1))
        for reason, sequence in cancels:
            if steps[-1].is_live:
                steps.append(self.continuations.cancel(sid, request_id, steps[-1].samples, reason, sequence))
        rows = tuple(step.rows for step in steps if step.rows)
        me = me._replace(unsent=me.unsent + rows, early=me.early - set(early))
        return me.with_held(request_id, steps[-1].samples if steps[-1].is_live else None)

    def _cancelled(self, me: SchedulerState, entry: Entry) -> SchedulerState:
        request_id, held = entry.fields[k.REQUEST], dict(me.held)
        reason, sequence = int(entry.fields[k.REASON]), int(entry.fields[k.SEQUENCE])
        me = me._replace(cancels_read=entry.entry_id)
        if request_id not in held:
            return me._replace(early=me.early | {(request_id, reason, sequence)})
        after = self.continuations.cancel(self.sid(me), request_id, held[request_id], reason, sequence)
        me = me._replace(unsent=me.unsent + ((after.rows,) if after.rows else ()))
        return me.with_held(request_id, after.samples if after.is_live else None)
