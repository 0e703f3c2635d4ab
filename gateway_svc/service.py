"""The gateway's loops: the text reader, the session's keeper, the outbox, housekeeping, and the HTTP server."""

import asyncio
import contextlib
import socket
import time

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from gateway_svc import wire
from gateway_svc.core.admission import Limits
from gateway_svc.core.auth import Door, KeyedDoor, OpenDoor, TrustingDoor
from gateway_svc.core.models import Catalogue, catalogue
from gateway_svc.core.stats import GatewayStats
from gateway_svc.delivery import Delivery
from gateway_svc.http import HttpApi
from gateway_svc.http_server import HttpServer, listen
from gateway_svc.intake import Intake
from gateway_svc.keys_file import CHECK_S, KeysFile
from gateway_svc.link import Link
from gateway_svc.metrics import GatewayCollector
from gateway_svc.pipeline import PipelineReading, read_pipeline
from gateway_svc.reception import Reception
from gateway_svc.servicer import InferenceServicer
from gateway_svc.settings import GatewaySettings
from penstock.domain.errors import ErrorCode, PenstockError, PoisonMessageError
from penstock.domain.finish import CancelReason
from servicekit.bus import keys as k
from servicekit.bus.calls import CountWaiting, Entry, LastId, Length, Read, SessionKind
from servicekit.bus.dead_letters import dead_letter
from servicekit.bus.interface import Bus, BusFull, BusUnavailable
from servicekit.hops import Hop, HopCollector
from servicekit.lifecycle import STALLED_AFTER_S, Stop
from servicekit.metrics import make_registry
from servicekit.settings import reachable_address
from servicekit.shape import pool_shape
from servicekit.status import ServiceStatus, service_status
from servicekit.tls import open_identity

READ_BLOCK_MS = 1000
READ_COUNT = 64  # batches in one read
HOUSEKEEPING_S = 1.0
HTTP_GRACE_S = 2  # for clients that do not read the end of their replies
_logger = structlog.stdlib.get_logger(__name__)


