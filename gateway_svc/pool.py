"""One pool as a gateway serves it: its text reader, the session's keeper, the outbox, housekeeping."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import structlog

from contract.domain.errors import ErrorCode, PenstockError, PoisonMessageError
from gateway_svc import wire
from gateway_svc.call import Sink
from gateway_svc.core.admission import Crowd
from gateway_svc.core.formats.choice import choose_formats
from gateway_svc.core.models import Catalogue, ModelFacts, OfferedModel, catalogue
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.stats import GatewayStats
from gateway_svc.core.streams import DeliveredSequence
from gateway_svc.delivery import Delivery
from gateway_svc.intake import Intake
from gateway_svc.link import Link
from gateway_svc.pipeline import PipelineReading, read_pipeline
from gateway_svc.prompt_outputs import PromptReader, prompt_reader, with_prompt_outputs
from gateway_svc.reception import Reception
from gateway_svc.settings import GatewaySettings
from gateway_svc.vocabulary import TokenizerAccess, TokenizerServices, Vocabulary
from servicekit.bus import keys as k
from servicekit.bus.call_times import CallTimes
from servicekit.bus.calls import (
    CountWaiting,
    Entry,
    LastId,
    Length,
    Read,
    ReadServerState,
    ReadStatus,
    ServerState,
    SessionInfo,
    SessionKind,
)
from servicekit.bus.dead_letters import dead_letter
from servicekit.bus.interface import Bus, BusFull, BusUnavailable
from servicekit.hops import Hop
from servicekit.lifecycle import STALLED_AFTER_S
from servicekit.pool_stats import PoolStats
from servicekit.roster import Roster
from servicekit.settings import reachable_address
from servicekit.shape import pool_shape

READ_BLOCK_MS = 1000
READ_COUNT = 64  # batches in one read
HOUSEKEEPING_S = 1.0
SERVER_STATE_S = 10.0  # between two questions how the server is
_logger = structlog.stdlib.get_logger(__name__)


class Pool:
    """All that a gateway has for one pool. Lives in the gateway's event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        bus: Bus,
        *,
        crowd: Crowd,
        hop: Hop,
        stats: GatewayStats,
        label: str = "",
    ) -> None:
        """Serves nobody yet.

        Args:
            settings: of the gateway, in this pool.
            bus: the pool's.
            crowd: for whom the gateway serves, which this adds to.
            hop: where it is counted how long text was on its way.
            stats: where all else is counted.
            label: its name in request ids; empty: they have none, as it is the only one.
        """
        self.name = label or settings.pool
        self._bus = bus
        self.label = label
        self._num_shards = settings.num_shards
        self._hop = hop
        self.stats = stats
        self.pool_stats = PoolStats()
        self.link = Link(
            bus,
            settings.name,
            reachable_address(settings.grpc_address),
            settings.session_ttl_s,
            awake_s=settings.stay_awake_ms / 1e3,
            shape=pool_shape(settings.num_shards),
            stats=self.pool_stats,
        )
        self.delivery = Delivery(
            self.link,
            settings.bounds,
            resume_grace_s=settings.resume_grace_s,
            outage_patience_s=settings.outage_patience_s,
            stats=self.stats,
            crowd=crowd,
        )
        patience_s = settings.outage_patience_s
        self.reception = Reception(self.delivery, self.link, patience_s, self.stats, crowd, label=label)
        self.intake = Intake(lambda: self.catalogue, settings.default_timeout_s)
        access = TokenizerAccess(
            settings.control_token, settings.tokenizer_tls_ca, settings.tokenizer_tls_name, settings.tls_files
        )
        self._tokenizers = TokenizerServices(self._sessions, access)
        self.link.rerouted = self._reroute
        self._has_vllm_names = settings.metrics_aliases == "vllm"
        self._started_s = int(time.time())
        self._model_names = settings.served_model_name
        self._format_names = settings.tool_format, settings.reasoning_format
        self._offered: Sequence[OfferedModel] = ()
        self._facts: ModelFacts | None = None  # None: no tokenizer has told them so far
        self.changed: Callable[[], None] = lambda: None  # is told of another catalogue
        self.catalogue = Catalogue()
        self._renew_catalogue()
        self._rerouted = True
        self._stream = b""
        self._position = b"0-0"
        self.progress_ns = 0  # of the text reader's last turn, idle ones and those without a server included

    @property
    def is_ready(self) -> bool:
        """Return whether its requests are taken."""
        served = self.catalogue
        return self.link.connected and bool(served.models) and served.told_defaults is not None

    @property
    def is_named(self) -> bool:
        """Return whether the operator names its model; else its workers do."""
        return bool(self._model_names)

    @property
    def call_times(self) -> CallTimes:
        """Times that its server takes to answer."""
        return self._bus.call_times

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the pool."""
        return self._tokenizers

    def told_prompts(self, sink: Sink, have: Sequence[DeliveredSequence] | None, *, form: ReplyForm) -> Sink:
        """The sink of a call whose client has this of each choice; it is told logprobs of prompts if it asked."""
        return with_prompt_outputs(sink, form, self.prompt_reader(form), have)

    def prompt_reader(self, form: ReplyForm) -> PromptReader:
        """Reads the logprobs of a call's prompts."""
        return prompt_reader(self.delivery, self.vocabulary, form)

    def offer(self, model_names: tuple[str, ...]) -> None:
        """From now on its model is called so; empty: as its workers register it."""
        self._model_names = model_names
        self._renew_catalogue()

    def trouble(self) -> str:
        """The reason why it makes no progress; empty: it does."""
        idle_s = (time.monotonic_ns() - self.progress_ns) * 1e-9
        if self.progress_ns and idle_s > STALLED_AFTER_S:
            return f"the text reader has not turned for {idle_s:.0f} s"
        return ""

    async def run(self, status: Callable[[], bytes]) -> None:
        """Everything that needs the bus, until it is cancelled; begins when the bus is there.

        Raises:
            PenstockError: INTERNAL: the server is not fit for a pool.
        """
        await self.link.open()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_text())
            group.create_task(self.link.keep(status))
            group.create_task(self.delivery.outbox.run())
            group.create_task(self._keep_house())

    async def close(self) -> None:
        """Leaves in order; `run` has ended."""
        await self._tokenizers.close()
        await self.delivery.outbox.flush()
        await self.link.close()

    async def pipeline(self) -> PipelineReading:
        """The state of the whole pool.

        Raises:
            PenstockError: UNAVAILABLE: the server does not answer.
        """
        unavailable = PenstockError(ErrorCode.UNAVAILABLE, "the Redis server does not answer; ask again")
        if not self.link.connected:
            raise unavailable
        try:
            return await read_pipeline(self.link.execute, self._bus.keys, self._num_shards)
        except BusUnavailable as error:
            raise unavailable from error

    def _sessions(self) -> list[SessionInfo]:
        return self.link.roster.sessions(asyncio.get_running_loop().time())

    def _reroute(self) -> None:
        self._rerouted = True

    async def _read_text(self) -> None:
        while True:
            self.progress_ns = time.monotonic_ns()
            if not self.link.connected:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self.link.wait_connected()
                continue
            try:
                if self._rerouted:
                    await self._begin_reading()
                    self.progress_ns = time.monotonic_ns()
                bell = self.link.bell
                streams = {self._stream: self._position} | bell.listen(is_idle=not self.stats.num_streams)
                # An event loop that waits for this read alone would sleep.
                block_ms = 0 if bell.awake_s(self.stats.num_streams) else READ_BLOCK_MS
                found = await self.link.read(Read(streams, READ_COUNT, block_ms))
            except BusUnavailable:
                continue
            bell.hear(found)
            for entry in found.get(self._stream, ()):
                if self._rerouted or not self.link.connected:
                    # The server may have lost what this text comes from, and been told already what clients have.
                    break
                self._position = entry.entry_id
                await self._receive(entry)

    async def _begin_reading(self) -> None:
        """Begin at the end of the stream: the re-attachments that follow ask again for what stands in it."""
        self._stream = self.link.text_stream
        self._position = await self.link.call(LastId(self._stream))
        self._rerouted = False
        self.delivery.attach_all()

    async def _receive(self, entry: Entry) -> None:
        if k.PAYLOAD not in entry.fields and k.REQUEST in entry.fields:
            self.delivery.ask_again(entry.fields[k.REQUEST])
            return
        received_ns, began_s = time.time_ns(), time.perf_counter()
        try:
            sent_ns, rows = wire.decode_text(entry.fields.get(k.PAYLOAD, b"\xff"))
        except PoisonMessageError as error:
            await self._bury(entry, str(error))
            return
        self.delivery.deliver(rows, asyncio.get_running_loop().time())
        self._hop.observe(sent_ns, received_ns, time.perf_counter() - began_s)
        # Several batches at once: requests and sockets get their turn between them.
        await asyncio.sleep(0)

    async def _bury(self, entry: Entry, why: str) -> None:
        """A batch that cannot be read: whose text was in it is told by the gap, and asked for again."""
        _logger.error("dead letter", stream="text", why=why)
        self.stats.num_dead_letters += 1
        try:
            await self.link.call(dead_letter(self._bus.keys, "text", entry.fields, why))
        except (BusUnavailable, BusFull) as error:
            _logger.error("a dead letter was not kept: %s", error)  # noqa: TRY400  (the outage is told elsewhere)
        self.delivery.attach_all()

    async def _keep_house(self) -> None:
        keys, stats = self._bus.keys, self.stats
        server_at_s = 0.0  # when the server is next asked how it is
        while True:
            if self.link.connected:
                self.delivery.probe(asyncio.get_running_loop().time())
                with contextlib.suppress(BusUnavailable, BusFull):  # the link knows, and waits for the server
                    await self._survey()
                    waiting, prompts, requests, dead = await self.link.execute(
                        (CountWaiting(), *map(Length, (keys.prompts, keys.requests, keys.dead)))
                    )
                    stats.num_waiting, stats.num_waiting_tokens = waiting.num_requests, waiting.num_tokens
                    stats.expected_wait_s = waiting.expected_wait_ms / 1000
                    if time.monotonic() >= server_at_s:
                        server_at_s = time.monotonic() + SERVER_STATE_S
                        self._take_server_state(await self.link.call(ReadServerState()))
                    if self._has_vllm_names:
                        await self._read_load()
                    stats.queue_depths = {"prompts": prompts, "requests": requests, "dead": dead}
            await asyncio.sleep(HOUSEKEEPING_S)

    async def _survey(self) -> None:
        """Look which workers live, and how schedulers serve, if that has changed."""
        roster, now_s = self.link.roster, asyncio.get_running_loop().time()
        began_s = time.perf_counter()
        while True:
            surveyed = await self.link.call(roster.survey())
            if roster.note(surveyed, now_s):
                break
        if surveyed is not None:
            self._take_survey(roster, now_s)
        self.stats.survey.observe(time.perf_counter() - began_s)

    def _take_survey(self, roster: Roster, now_s: float) -> None:
        sessions = roster.sessions(now_s)
        self._offered = _offered(each.info for each in roster.workers() if each.alive)
        # Facts of tokenizers that are gone hold until others tell theirs.
        self._facts = wire.told_facts(sessions) or self._facts
        self._renew_catalogue()
        self.intake.takes_priorities = wire.takes_priorities(sessions)
        self.stats.sessions = wire.count_sessions(sessions)
        kv_blocks: Counter[int] = Counter()
        for each in self._offered:
            kv_blocks[each.block_size] += each.num_blocks
        self.stats.kv_blocks = dict(kv_blocks)
        models = self.catalogue.models
        self.stats.models = tuple((each.name, digest) for each in models for digest in each.digests)

    def _take_server_state(self, server: ServerState) -> None:
        stats = self.stats
        stats.redis_used_bytes, stats.redis_max_bytes = server.used_bytes, server.max_bytes
        stats.redis_persists, stats.redis_persistence_ok = server.persists, server.persistence_ok

    async def _read_load(self) -> None:
        """The load that schedulers tell now: surveys tell their figures only when something else changes."""
        sessions = self._sessions()
        schedulers = [each.sid for each in sessions if each.kind is SessionKind.SCHEDULER and each.alive]
        self.stats.load = wire.pool_load(await self.link.execute([ReadStatus(sid) for sid in schedulers]))

    def _renew_catalogue(self) -> None:
        before, facts = self.catalogue, self._facts
        if facts is None:
            self.catalogue = catalogue(self._model_names, self._offered, self._started_s)
        else:
            formats = choose_formats(facts.chat, *self._format_names)
            models = self._model_names, self._offered, self._started_s
            self.catalogue = catalogue(*models, facts, formats)
        if self.catalogue != before:
            self.changed()


def _offered(infos: Iterable[bytes]) -> list[OfferedModel]:
    """The models of these workers; of what cannot be read, its scheduler tells."""
    offered = []
    for info in infos:
        with contextlib.suppress(PoisonMessageError):
            offered.append(wire.decode_worker(info))
    return offered
