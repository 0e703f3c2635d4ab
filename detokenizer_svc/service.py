"""The detokenizer's loop: one synchronous thread, one write a round.

A round writes what the last one led to (text for each gateway, cancels, results) together with the next blocking read
of all leased shards. A few times a second it also renews the session, confirms its leases, shortens the logs and takes
or gives back shards.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import structlog
from prometheus_client.registry import Collector
from tokenizers import Tokenizer

from contract.domain.finish import CancelReason
from detokenizer_svc import wire
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.effects import Retirement
from detokenizer_svc.core.extent import LogLimits
from detokenizer_svc.core.spans import is_sampled
from detokenizer_svc.followers import Followers
from detokenizer_svc.gateways import Gateways
from detokenizer_svc.metrics import DetokenizerCollector, ServiceStats
from detokenizer_svc.outbox import MANY_ENDS, TextOutbox
from detokenizer_svc.rebuild import rebuild
from detokenizer_svc.settings import DetokenizerSettings
from detokenizer_svc.shard import Shard, Taken
from detokenizer_svc.shard_claims import Deaths
from detokenizer_svc.shards import LeasedShards
from detokenizer_svc.tracing import SpanCollector, TraceExporter
from servicekit.bus import Bus, BusFull, BusUnavailable
from servicekit.bus.ahead import Ahead
from servicekit.bus.calls import (
    Call,
    Cancel,
    Entry,
    LeaseShard,
    Read,
    ReleaseShard,
    Retire,
    SessionInfo,
    SessionKind,
    Surveyed,
)
from servicekit.doorbell import Doorbell
from servicekit.hops import Hop, HopCollector
from servicekit.lifecycle import Stop
from servicekit.pool_stats import Hold, PoolCollector, PoolStats
from servicekit.recovery import Recoveries
from servicekit.session import RENEWALS, Session, Stopped
from servicekit.settings import reachable_address
from servicekit.shape import pool_shape
from servicekit.status import ServiceStatus, service_status

READ_COUNT = 64  # entries of each stream in one read
FEW_ENDS = 4  # whose text need not be on its way before their results are made
READ_BLOCK_MS = 200
FULL_PAUSE_S = 0.1
LAST_EXPORT_S = 2.0  # for the traces of what ended last

_logger = structlog.stdlib.get_logger(__name__)


class DetokenizerService:
    """One detokenizer process."""

    kind = SessionKind.DETOKENIZER

    def __init__(
        self, settings: DetokenizerSettings, bus: Bus, tokenizer: Tokenizer, collector: SpanCollector | None = None
    ) -> None:
        """Reads nothing yet.

        Args:
            settings: what it was told.
            bus: the pool.
            tokenizer: of the model.
            collector: is told of requests that have ended; None: nobody is.
        """
        self._settings = settings
        self._bus = bus
        self._core = Detokenizer(tokenizer)  # has no requests; every shard has a sibling of it
        self._shards = LeasedShards(settings.num_shards)
        self._limits = LogLimits(settings.compact_entries, settings.compact_bytes)
        self._ttl_ms = int(settings.session_ttl_s * 1000)
        self._keep_at_s = 0.0
        self._gateways = Gateways(settings.session_ttl_s, settings.orphan_grace_s)
        self._bell = Doorbell(bus.keys, settings.stay_awake_ms / 1e3)
        self._deaths = Deaths()
        self._recoveries = Recoveries("shard")
        self.followers = Followers()
        self._hop = Hop("tokens")
        self._stats = ServiceStats(self._core.stats)
        self._pool_stats = PoolStats()
        self._collector = collector
        trace_of = None if collector is None else self._trace_of
        self._outbox = TextOutbox(bus.keys, self._gateways, settings.result_ttl_s, self._stats, trace_of)
        self._ahead = Ahead()
        self._shape = pool_shape(settings.num_shards, vocabulary=tokenizer.get_vocab(with_added_tokens=True))
        self._started_ns = time.time_ns()
        self._progress_ns = 0
        self._session: Session | None = None  # for other threads
        self._ready = False
        self._draining = False

    @property
    def name(self) -> str:
        """The name by which people call this process."""
        return self._settings.name

    def is_ready(self) -> bool:
        """Return whether it takes new work."""
        return self._ready and not self._draining

    def last_progress_ns(self) -> int:
        """The time of the loop's last turn, or now while it waits for the bus: `time.monotonic_ns()`."""
        session = self._session
        return max(self._progress_ns, session.waited_ns if session is not None else 0)

    def stats(self) -> ServiceStats:
        """Counts of now."""
        self._stats.num_live_requests = self._shards.num_requests
        self._stats.num_shards = len(self._shards)
        self._stats.log_lengths = self._shards.lengths()
        return self._stats

    def status(self) -> ServiceStatus:
        """The status that it tells."""
        stats = self.stats()
        return service_status(
            ready=self.is_ready(),
            draining=self._draining,
            started_ns=self._started_ns,
            figures={
                "live_requests": float(stats.num_live_requests),
                "leased_shards": float(stats.num_shards),
                "detokenized_tokens_total": float(stats.core.num_tokens),
            },
            hops=[self._hop],
        )

    def collectors(self) -> list[Collector]:
        """Its metrics."""
        return [
            DetokenizerCollector(self.stats),
            HopCollector([self._hop]),
            PoolCollector(lambda: [Hold(self._bus.keys.pool, self._pool_stats, self._bus.call_times)]),
            self._recoveries,
        ]

    def run(self, stop: Stop) -> None:
        """Serve until it has drained: at once if others can take the shards, else when its requests have ended."""
        session = self._session = Session(
            self._bus,
            self.kind,
            self.name,
            address=reachable_address(self._settings.grpc_address),
            ttl_ms=self._ttl_ms,
            stop=stop.now,
            shape=self._shape,
            stats=self._pool_stats,
        )
        exporter = None
        if self._collector is not None:
            exporter = TraceExporter(self._bus, self.name, self._collector, self._stats.tracing)
        try:
            session.connect(stop.draining)
            while not self._is_drained(stop):
                self._turn(session, stop)
            self._flush(session)
        except Stopped:
            _logger.warning("ended without the bus", unsent=len(self._outbox.calls))
        finally:
            for shard in self._shards:
                self._forget(shard)
            session.leave()
            if exporter is not None:
                exporter.stop(LAST_EXPORT_S)

    def _trace_of(self, retirement: Retirement) -> bytes:
        trace = retirement.trace
        is_told = is_sampled(trace.header, self._settings.otlp_traces_sample_ratio)
        return wire.encode_trace(trace) if is_told else b""

    def _is_drained(self, stop: Stop) -> bool:
        if not stop.draining.is_set():
            return False
        self._draining = True
        return stop.now.is_set() or self._shards.has_successor or not self._shards.num_requests

    def _flush(self, session: Session) -> None:
        self._outbox.retire(session.sid)
        try:
            session.connection.execute(self._outbox.calls)
        except (BusUnavailable, BusFull) as error:
            # A successor finds the same in the log and sends it.
            _logger.warning("left unsent", calls=len(self._outbox.calls), reason=str(error))

    def _turn(self, session: Session, stop: Stop) -> None:
        self._progress_ns = time.monotonic_ns()
        try:
            if time.monotonic() >= self._keep_at_s:
                self._keep(session)
            for follower in self.followers.take_new():
                self.followers.begin(follower, [shard.detokenizer for shard in self._shards])
            self._exchange(session, stop)
        except BusUnavailable as error:
            self._recover(session, error)
        except BusFull:
            self._outbox.drop_text()
            _logger.error("the Redis server is out of memory: text is held up")  # noqa: TRY400  no trace needed
            time.sleep(FULL_PAUSE_S)

    def _recover(self, session: Session, reason: BusUnavailable | None = None) -> None:
        self._outbox.calls[:0] = self._ahead.take_back()
        recovery = session.recover(reason)
        self._keep_at_s = 0.0
        if recovery.lost or recovery.new_run:
            # What is known may be more than what the log still has, or others have it: begin anew from the log.
            self._outbox.clear()
            self._shards.unsure.clear()
            self._gateways.forget()
            for shard in self._shards:
                self._forget(shard)

    # --- the hot path -------------------------------------------------------------------------------------------------

    def _exchange(self, session: Session, stop: Stop) -> None:
        """Write effects together with the next read, and perform what that leads to."""
        calls = self._outbox.calls
        num_requests = self._shards.num_requests
        if positions := self._shards.positions():
            positions |= self._bell.listen(is_idle=not num_requests)
        num_effects = len(calls)
        block_ms = 0 if self._outbox.num_ended else READ_BLOCK_MS
        read = Read(positions, READ_COUNT, block_ms, self._bell.awake_s(num_requests))
        answers = session.connection.execute([*calls, read] if positions else calls)
        self._outbox.calls = []
        self._note_done(calls, answers)
        if not positions:
            stop.wait(READ_BLOCK_MS / 1000)
            return
        entries: dict[bytes, list[Entry]] = answers[num_effects]
        received_ns = time.time_ns()
        self._bell.hear(entries)
        for shard in self._shards:
            for entry in entries.get(shard.log_stream, ()):
                began_s = time.perf_counter()
                taken = shard.take(entry)
                self._perform(session, shard, entry, taken, "tokens")
                if taken.sent_ns:
                    self._hop.observe(taken.sent_ns, received_ns, time.perf_counter() - began_s)
            for entry in entries.get(shard.attach_stream, ()):
                self._perform(session, shard, entry, shard.attach(entry), "attach")
            if shard.extent.is_long(self._limits):
                self._keep_at_s = 0.0
        if num_ended := self._outbox.num_ended:
            if num_ended > FEW_ENDS:
                self._send_ahead(session)
            self._outbox.retire(session.sid, MANY_ENDS)  # no more before the log is read again
        self._settle(session)

    def _note_done(self, calls: Sequence[Call[Any]], answers: Sequence[Any]) -> None:
        """Take note that calls have been carried out; `answers` begin with those to them."""
        if any(isinstance(call, Retire) and not done for call, done in zip(calls, answers, strict=False)):
            self._keep_at_s = 0.0  # ended already, or the lease is lost: find out

    def _send_ahead(self, session: Session) -> None:
        """Send the ends of many requests ahead: gateways get them while the results are made."""
        self._settle(session)
        calls, self._outbox.calls = self._outbox.calls, []
        self._outbox.calls = self._ahead.send(session.connection, calls)

    def _settle(self, session: Session) -> None:
        """Make sure that what was sent ahead has been carried out; what was not goes again, and finds the same."""
        calls, answers, again = self._ahead.settle(session.connection)
        self._note_done(calls, answers)
        self._outbox.calls[:0] = again

    def _perform(self, session: Session, shard: Shard, entry: Entry, taken: Taken, stream: str) -> None:
        if taken.poison:
            self._outbox.put_letter(entry, stream, taken.poison)
        self._outbox.put(session.sid, shard, taken.effects)
        if self.followers:
            self.followers.take(taken.effects)

    # --- leases -------------------------------------------------------------------------------------------------------

    def _keep(self, session: Session) -> None:
        """Renew, confirm what is held, shorten its logs, and move towards the fair share."""
        self._keep_at_s = time.monotonic() + self._ttl_ms / 1000 / RENEWALS
        self._outbox.retire(session.sid)  # before their rows are dropped, or the shard is given back
        renewal = session.tick(time.monotonic(), self.status().SerializeToString())
        calls: list[Call[Any]] = [*self._outbox.calls, *([renewal] if renewal else [])]
        num_before = len(calls)
        calls += self._shards.confirmations(session.sid)
        calls.append(session.roster.survey())
        answers = session.connection.execute(calls)
        if renewal and not answers[len(self._outbox.calls)]:
            self._recover(session)
            return
        self._outbox.calls = []
        for shard in self._shards.confirm(answers[num_before:]):
            _logger.warning("lost a shard", shard=shard.number)
            self._stats.num_lost_shards += 1
            self._forget(shard)
        sessions = self._sessions(session, answers[-1])
        self._note_gateways(sessions)
        self._deaths.note(sessions, time.monotonic())
        self._shards.note(sessions, session.sid)
        self._give_back(session, self._shards.surplus())
        self._compact(session)
        if not self._draining:
            self._take_shards(session)
        self._ready = True

    def _sessions(self, session: Session, surveyed: Surveyed | None) -> list[SessionInfo]:
        """All of them, after an answer to a survey and those that complete it."""
        while not session.roster.note(surveyed, time.monotonic()):
            surveyed = session.connection.call(session.roster.survey())
        return session.roster.sessions(time.monotonic())

    def _note_gateways(self, sessions: Iterable[SessionInfo]) -> None:
        """Note which gateways are there: they get text. What belongs to one that stays away is cancelled."""
        now_s = time.monotonic()
        requests = self._shards.routes()
        self._gateways.note(sessions, {route for _, route in requests}, now_s)
        for request_id, route in self._gateways.orphans(requests, now_s):
            # Unless its client comes back through another gateway at this moment.
            self._outbox.calls.append(Cancel(request_id, int(CancelReason.CLIENT), time.time_ns(), route=route))
            self._stats.num_orphans += 1

    def _compact(self, session: Session) -> None:
        """Shorten the logs. What has ended must have been retired before: its rows are kept by nobody."""
        for shard in self._shards:
            if (compaction := shard.extent.compaction(self._limits)) is None:
                continue
            calls = shard.compact(compaction, session.sid, time.time_ns())
            num_bytes = sum(len(payload) for call in calls for _, payload in call.checkpoints)
            if not all(self._execute(session, calls)):
                self._keep_at_s = 0.0  # the lease is lost: find out
                continue
            shard.extent.compacted(compaction, num_bytes)
            if compaction.request_ids:
                self._stats.num_compactions += 1
                self._stats.num_checkpoint_bytes += num_bytes

    def _give_back(self, session: Session, shards: Iterable[Shard]) -> None:
        for shard in shards:
            _logger.info("gave back a shard", shard=shard.number)
            self._forget(shard)
            self._shards.unsure.add(shard.number)
            session.connection.call(ReleaseShard(session.sid, shard.number))
            self._shards.unsure.discard(shard.number)

    def _take_shards(self, session: Session) -> None:
        heard_s, has_taken = self._deaths.last_heard_s(), False
        for number in self._shards.wanted(session.sid):
            self._shards.unsure.add(number)
            if session.connection.call(LeaseShard(session.sid, number)):
                self._rebuild(session, number)
                has_taken = True
                if heard_s is not None:
                    self._recoveries.observe("shard", time.monotonic() - heard_s)
            self._shards.unsure.discard(number)
        if has_taken:
            self._deaths.settle()

    def _forget(self, shard: Shard) -> None:
        self._shards.drop(shard)
        self._outbox.forget(shard)
        for request_id in shard.detokenizer.live_requests():
            self.followers.lose(request_id)

    # --- taking a shard over ------------------------------------------------------------------------------------------

    def _rebuild(self, session: Session, number: int) -> None:
        """Rebuild a shard that was taken. Gateways get all text of what lives in it, and keep what is new to them."""
        shard = Shard(number, self._bus.keys, self._core.sibling())
        for entry, taken in rebuild(lambda calls: self._execute(session, calls), session.sid, shard):
            if taken.poison:
                self._outbox.put_letter(entry, "tokens", taken.poison)
            self._outbox.put_whole(session.sid, shard, taken.effects)
        for route, rows in shard.detokenizer.snapshots():
            self._outbox.put_text(session.sid, route, rows)
        self._shards.add(shard)
        self._stats.num_rebuilds += 1
        num_entries, num_bytes = shard.extent.num_entries, shard.extent.num_bytes
        live = len(shard.detokenizer)
        _logger.info("took a shard", shard=number, entries=num_entries, bytes=num_bytes, live_requests=live)

    def _execute(self, session: Session, calls: Sequence[Call[Any]]) -> list[Any]:
        """Carry out calls of something long, and stay alive meanwhile."""
        self._progress_ns = time.monotonic_ns()
        renewal = session.tick(time.monotonic(), self.status().SerializeToString())
        answers = session.connection.execute([*calls, renewal] if renewal else calls)
        if renewal and not answers.pop():
            raise BusUnavailable("the session was fenced while it took a shard")
        return answers