class GatewayService:
    """One gateway process; `run` is a coroutine of the main loop, so that HTTP, gRPC and the bus share one thread."""

    kind = SessionKind.GATEWAY

    def __init__(self, settings: GatewaySettings, bus: Bus) -> None:
        """Reads the API keys, if there are to be any.

        Raises:
            PenstockError: INTERNAL (the operator's fault): they cannot be used.
        """
        self._settings = settings
        self._bus = bus
        address = reachable_address(settings.grpc_address)
        shape = pool_shape(settings.num_shards)
        awake_s = settings.stay_awake_ms / 1e3
        self._link = Link(bus, settings.name, address, settings.session_ttl_s, awake_s=awake_s, shape=shape)
        self.stats = GatewayStats()
        max_tenants = settings.max_tenants if settings.trust_tenant_header else 0
        limits = Limits(max_streams=settings.max_streams, max_tenants=max_tenants)
        self._delivery = Delivery(
            self._link,
            settings.bounds,
            resume_grace_s=settings.resume_grace_s,
            outage_patience_s=settings.outage_patience_s,
            stats=self.stats,
        )
        self._reception = Reception(self._delivery, self._link, limits, settings.outage_patience_s, self.stats)
        self._link.rerouted = self._reroute
        self._intake = Intake(self._models, settings.default_timeout_s)
        self._keys_file: KeysFile | None = None
        self._auth: Door = TrustingDoor() if settings.trust_tenant_header else OpenDoor()
        if settings.api_keys_file is not None:
            self._keys_file = KeysFile(settings.api_keys_file, self.stats, settings.api_keys_gone_s)
            self._auth = KeyedDoor(self._keys_file.read())
        self._tls = open_identity(settings.tls_files)
        self._hop = Hop("text")
        self._started_ns = time.time_ns()
        self._catalogue = self._make_catalogue([])
        self._draining = False
        self._rerouted = True
        self._stream = b""
        self._position = b"0-0"
        self._progress_ns = 0
        self.http_port = 0

    @property
    def name(self) -> str:
        """What people call this process."""
        return self._settings.name

    def is_ready(self) -> bool:
        """Whether it takes new requests."""
        return self._link.connected and not self._draining and bool(self._catalogue.models)

    def last_progress_ns(self) -> int:
        """Of the text reader's last turn, idle ones and those without a server included."""
        return self._progress_ns

    def trouble(self) -> str:
        """Why the gateway makes no progress; empty: it does."""
        idle_s = (time.monotonic_ns() - self._progress_ns) * 1e-9
        if self._progress_ns and idle_s > STALLED_AFTER_S:
            return f"the text reader has not turned for {idle_s:.0f} s"
        return ""

    def status(self) -> ServiceStatus:
        """What it says of itself."""
        figures = {
            "open_streams": float(self.stats.num_streams),
            "delivered_tokens_total": float(self.stats.num_tokens),
        }
        return service_status(
            ready=self.is_ready(),
            draining=self._draining,
            started_ns=self._started_ns,
            figures=figures,
            hops=[self._hop],
        )

    def collectors(self) -> list[Collector]:
        """Its metrics."""
        return [GatewayCollector(lambda: self.stats), HopCollector([self._hop])]

    def servicer(self) -> InferenceServicer:
        """Its gRPC edge, for the server in the loop of `run`."""
        return InferenceServicer(
            delivery=self._delivery,
            reception=self._reception,
            intake=self._intake,
            auth=self._auth,
            catalogue=self._models,
            pipeline=self._pipeline,
            stats=self.stats,
            max_body_bytes=self._settings.max_body_bytes,
            max_backlog_bytes=self._settings.max_backlog_bytes,
            all_resumable=self._settings.resumable,
            control_token=self._settings.control_token,
        )

    def http(self, registry: CollectorRegistry) -> HttpApi:
        """Its HTTP edge."""
        return HttpApi(
            delivery=self._delivery,
            reception=self._reception,
            intake=self._intake,
            auth=self._auth,
            catalogue=self._models,
            vitals=self,
            stats=self.stats,
            registry=registry,
            max_body_bytes=self._settings.max_body_bytes,
            max_backlog_bytes=self._settings.max_backlog_bytes,
            sse_keep_alive_s=self._settings.sse_keep_alive_s,
            strict_fields=self._settings.strict_fields,
            cors_origins=self._settings.cors_origins,
            all_resumable=self._settings.resumable,
            metrics_token=self._settings.metrics_token,
        )

    async def run(self, stop: Stop) -> None:
        """Serves until all clients have their answers, or the time to drain is over.

        Raises:
            PenstockError: the HTTP address cannot be listened on, or the Redis server cannot be used.
        """
        listener = listen(self._settings.http_address)
        self.http_port = listener.getsockname()[1]
        _logger.info("listening", http_port=self.http_port)
        try:
            with listener:
                await self._serve(listener, stop)
        except BaseExceptionGroup as group:
            if refusal := _first_refusal(group):
                raise refusal from group
            raise
        await self._delivery.outbox.flush()
        await self._link.close()

    async def _serve(self, listener: socket.socket, stop: Stop) -> None:
        server = HttpServer(self.http(make_registry(self.collectors())).app(), self._settings.http_limits, self._tls)
        async with asyncio.TaskGroup() as group:
            http = group.create_task(server.serve(sockets=[listener]))
            bus = group.create_task(self._serve_bus())
            keys = group.create_task(self._reload_keys())
            await stop.wait_async()
            self._draining = True
            self._delivery.drain()
            server.should_exit = True  # no new connections; those that are there end with their replies
            await self._drain(stop)
            if not (await asyncio.wait({http}, timeout=HTTP_GRACE_S))[0]:
                server.abort_connections()
            await http
            bus.cancel()
            keys.cancel()

    async def _reload_keys(self) -> None:
        while isinstance(self._auth, KeyedDoor) and self._keys_file is not None:
            await asyncio.sleep(CHECK_S)
            if (callers := await asyncio.to_thread(self._keys_file.read_if_changed, time.monotonic())) is not None:
                self._auth.callers = callers

    async def _drain(self, stop: Stop) -> None:
        idle = asyncio.create_task(self._delivery.wait_idle())
        now = asyncio.create_task(stop.wait_async())
        await asyncio.wait({idle, now}, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, now):
            task.cancel()
        error = PenstockError(
            ErrorCode.UNAVAILABLE, "this gateway was shut down; resume the request elsewhere or send it again"
        )
        self._delivery.fail_all(error, CancelReason.SHUTDOWN)

    async def _serve_bus(self) -> None:
        """Everything that needs the bus; begins when the bus is there."""
        await self._link.open()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_text())
            group.create_task(self._link.keep(lambda: self.status().SerializeToString()))
            group.create_task(self._delivery.outbox.run())
            group.create_task(self._keep_house())

    def _reroute(self) -> None:
        self._rerouted = True

    async def _read_text(self) -> None:
        while True:
            self._progress_ns = time.monotonic_ns()
            if not self._link.connected:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._link.wait_connected()
                continue
            try:
                if self._rerouted:
                    await self._begin_reading()
                    self._progress_ns = time.monotonic_ns()
                bell = self._link.bell
                streams = {self._stream: self._position} | bell.listen(is_idle=not self.stats.num_streams)
                # An event loop that waits for this read alone would sleep.
                block_ms = 0 if bell.awake_s(self.stats.num_streams) else READ_BLOCK_MS
                found = await self._link.read(Read(streams, READ_COUNT, block_ms))
            except BusUnavailable:
                continue
            bell.hear(found)
            for entry in found.get(self._stream, ()):
                if self._rerouted or not self._link.connected:
                    # The server may have lost what this text comes from, and been told already what clients have.
                    break
                self._position = entry.entry_id
                await self._receive(entry)

    async def _begin_reading(self) -> None:
        """What stands in the stream already is asked for again by the re-attachments that follow."""
        self._stream = self._link.text_stream
        self._position = await self._link.call(LastId(self._stream))
        self._rerouted = False
        self._delivery.attach_all()

    async def _receive(self, entry: Entry) -> None:
        if k.PAYLOAD not in entry.fields and k.REQUEST in entry.fields:
            self._delivery.ask_again(entry.fields[k.REQUEST])
            return
        received_ns, began_s = time.time_ns(), time.perf_counter()
        try:
            sent_ns, rows = wire.decode_text(entry.fields.get(k.PAYLOAD, b"\xff"))
        except PoisonMessageError as error:
            await self._bury(entry, str(error))
            return
        self._delivery.deliver(rows, asyncio.get_running_loop().time())
        self._hop.observe(sent_ns, received_ns, time.perf_counter() - began_s)
        # Several batches at once: requests and sockets get their turn between them.
        await asyncio.sleep(0)

    async def _bury(self, entry: Entry, why: str) -> None:
        """A batch that cannot be read: whose text was in it is told by the gap, and asked for again."""
        _logger.error("dead letter", stream="text", why=why)
        self.stats.num_dead_letters += 1
        try:
            await self._link.call(dead_letter(self._bus.keys, "text", entry.fields, why))
        except (BusUnavailable, BusFull) as error:
            _logger.error("a dead letter was not kept: %s", error)  # noqa: TRY400  (the outage is told elsewhere)
        self._delivery.attach_all()

    async def _keep_house(self) -> None:
        keys = self._bus.keys
        while True:
            if self._link.connected:
                self._delivery.probe(asyncio.get_running_loop().time())
                with contextlib.suppress(BusUnavailable, BusFull):  # the link knows, and waits for the server
                    await self._survey()
                    waiting, prompts, requests, dead = await self._link.execute(
                        (CountWaiting(), *map(Length, (keys.prompts, keys.requests, keys.dead)))
                    )
                    self.stats.num_waiting, self.stats.num_waiting_tokens = waiting.num_requests, waiting.num_tokens
                    self.stats.queue_depths = {"prompts": prompts, "requests": requests, "dead": dead}
            await asyncio.sleep(HOUSEKEEPING_S)

    async def _survey(self) -> None:
        """Which workers live, and how schedulers serve, if that has changed."""
        roster, now_s = self._link.roster, asyncio.get_running_loop().time()
        while (surveyed := await self._link.call(roster.survey())) is not None:
            if roster.note(surveyed, now_s):
                self._catalogue = self._make_catalogue([each.info for each in roster.workers() if each.alive])
                self._intake.takes_priorities = wire.takes_priorities(roster.sessions(now_s))
                return

    def _make_catalogue(self, infos: list[bytes]) -> Catalogue:
        workers = []
        for info in infos:
            with contextlib.suppress(PoisonMessageError):  # its scheduler says so
                workers.append(wire.decode_worker(info))
        return catalogue(self._settings.served_model_name, workers, self._started_ns // 10**9)

    def _models(self) -> Catalogue:
        return self._catalogue

    async def _pipeline(self) -> PipelineReading:
        unavailable = PenstockError(ErrorCode.UNAVAILABLE, "the Redis server does not answer; ask again")
        if not self._link.connected:
            raise unavailable
        try:
            return await read_pipeline(self._link.execute, self._bus.keys, self._settings.num_shards)
        except BusUnavailable as error:
            raise unavailable from error


def _first_refusal(group: BaseExceptionGroup[BaseException]) -> PenstockError | None:
    """What the operator is to be told, if that is why the group failed."""
    for error in group.exceptions:
        if isinstance(error, PenstockError):
            return error
        if isinstance(error, BaseExceptionGroup) and (found := _first_refusal(error)):
            return found
    return None
