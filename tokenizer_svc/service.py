"""The tokenizer's loop: read hints, fetch requests, tokenize, write what came out with the next read."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import structlog
from prometheus_client.registry import Collector

from contract.domain.errors import ErrorCode, PenstockError, PoisonMessageError
from contract.domain.request import Header, format_request_id
from servicekit.bus import Bus, BusFull, BusUnavailable
from servicekit.bus import keys as k
from servicekit.bus.ahead import Ahead
from servicekit.bus.calls import (
    Acknowledge,
    Call,
    Entry,
    Fetch,
    Read,
    ReadGroup,
    Reclaim,
    Reject,
    Renew,
    RequestState,
    SessionInfo,
    SessionKind,
    Survey,
    Surveyed,
    Tokenized,
)
from servicekit.bus.dead_letters import dead_letter
from servicekit.doorbell import Doorbell
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
from tokenizer_svc.metrics import TokenizerCollector, TokenizerStats
from tokenizer_svc.settings import TokenizerSettings

READ_COUNT = 32  # hints in one read
FEW_OUTCOMES = 8  # that are sent before the rest of what one read brought is tokenized
READ_BLOCK_MS = 250
# While threads work on long prompts, whose outcomes the loop sends: between two reads, none of which waits. An idle
# server ends a wait to a tenth of a second only.
BUSY_WAIT_S = 0.002
MAX_LONG_PROMPTS = 128  # in threads or waiting for one; beyond it hints are left to other tokenizers
FULL_PAUSE_S = 0.1
SURVEY_S = 0.25  # between two looks for tokenizers that died with hints in hand

_logger = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt that is to be tokenized."""

    entry_id: bytes  # of its hint
    request_id: bytes
    header: bytes
    body: bytes
    prompt: bytes
    sent_ns: int
    received_ns: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of a job."""

    call: Call[Any]
    num_tokens: int  # 0: rejected
    work_s: float


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
        self._pool = ThreadPoolExecutor(settings.num_threads, thread_name_prefix="long-prompt")
        self._bell = Doorbell(bus.keys, settings.stay_awake_ms / 1e3)
        self._peeked = b"0-0"  # entry of `prompts` that was seen last
        self._must_ask = False  # a prompt was seen that the group has not been asked for yet
        self._num_read = 0  # hints in the last read
        self._long: dict[Future[_Outcome], _Job] = {}
        self._unsent: list[Call[Any]] = []  # outcomes, to go with the next read; may be sent again
        self._ahead = Ahead()
        self._reclaim_at_s = 0.0
        self._renew_at_s = 0.0
        self._survey_at_s = 0.0
        # Who was given hints and does not work on them; at first, whoever had this name before.
        self._leftover_names: list[str] = [settings.name]

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
        """Of the loop's last turn, or of now, while it waits for the bus."""
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
        """Serves until it has drained: what it has read is finished, new hints are left to others."""
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
            self._pool.shutdown(wait=False, cancel_futures=True)
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
        self._leftover_names = [self.name]  # an answer may have been lost

    def _exchange(self, session: Session, *, may_read: bool) -> list[_Job]:
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
        reads = self._reads() if may_read and len(self._long) < MAX_LONG_PROMPTS else []
        calls += reads
        answers = session.connection.execute(calls) if calls else []
        del self._unsent[:num_sent]
        found = answers[len(answers) - len(reads) :]
        if found and isinstance(found[-1], dict):
            self._hear(found.pop())
        if survey is not None:
            self._note(session, answers[-len(reads) - 1])
        if renewal is not None and not answers[num_sent]:
            self._recover(session)
        if found and found[-1]:
            self._peeked = found[-1][-1].entry_id
        working = {job.entry_id for job in self._long.values()}
        read = {entry.entry_id: entry for entries in found for entry in entries if entry.entry_id not in working}
        self._num_read = len(read)
        left_behind = read.keys() - {entry.entry_id for entry in found[-1]} if found else ()
        self._stats.num_reclaimed += len(left_behind)
        for entry_id in left_behind:
            waited_ns = time.time_ns() - _decimal(read[entry_id].fields.get(k.SENT_NS))
            self._recoveries.observe("prompt", max(0.0, waited_ns / 1e9))
        return self._jobs(session, list(read.values()))

    def _note(self, session: Session, surveyed: Surveyed | None) -> None:
        """Take over what a survey has told; the rest of it at the next turn."""
        now_s = time.monotonic()
        if session.roster.note(surveyed, now_s):
            self._leftover_names = _leftovers(session.roster.sessions(now_s), session.sid)
        else:
            self._survey_at_s = 0.0

    def _reads(self) -> list[Call[Any]]:
        """Read what others left, and last, waited for, what is new."""
        prompts, consumer = self._bus.keys.prompts, self.name.encode()
        names, self._leftover_names = self._leftover_names, []
        reads: list[Call[Any]] = [
            ReadGroup(prompts, k.TOKENIZERS, name.encode(), READ_COUNT, pending=True) for name in names
        ]
        if time.monotonic() >= self._reclaim_at_s:
            # Whatever became of who took them, and of what is known about it.
            self._reclaim_at_s = time.monotonic() + self._settings.reclaim_after_s / 2
            abandoned_ms = int(self._settings.reclaim_after_s * 1000)
            reads.append(Reclaim(prompts, k.TOKENIZERS, consumer, abandoned_ms, READ_COUNT))
        block_ms = 0 if names or self._must_ask or self._long else READ_BLOCK_MS
        self._must_ask = False
        awake_s = self._bell.awake_s(self._num_read)
        is_idle = block_ms == READ_BLOCK_MS and not self._unsent and not awake_s
        listening = self._bell.listen(is_idle=is_idle)
        reads.append(ReadGroup(prompts, k.TOKENIZERS, consumer, READ_COUNT, 0 if listening else block_ms, awake_s))
        if listening:
            # A group's read cannot wait for the doorbell: wait for either, then ask the group, and wait for nothing
            # with it: its prompts would wait too. Who is awake asks the group alone, and hears afterwards who has rung.
            reads.append(Read({prompts: self._peeked} | listening, 1, block_ms))
        return reads

    def _hear(self, entries: dict[bytes, list[Entry]]) -> None:
        """Read what comes while idle: a prompt that the group is asked for next, or a ring."""
        for entry in entries.get(self._bus.keys.prompts, ()):
            self._peeked, self._must_ask = entry.entry_id, True
        self._bell.hear(entries)

    def _renewal(self, session: Session) -> Renew | None:
        # Putting the status together costs more than a prompt: only when it may be due.
        now_s = time.monotonic()
        if now_s < self._renew_at_s:
            return None
        self._renew_at_s = now_s + self._settings.session_ttl_s / RENEWALS
        return session.tick(now_s, self.status().SerializeToString())

    def _jobs(self, session: Session, entries: Sequence[Entry]) -> list[_Job]:
        """The jobs that hints ask for. They bring a copy of the request; one that does not is looked up."""
        received_ns = time.time_ns()
        jobs: list[_Job] = []
        bare: list[Entry] = []
        for entry in entries:
            fields = entry.fields
            sent_ns = _decimal(fields.get(k.SENT_NS))
            if len(fields.get(k.REQUEST, b"")) != 16:
                self._bury(fields, "a hint without a request id")
                self._unsent.append(self._acknowledge(entry.entry_id))
            elif fields.keys() >= {k.HEADER, k.BODY, k.PROMPT}:
                request = fields[k.REQUEST], fields[k.HEADER], fields[k.BODY], fields[k.PROMPT]
                jobs.append(_Job(entry.entry_id, *request, sent_ns, received_ns))
            else:
                bare.append(entry)
        fetched = session.connection.execute([Fetch(entry.fields[k.REQUEST]) for entry in bare]) if bare else []
        for entry, stored in zip(bare, fetched, strict=True):
            if stored is None or stored.state is not RequestState.PROMPT:
                self._unsent.append(self._acknowledge(entry.entry_id))
            else:
                request = stored.request_id, stored.header, stored.body, stored.prompt
                jobs.append(_Job(entry.entry_id, *request, _decimal(entry.fields.get(k.SENT_NS)), received_ns))
        return jobs

    def _take(self, session: Session, jobs: Sequence[_Job]) -> None:
        sid = session.sid
        for number, job in enumerate(jobs, 1):
            try:
                header = wire.decode_header(job.header)
                message = wire.decode_body(job.body, job.prompt)
            except PoisonMessageError as error:
                fields = {k.REQUEST: job.request_id, k.HEADER: job.header, k.BODY: job.body, k.PROMPT: job.prompt}
                self._bury(fields, str(error))
                self._finish(job, _Outcome(self._reject(sid, job, 1, wire.unreadable(str(error))), 0, 0.0))
                continue
            if wire.num_chars(message) > self._settings.long_prompt_chars:
                self._long[self._pool.submit(self._tokenize, sid, job, header, message)] = job
            else:
                self._finish(job, self._tokenize(sid, job, header, message))
            if number % FEW_OUTCOMES == 0 and number < len(jobs):
                self._send_ahead(session)
        if self._unsent and len(jobs) <= 1:
            # Who waits is answered when all of a write has been carried out: more than outcomes must not be in it. But
            # of several prompts the next are read in the same exchange, which takes as long as many of them.
            self._send_ahead(session)
        self._stats.num_long_prompts = len(self._long)

    def _send_ahead(self, session: Session) -> None:
        """Schedulers get the first of many prompts while the last are tokenized, and one before all else is done."""
        calls, self._unsent = self._unsent, []
        self._settle(session)
        self._unsent += self._ahead.send(session.connection, calls)

    def _settle(self, session: Session) -> None:
        """Make sure that what was sent ahead has been carried out; what was not goes again."""
        *_, again = self._ahead.settle(session.connection)
        self._unsent[:0] = again

    def _collect(self) -> None:
        """Takes over what threads have finished; waits a moment for the first one."""
        if self._long:
            wait(self._long, BUSY_WAIT_S, FIRST_COMPLETED)
        for future in [future for future in self._long if future.done()]:
            self._finish(self._long.pop(future), future.result())
        self._stats.num_long_prompts = len(self._long)

    def _finish(self, job: _Job, outcome: _Outcome) -> None:
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

    def _tokenize(self, sid: bytes, job: _Job, header: Header, message: wire.GenerateRequest) -> _Outcome:
        """In the loop or in a thread: whatever happens becomes an outcome."""
        began_s = time.perf_counter()
        num_tokens = 0
        try:
            now_ns = time.time_ns()
            if 0 < header.deadline_ns <= now_ns:
                raise PenstockError(  # noqa: TRY301
                    ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed before it was tokenized"
                )
            prompt = self._prompts.tokenize(wire.decode_request(header, message))
            now_ns, num_tokens = time.time_ns(), len(prompt.token_ids)
            meta = wire.encode_tokenized(prompt, tokenizing_ns=job.received_ns, tokenized_ns=now_ns)
            call: Call[Any] = Tokenized(
                job.request_id, job.entry_id, meta, now_ns, num_tokens, wire.pack(prompt.token_ids)
            )
        except PenstockError as error:
            call = self._reject(sid, job, wire.num_samples(message), error)
        except BaseException as error:
            # A panic inside the tokenizer library is no Exception, and must not take this process along.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            _logger.exception("tokenizing failed", request_id=format_request_id(job.request_id))
            internal = PenstockError(
                ErrorCode.INTERNAL, f"the prompt could not be tokenized ({type(error).__name__}); see the service's log"
            )
            call = self._reject(sid, job, wire.num_samples(message), internal)
        return _Outcome(call, num_tokens, time.perf_counter() - began_s)

    def _reject(self, sid: bytes, job: _Job, n: int, error: PenstockError) -> Reject:
        request_id = job.request_id
        _logger.debug("rejected", request_id=format_request_id(request_id), reason=error.message)
        shard = int.from_bytes(request_id[-4:], "big") % self._settings.num_shards
        row = wire.encode_rejection(request_id, n, error, sid, time.time_ns())
        return Reject(request_id, job.entry_id, shard, row)

    def _acknowledge(self, entry_id: bytes) -> Acknowledge:
        return Acknowledge(self._bus.keys.prompts, k.TOKENIZERS, entry_id)

    def _bury(self, fields: dict[bytes, bytes], why: str) -> None:
        _logger.error("dead letter", stream="prompts", why=why)
        self._stats.num_dead_letters += 1
        self._unsent.append(dead_letter(self._bus.keys, "prompts", fields, why))


def _leftovers(sessions: Iterable[SessionInfo], sid: bytes) -> list[str]:
    """The names of dead tokenizers, if it is this session that sees to what they were given: one of the living does."""
    tokenizers = [session for session in sessions if session.kind is SessionKind.TOKENIZER]
    living = [session for session in tokenizers if session.alive]
    if sid != min((session.sid for session in living), default=sid):
        return []
    # Who came back under its old name looks for itself.
    return sorted({session.name for session in tokenizers} - {session.name for session in living})


def _decimal(text: bytes | None) -> int:
    """A time that only measures: one that cannot be read counts as now."""
    return int(text) if text is not None and text.isdigit() else time.time_ns()
