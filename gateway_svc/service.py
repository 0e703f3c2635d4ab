"""The gateway's process: its pool, its two edges, the API keys, and how it ends."""

import asyncio
import socket
import time
from collections.abc import Sequence

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import CancelReason
from gateway_svc.core.admission import AdmissionLimits, Crowd
from gateway_svc.core.auth import Authenticator, HeaderAuthenticator, KeyAuthenticator, NoAuthentication
from gateway_svc.http import HttpApi
from gateway_svc.http_server import HttpServer, listen
from gateway_svc.keys_file import CHECK_S, KeysFile
from gateway_svc.metrics import GatewayCollector
from gateway_svc.pool import Pool
from gateway_svc.pools import Pools
from gateway_svc.servicer import InferenceServicer
from gateway_svc.settings import GatewaySettings
from gateway_svc.vllm_metrics import VllmCollector
from servicekit.bus.calls import SessionKind
from servicekit.bus.interface import Bus
from servicekit.hops import Hop, HopCollector
from servicekit.lifecycle import Stop
from servicekit.metrics import make_registry
from servicekit.status import ServiceStatus, service_status
from servicekit.tls import open_identity

HTTP_GRACE_S = 2  # for clients that do not read the end of their replies
_logger = structlog.stdlib.get_logger(__name__)


