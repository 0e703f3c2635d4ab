"""The pools of a gateway: which there are, how they come and go, and which one a call is for."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import CancelReason
from contract.domain.request import parse_request_id, pool_of_request_id
from gateway_svc.core.admission import Crowd
from gateway_svc.core.pool_entries import PoolEntry
from gateway_svc.core.routes import Offer, Routes
from gateway_svc.core.stats import GatewayStats
from gateway_svc.keys_file import CHECK_S
from gateway_svc.pool import Pool
from gateway_svc.pools_file import PoolsFile
from gateway_svc.settings import GatewaySettings
from servicekit.bus import open_bus
from servicekit.bus.interface import Bus
from servicekit.hops import Hop
from servicekit.reminder import Reminder

UNFIT_S = 1.0  # between two attempts to join a pool whose server is not fit for it
_logger = structlog.stdlib.get_logger(__name__)


class Pools:
    """One pool, or those of a file. Lives in the gateway's event loop; any thread may read what there is."""

    def __init__(self, settings: GatewaySettings, bus: Bus | None, crowd: Crowd, hop: Hop) -> None:
        """Joins none yet.

        Args:
            settings: of the gateway.
            bus: of its only pool; None: as the settings say.
            crowd: for whom the gateway serves, which all pools add to.
            hop: where it is counted how long text was on its way.

        Raises:
            PenstockError: INTERNAL (the operator's fault): a URL, or the file of pools, cannot be used.
        """
        self._settings = settings
        self._crowd = crowd
        self._hop = hop
        self.stats = GatewayStats()  # of the only pool; of several, of what belongs to none of them
        self._file: PoolsFile | None = None
        self._entries: dict[Pool, PoolEntry] = {}
        self._joined: tuple[Pool, ...] = ()  # in the order of the file; one at least
        self._leaving: tuple[Pool, ...] = ()  # go on with what they serve
        self._runs: dict[Pool, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._status: Callable[[Pool], bytes] = lambda _: b""
        self._is_draining = False
        self._contested: dict[str, tuple[str, ...]] = {}
        if settings.pools is None:
            bus = open_bus(settings.bus_url, settings.pool) if bus is None else bus
            self._joined = (Pool(settings, bus, crowd=crowd, hop=hop, stats=self.stats),)
            self._joined[0].changed = self._route
        else:
            if settings.served_model_name:
                raise PenstockError(
                    ErrorCode.INTERNAL,
                    "--served-model-name is of one pool: with --pools, give each pool of the file its `models`",
                )
            self._file = PoolsFile(settings.pools, self.stats)
            self._apply(self._file.read())
            self._file.accept()
        self._route()

    @property
    def are_named(self) -> bool:
        """Return whether they are those of a file."""
        return self._file is not None

    @property
    def all(self) -> tuple[Pool, ...]:
        """All of them, those that are about to leave included."""
        return self._joined + self._leaving

    def is_leaving(self, pool: Pool) -> bool:
        """Return whether a pool takes nothing new."""
        return pool in self._leaving

    def of_model(self, model: str) -> Pool:
        """The pool that a call for a model is for; without a name, for the first.

        Raises:
            PenstockError: MODEL_NOT_FOUND, or UNAVAILABLE if a pool has not told its models so far.
        """
        name = self.routes.find(model).pool
        return next(pool for pool in self._joined if pool.name == name)

    def of_request(self, text: str) -> tuple[Pool, bytes]:
        """The pool and the request of an id; one that names no pool is of the first.

        Raises:
            PenstockError: INVALID_ARGUMENT: it is no id; NOT_FOUND: there is no such pool.
        """
        request_id = parse_request_id(text)
        if not self.are_named:
            return self._joined[0], request_id
        return self.called(pool_of_request_id(text), "request_id"), request_id

    def called(self, name: str, param: str = "pool") -> Pool:
        """The pool of this name; an empty name is the first.

        Raises:
            PenstockError: NOT_FOUND: there is none.
        """
        pool = next((each for each in self.all if each.name == name), None) if name else self._joined[0]
        if pool is None:
            there = ", ".join(each.name for each in self._joined)
            raise PenstockError(ErrorCode.NOT_FOUND, f"there is no pool {name[:64]!r}; there is {there}", param=param)
        return pool

    def expect(self) -> None:
        """Somebody calls, nobody knows for which pool so far."""
        for pool in self._joined:
            pool.reception.expect()

    async def run(self, status: Callable[[Pool], bytes]) -> None:
        """Serves until it is cancelled.

        Args:
            status: what the gateway says of itself in a pool.

        Raises:
            PenstockError: INTERNAL (in a group): the server of the only pool is not fit for one.
        """
        self._status = status
        async with asyncio.TaskGroup() as group:
            self._group = group
            for pool in self._joined:
                self._start(pool)
            if self._file is not None:
                await self._reload(self._file)

    def drain(self) -> None:
        """Nothing new is taken, by no pool; the file is not looked at any more."""
        self._is_draining = True
        for pool in self.all:
            pool.delivery.drain()

    async def wait_idle(self) -> None:
        """Returns when no pool serves anything; no new calls come."""
        for pool in self.all:
            await pool.delivery.wait_idle()

    def fail_all(self, error: PenstockError, reason: CancelReason) -> None:
        """Ends every call; the requests of those that can go on through another gateway are left to it."""
        for pool in self.all:
            pool.delivery.fail_all(error, reason)

    async def close(self) -> None:
        """Leaves all in order; `run` has ended."""
        await asyncio.gather(*(pool.close() for pool in self.all))

    def _start(self, pool: Pool) -> None:
        if self._group is not None:
            self._runs[pool] = self._group.create_task(self._run(pool))

    async def _run(self, pool: Pool) -> None:
        reminder = Reminder()
        while True:
            try:
                await pool.run(lambda: self._status(pool))
            except PenstockError as error:
                if not self.are_named:
                    raise
                # The other pools go on, and the server may be set right.
                if reminder.is_due():
                    _logger.error("a pool cannot be joined: %s", error.message, pool=pool.name)  # noqa: TRY400
            await asyncio.sleep(UNFIT_S)

    async def _reload(self, file: PoolsFile) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            entries = await asyncio.to_thread(file.read_if_changed)
            if entries is None or self._is_draining:
                continue
            try:
                self._apply(entries)
            except PenstockError as error:
                file.refuse(error)
            else:
                file.accept()

    def _apply(self, entries: Sequence[PoolEntry]) -> None:
        """Joins and leaves pools until they are those of a file.

        Raises:
            PenstockError: INTERNAL (the operator's fault): one of them cannot be; nothing has changed.
        """
        known = {pool.name: pool for pool in self.all}
        made: dict[str, Pool] = {}
        for entry in entries:
            pool = known.get(entry.name)
            if pool is None:
                made[entry.name] = self._make(entry)
            elif not entry.is_same_pool(self._entries[pool]):
                raise PenstockError(
                    ErrorCode.INTERNAL,
                    f"the pool {entry.name} is served, and is another one here: give this one a name of its own, as "
                    "request ids say which pool they are of",
                )
        before = self.all
        self._joined = tuple(known.get(entry.name) or made[entry.name] for entry in entries)
        self._leaving = tuple(pool for pool in before if pool not in self._joined)
        for pool, entry in zip(self._joined, entries, strict=True):
            self._entries[pool] = entry
            pool.offer(entry.models)
            if pool not in before:
                _logger.info("joins a pool", pool=pool.name)
                self._start(pool)
        for pool in self._leaving:
            if self._group is not None:
                _logger.info("leaves a pool when its streams have ended", pool=pool.name)
                self._group.create_task(self._leave(pool))
        self._route()

    def _make(self, entry: PoolEntry) -> Pool:
        try:
            settings = _settings_of(entry, self._settings)
            bus = open_bus(settings.bus_url, settings.pool)
        except PenstockError as error:
            raise PenstockError(
                ErrorCode.INTERNAL, f"the pool {entry.name} cannot be reached: {error.message}"
            ) from error
        pool = Pool(settings, bus, crowd=self._crowd, hop=self._hop, stats=GatewayStats(), label=entry.name)
        pool.changed = self._route
        return pool

    async def _leave(self, pool: Pool) -> None:
        await pool.delivery.wait_idle()
        if pool not in self._leaving:  # it was put back, or has left
            return
        self._leaving = tuple(each for each in self._leaving if each is not pool)
        del self._entries[pool]
        run = self._runs.pop(pool)
        run.cancel()
        await asyncio.wait({run})
        await pool.close()
        _logger.info("has left a pool", pool=pool.name)

    def _route(self) -> None:
        """Finds out who answers to which name."""
        self.routes = Routes(tuple(Offer(pool.name, pool.catalogue, pool.is_named) for pool in self._joined))
        contested = self.routes.contested
        for model, pools in contested.items():
            if self._contested.get(model) != pools:
                _logger.warning("several pools have a model", model=model, pools=pools, goes_to=pools[0])
        self._contested = contested


def _settings_of(entry: PoolEntry, settings: GatewaySettings) -> GatewaySettings:
    """A gateway's settings for one of its pools."""
    url, password_file = settings.redis_url, settings.redis_password_file
    if entry.redis_url is not None:
        url, password_file = entry.redis_url, None
    if entry.redis_password_file is not None:
        password_file = Path(entry.redis_password_file)
    return replace(
        settings,
        redis_url=url,
        redis_password_file=password_file,
        pool=entry.pool_name,
        num_shards=entry.num_shards or settings.num_shards,
        served_model_name=entry.models,
    )
