"""The tokenizer's loop: read hints, fetch requests, tokenize, write what came out with the next read."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog
from prometheus_client.registry import Collector

from contract.domain.errors import PoisonMessageError
from contract.domain.request import format_request_id
from servicekit.bus import Bus, BusFull, BusUnavailable
from servicekit.bus import keys as k
from servicekit.bus.ahead import Ahead
from servicekit.bus.calls import Call, Entry, Fetch, Renew, RequestState, SessionKind, Survey, Surveyed
from servicekit.bus.dead_letters import dead_letter
from servicekit.hops import Hop, HopCollector
from servicekit.lifecycle import Stop
from servicekit.logs import is_debugging
from servicekit.pool_stats import Hold, PoolCollector, PoolStats
from servicekit.recovery import Recoveries
from servicekit.session import RENEWALS, Session, Stopped
from servicekit.settings import reachable_address
from servicekit.shape import pool_shape
from servicekit.status import ServiceStatus, service_status
from tokenizer_svc import wire
from tokenizer_svc.core.tokenize import PromptTokenizer
from tokenizer_svc.core.vocabulary import Vocabulary
from tokenizer_svc.hints import HintReader
from tokenizer_svc.jobs import Job, Outcome, Outcomes, sent_ns
from tokenizer_svc.long_prompts import LongPrompts
from tokenizer_svc.metrics import TokenizerCollector, TokenizerStats
from tokenizer_svc.settings import TokenizerSettings

FEW_OUTCOMES = 8  # that are sent before the rest of what one read brought is tokenized
# While threads work on long prompts, whose outcomes the loop sends: between two reads, none of which waits. An idle
# server ends a wait to a tenth of a second only.
BUSY_WAIT_S = 0.002
MAX_LONG_PROMPTS = 128  # in threads or waiting for one; beyond it hints are left to other tokenizers
FULL_PAUSE_S = 0.1
SURVEY_S = 0.25  # between two looks for tokenizers that died with hints in hand

_logger = structlog.stdlib.get_logger(__name__)


class TokenizerService:
    """One tokenizer process: a loop for short prompts, threads for long ones."""

    kind = SessionKind.TOKENIZER

    def __init__(self, settings: TokenizerSettings, bus: Bus, vocabulary: Vocabulary) -> None:
        self._settings = settings
        self._bus = bus
        self._prompts = PromptTokenizer(vocabulary)
        self._shape = pool_shape(
            settings.num_shards,
            vocabulary=vocabulary.tokenizer.get_vocab(with_added_tokens=True),
            chat_templates=vocabulary.chat.sources,
            generation_defaults={**vocabulary.defaults.stated, "eos": vocabulary.eos_token_ids},
        )
        self._defaults = wire.encode_defaults(vocabulary.defaults)
        self._chat_facts = wire.encode_chat_facts(vocabulary.facts)
        self._pooling = wire.encode_pooling_facts(vocabulary.pooling)
        self._not_done = vocabulary.defaults_not_done
        self._hop = Hop("prompts")
        self._stats = TokenizerStats()
        self._pool_stats = PoolStats()
        self._recoveries = Recoveries("prompt")
        self._started_ns = time.time_ns()
        self._progress_ns = 0
        self._session: Session | None = None  # for other threads
        self._ready = False
        self._draining = False
        self._hints = HintReader(bus.keys, settings.name, settings.reclaim_after_s, settings.stay_awake_ms / 1e3)
        self._outcomes = Outcomes(self._prompts, settings.num_shards)
        self._long = LongPrompts(settings.num_threads)
        self._unsent: list[Call[Any]] = []  # outcomes, to go with the next read; may be sent again
        self._ahead = Ahead()
        self._renew_at_s = 0.0
        self._survey_at_s = 0.0

    @property
    def name(self) -> str:
        """The name by which people call this process."""
        return self._settings.name

    @property
    def prompts(self) -> PromptTokenizer:
        """The core, for the gRPC service."""
        return self._prompts

    def is_ready(self) -> bool:
        """Return whether it takes new work."""
        return self._ready and not self._draining

    def last_progress_ns(self) -> int:
        """The time of the loop's last turn, or now while it waits for the bus: `time.monotonic_ns()`."""
        session = self._session
        return max(self._progress_ns, session.waited_ns if session is not None else 0)

    def status(self) -> ServiceStatus:
        """The status that it tells."""
        status = service_status(
            ready=self.is_ready(),
            draining=self._draining,
            started_ns=self._started_ns,
            figures={
                "tokenizer_prompts_total": float(self._stats.num_tokenized + self._stats.num_rejected),
                "tokenizer_tokens_total": float(self._stats.num_tokens),
                "tokenizer_long_prompts": float(self._stats.num_long_prompts),
            },
            hops=[self._hop],
        )
        status.generation_defaults.CopyFrom(self._defaults)
        status.chat.CopyFrom(self._chat_facts)
        status.pooling.CopyFrom(self._pooling)
        return status

    def collectors(self) -> list[Collector]:
        """Its metrics."""
        return [
            TokenizerCollector(lambda: self._stats),
            HopCollector([self._hop]),
            PoolCollector(lambda: [Hold(self._bus.keys.pool, self._pool_stats, self._bus.call_times)]),
            self._recoveries,
        ]

    def run(self, stop: Stop) -> None:
        """Serve until it has drained: what it has read is finished, new hints are left to others."""
        if self._not_done:
            _logger.warning("the generation config asks for what is not implemented", names=", ".join(self._not_done))
        session = self._session = Session(
            self._bus,
            self.kind,
            self.name,
            address=reachable_address(self._settings.grpc_address),
            ttl_ms=int(self._settings.session_ttl_s * 1000),
            stop=stop.now,
            shape=self._shape,
            stats=self._pool_stats,
        )
        try:
            session.connect(stop.draining)
            self._ready = True
            while not stop.draining.is_set():
                self._turn(session, may_read=True)
            self._draining = True
            while (self._long or self._unsent) and not stop.now.is_set():
                self._turn(session, may_read=False)
        except Stopped:
            _logger.warning("ended without the bus", unsent=len(self._unsent), unfinished=len(self._long))
        finally:
            self._long.stop()
            session.leave()

    def _turn(self, session: Session, *, may_read: bool) -> None:
        self._progress_ns = time.monotonic_ns()
        try:
            jobs = self._exchange(session, may_read=may_read)
            self._take(session, jobs)
            self._settle(session)
        except BusUnavailable as error:
            self._recover(session, error)
        except BusFull:
            # What was refused is sent again; the server has to get room first.
            _logger.error("the Redis server is out of memory: prompts wait")  # noqa: TRY400  no trace needed
            time.sleep(FULL_PAUSE_S)

    def _recover(self, session: Session, reason: BusUnavailable | None = None) -> None:
        self._unsent[:0] = self._ahead.take_back()
        session.recover(reason)
        self._renew_at_s = self._survey_at_s = 0.0
        self._hints.read_own()

    def _exchange(self, session: Session, *, may_read: bool) -> list[Job]:
        """One write and one read: outcomes out, hints in."""
        self._collect()
        calls: list[Call[Any]] = list(self._unsent)
        num_sent = len(calls)
        renewal = self._renewal(session)
        if renewal is not None:
            calls.append(renewal)
        survey: Survey | None = None
        if time.monotonic() >= self._survey_at_s:
            self._survey_at_s = time.monotonic() + SURVEY_S
            calls.append(survey := session.roster.survey())
        reads: list[Call[Any]] = []
        if may_read and len(self._long) < MAX_LONG_PROMPTS:
            reads = self._hints.reads(may_wait=not self._long, is_idle=not self._unsent)
        calls += reads
        answers = session.connection.execute(calls) if calls else []
        del self._unsent[:num_sent]
        if survey is not None:
            self._note(session, answers[-len(reads) - 1])
        if renewal is not None and not answers[num_sent]:
            self._recover(session)
        hints = self._hints.take(answers[len(answers) - len(reads) :], (job.entry_id for job in self._long))
        self._stats.num_reclaimed += len(hints.left_behind)
        for hint in hints.left_behind:
            self._recoveries.observe("prompt", max(0.0, (time.time_ns() - sent_ns(hint)) / 1e9))
        return self._jobs(session, hints.all)

    def _note(self, session: Session, surveyed: Surveyed | None) -> None:
        """Take over what a survey has told; the rest of it at the next turn."""
        now_s = time.monotonic()
        if session.roster.note(surveyed, now_s):
            self._hints.take_over(session.roster.sessions(now_s), session.sid)
        else:
            self._survey_at_s = 0.0

    def _renewal(self, session: Session) -> Renew | None:
        # Putting the status together costs more than a prompt: only when it may be due.
        now_s = time.monotonic()
        if now_s < self._renew_at_s:
            return None
        self._renew_at_s = now_s + self._settings.session_ttl_s / RENEWALS
        return session.tick(now_s, self.status().SerializeToString())

    def _jobs(self, session: Session, hints: Sequence[Entry]) -> list[Job]:
        """The jobs that hints ask for. They bring a copy of the request; one that does not is looked up."""
        received_ns = time.time_ns()
        jobs: list[Job] = []
        bare: list[Entry] = []
        for hint in hints:
            if len(hint.fields.get(k.REQUEST, b"")) != 16:
                self._bury(hint.fields, "a hint without a request id")
                self._unsent.append(self._hints.acknowledge(hint))
            elif (job := Job.of_hint(hint, received_ns)) is not None:
                jobs.append(job)
            else:
                bare.append(hint)
        fetched = session.connection.execute([Fetch(hint.fields[k.REQUEST]) for hint in bare]) if bare else []
        for hint, stored in zip(bare, fetched, strict=True):
            if stored is None or stored.state is not RequestState.PROMPT:
                self._unsent.append(self._hints.acknowledge(hint))
            else:
                jobs.append(Job.of_request(hint, stored, received_ns))
        return jobs

    def _take(self, session: Session, jobs: Sequence[Job]) -> None:
        sid = session.sid
        for number, job in enumerate(jobs, 1):
            try:
                header = wire.decode_header(job.header)
                message = wire.decode_body(job.body, job.prompt)
            except PoisonMessageError as error:
                fields = {k.REQUEST: job.request_id, k.HEADER: job.header, k.BODY: job.body, k.PROMPT: job.prompt}
                self._bury(fields, str(error))
                self._finish(job, self._outcomes.unreadable(sid, job, str(error)))
                continue
            if wire.num_chars(message) > self._settings.long_prompt_chars:
                self._long.start(job, partial(self._outcomes.of, sid, job, header, message))
            else:
                self._finish(job, self._outcomes.of(sid, job, header, message))
            if number % FEW_OUTCOMES == 0 and number < len(jobs):
                self._send_ahead(session)
        if self._unsent and len(jobs) <= 1:
            # Who waits is answered when all of a write has been carried out: more than outcomes must not be in it. But
            # of several prompts the next are read in the same exchange, which takes as long as many of them.
            self._send_ahead(session)
        self._stats.num_long_prompts = len(self._long)

    def _send_ahead(self, session: Session) -> None:
        """Send outcomes ahead: schedulers get the first of many while the last are made, one alone before all else."""
        calls, self._unsent = self._unsent, []
        self._settle(session)
        self._unsent += self._ahead.send(session.connection, calls)

    def _settle(self, session: Session) -> None:
        """Make sure that what was sent ahead has been carried out; what was not goes again."""
        *_, again = self._ahead.settle(session.connection)
        self._unsent[:0] = again

    def _collect(self) -> None:
        """Take over what threads have finished; waits a moment for the first one."""
        for job, outcome in self._long.finished(BUSY_WAIT_S):
            self._finish(job, outcome)
        self._stats.num_long_prompts = len(self._long)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        self._unsent.append(outcome.call)
        self._stats.num_tokens += outcome.num_tokens
        if outcome.num_tokens:
            self._stats.num_tokenized += 1
            if is_debugging():
                request_id = format_request_id(job.request_id)
                _logger.debug("tokenized", request_id=request_id, num_tokens=outcome.num_tokens)
        else:
            self._stats.num_rejected += 1
        self._hop.observe(job.sent_ns, job.received_ns, outcome.work_s)

    def _bury(self, fields: dict[bytes, bytes], why: str) -> None:
        _logger.error("dead letter", stream="prompts", why=why)
        self._stats.num_dead_letters += 1
        self._unsent.append(dead_letter(self._bus.keys, "prompts", fields, why))