class GatewayService:
    """One gateway process; `run` is a coroutine of the main loop, so that HTTP, gRPC and the bus share one thread."""

    kind = SessionKind.GATEWAY

    def __init__(self, settings: GatewaySettings, bus: Bus | None = None) -> None:
        """Reads the files of API keys and of pools, if there are to be any.

        Args:
            settings: what it was told.
            bus: of its only pool; None: as the settings say.

        Raises:
            PenstockError: INTERNAL (the operator's fault): one of the files cannot be used.
        """
        self._settings = settings
        self._hop = Hop("text")
        max_tenants = settings.max_tenants if settings.trust_tenant_header else 0
        self._crowd = Crowd(AdmissionLimits(max_streams=settings.max_streams, max_tenants=max_tenants))
        self.pools = Pools(settings, bus, self._crowd, self._hop)
        self.stats = self.pools.stats
        self._keys_file: KeysFile | None = None
        self._auth: Authenticator = HeaderAuthenticator() if settings.trust_tenant_header else NoAuthentication()
        if settings.api_keys_file is not None:
            self._keys_file = KeysFile(settings.api_keys_file, self.stats, settings.api_keys_gone_s)
            self._auth = KeyAuthenticator(self._keys_file.read())
        self._has_vllm_names = settings.metrics_aliases == "vllm"
        self._tls = open_identity(settings.tls_files)
        self._started_ns = time.time_ns()
        self._servicer = self._make_servicer()
        self._draining = False
        self.http_port = 0

    @property
    def name(self) -> str:
        """The name by which people call this process."""
        return self._settings.name

    def is_ready(self) -> bool:
        """Return whether it takes new requests."""
        return not self._draining and any(pool.is_ready for pool in self.pools.all)

    def last_progress_ns(self) -> int:
        """Of the text reader's last turn, idle ones and those without a server included; of several, the earliest."""
        return min(filter(None, (pool.progress_ns for pool in self.pools.all)), default=0)

    def trouble(self) -> str:
        """The reason why the gateway makes no progress; empty: it does."""
        return next(filter(None, (pool.trouble() for pool in self.pools.all)), "")

    def status(self) -> ServiceStatus:
        """The status that it tells."""
        return self._status(self.pools.all, is_ready=self.is_ready(), is_draining=self._draining)

    def _status_in(self, pool: Pool) -> bytes:
        is_draining = self._draining or self.pools.is_leaving(pool)
        return self._status(
            [pool], is_ready=pool.is_ready and not is_draining, is_draining=is_draining
        ).SerializeToString()

    def _status(self, pools: Sequence[Pool], *, is_ready: bool, is_draining: bool) -> ServiceStatus:
        figures = {
            "open_streams": float(sum(pool.stats.num_streams for pool in pools)),
            "delivered_tokens_total": float(sum(pool.stats.num_tokens for pool in pools)),
        }
        return service_status(
            ready=is_ready,
            draining=is_draining,
            started_ns=self._started_ns,
            figures=figures,
            hops=[self._hop],
        )

    def collectors(self) -> list[Collector]:
        """Its metrics."""
        aliases = [VllmCollector(self.pools)] if self._has_vllm_names else []
        return [*aliases, GatewayCollector(self.pools), HopCollector([self._hop])]

    def servicer(self) -> InferenceServicer:
        """Its gRPC edge, for the server in the loop of `run`."""
        return self._servicer

    def _make_servicer(self) -> InferenceServicer:
        return InferenceServicer(
            pools=self.pools,
            auth=self._auth,
            max_body_bytes=self._settings.max_body_bytes,
            max_backlog_bytes=self._settings.max_backlog_bytes,
            all_resumable=self._settings.resumable,
            control_token=self._settings.control_token,
        )

    def http(self, registry: CollectorRegistry) -> HttpApi:
        """Its HTTP edge."""
        return HttpApi(
            pools=self.pools,
            auth=self._auth,
            vitals=self,
            stats=self.stats,
            registry=registry,
            max_body_bytes=self._settings.max_body_bytes,
            max_backlog_bytes=self._settings.max_backlog_bytes,
            sse_keep_alive_s=self._settings.sse_keep_alive_s,
            strict_fields=self._settings.strict_fields,
            cors_origins=self._settings.cors_origins,
            all_resumable=self._settings.resumable,
            has_page=self._settings.page,
            metrics_token=self._settings.metrics_token,
            control_token=self._settings.control_token,
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
        await self.pools.close()

    async def _serve(self, listener: socket.socket, stop: Stop) -> None:
        server = HttpServer(self.http(make_registry(self.collectors())).app(), self._settings.http_limits, self._tls)
        async with asyncio.TaskGroup() as group:
            http = group.create_task(server.serve(sockets=[listener]))
            bus = group.create_task(self.pools.run(self._status_in))
            keys = group.create_task(self._reload_keys())
            await stop.wait_async()
            self._draining = True
            self.pools.drain()
            server.should_exit = True  # no new connections; those that are there end with their replies
            await self._drain(stop, http)
            if not (await asyncio.wait({http}, timeout=HTTP_GRACE_S))[0]:
                server.abort_connections()
            await http
            bus.cancel()
            keys.cancel()

    async def _reload_keys(self) -> None:
        while isinstance(self._auth, KeyAuthenticator) and self._keys_file is not None:
            await asyncio.sleep(CHECK_S)
            if (callers := await asyncio.to_thread(self._keys_file.read_if_changed, time.monotonic())) is not None:
                self._auth.callers = callers

    async def _drain(self, stop: Stop, http: asyncio.Task[None]) -> None:
        idle = asyncio.create_task(self._wait_idle(http))
        now = asyncio.create_task(stop.wait_async())
        await asyncio.wait({idle, now}, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, now):
            task.cancel()
        error = PenstockError(
            ErrorCode.UNAVAILABLE, "this gateway was shut down; resume the request elsewhere or send it again"
        )
        self.pools.fail_all(error, CancelReason.SHUTDOWN)

    async def _wait_idle(self, http: asyncio.Task[None]) -> None:
        """Return when no request is served and every client has been told the end of its own."""
        await self.pools.wait_idle()
        await self._servicer.wait_idle()
        await asyncio.wait({http})


def _first_refusal(group: BaseExceptionGroup[BaseException]) -> PenstockError | None:
    """The sentence for the operator, if that is why the group failed."""
    for error in group.exceptions:
        if isinstance(error, PenstockError):
            return error
        if isinstance(error, BaseExceptionGroup) and (found := _first_refusal(error)):
            return found
    return None
