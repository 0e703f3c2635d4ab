"""A blocking service's hold on its pool: a session that says hello, renews itself, and comes back after an outage."""

import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

import structlog

from contract.domain.errors import PenstockError
from servicekit.bus import Bus, BusUnavailable, Connection
from servicekit.bus.calls import Call, Hello, Leave, Renew, Revalidate, SessionKind
from servicekit.keeper import Keeper
from servicekit.pool_stats import Loss, PoolStats
from servicekit.reminder import Reminder
from servicekit.roster import Roster
from servicekit.shape import Shape
from servicekit.status import is_draining

_log = structlog.get_logger(__name__)

RENEWALS = 6  # in the time of a lease: all but the last may come late
STATUS_S = 1.0  # between two statuses
PATIENCE_S = 8.0  # for which a busy loop keeps its session
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_SOON_S = 1.0  # lost again within that time: whatever it is, coming back at once does not mend it


class Stopped(Exception):  # noqa: N818  (not a mistake: the service was asked to end)
    """The service's stop event was set while it waited for the bus."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """The way in which a session came back."""

    lost: bool  # fenced: the session id is new, whatever the old one owned belongs to others now
    new_run: bool  # the server was restarted: it may have lost its last writes


class Session:
    """One service's session with its connection; used by one thread."""

    def __init__(
        self,
        bus: Bus,
        kind: SessionKind,
        name: str,
        *,
        address: str = "",
        ttl_ms: int = 5000,
        stop: threading.Event | None = None,
        patience_s: float = PATIENCE_S,
        survives_restarts: bool = True,
        shape: Shape | None = None,
        stats: PoolStats | None = None,
    ) -> None:
        """Nothing is connected yet.

        Args:
            bus: the pool.
            kind: what the service is.
            name: what people call this process.
            address: host:port of its gRPC server, empty if none.
            ttl_ms: how long others wait after the last renewal before they take over.
            stop: ends every wait for the bus.
            patience_s: for how long a thread keeps the session while nobody calls `tick`.
            survives_restarts: whether the session goes on after a restart of the server, which may have lost what it
                wrote last. If not, it leaves and a new one begins: what it owned is taken and loaded anew.
            shape: what the service must agree on with all others of the pool.
            stats: where is counted.
        """
        self._bus = bus
        self._kind = kind
        self._name = name
        self._address = address
        self._ttl_ms = ttl_ms
        self._stop = stop or threading.Event()
        self._survives_restarts = survives_restarts
        self._shape = tuple((shape or {}).items())
        self._stats = stats or PoolStats()
        self._sid = secrets.token_bytes(16)
        self._connection: Connection | None = None
        self._patience_s = patience_s
        self._keeper: Keeper | None = None
        self._renew_at_s = self._status_at_s = 0.0
        self._was_draining = False  # as the last status said
        self._ticked_s = 0.0  # when `tick` was last called
        self._is_known = False  # whether the pool has ever greeted this session
        self._is_lost = False  # what the next `Recovery` says
        self._is_new_run = False
        self._term = 0  # of the pool, the latest that was heard of
        self._was_greeted = False  # by this server or another one, in this process's life
        self.roster = Roster()  # who else is there, as its surveys on this connection have told
        self._is_reaching = False
        self._reached_s = float("-inf")  # when the session last came back
        self._reminder = Reminder()

    @property
    def waited_ns(self) -> int:
        """Until when its thread waited for the server last, monotonic; now, while it does; 0: never. From any thread.

        Waiting is not hanging: each wait has an end, or goes on until the server is back.
        """
        connection = self._connection
        if self._is_reaching:
            return time.monotonic_ns()
        return connection.waited_ns if connection is not None else 0

    @property
    def sid(self) -> bytes:
        """The session id: the fencing token. Another one after a `recover` that lost everything."""
        return self._sid

    @property
    def connection(self) -> Connection:
        """The connection that said hello.

        Raises:
            BusUnavailable: not connected yet, or left.
        """
        if self._connection is None:
            raise BusUnavailable("the session is not connected")
        return self._connection

    def connect(self, stop: threading.Event | None = None) -> None:
        """Connects and says hello; waits for the bus as long as it takes.

        Args:
            stop: ends this wait instead of the session's own event: nothing is in flight yet that had to be finished.

        Raises:
            Stopped: the stop event was set meanwhile.
            PenstockError: INTERNAL: the server is not fit for a pool, which waiting does not change.
        """
        self._reach(stop or self._stop)
        if self._ttl_ms > 0:
            self._ticked_s = time.monotonic()
            self._keeper = Keeper(self._bus, self._name, self._ttl_ms / 1000 / RENEWALS, self._late_renewal)

    def tick(self, now_s: float, status: bytes = b"") -> Renew | None:
        """The renewal to send now, if a part of the TTL went by since the last one. If it answers False: `recover`.

        Args:
            now_s: a clock that never goes back, in seconds; always the same one.
            status: penstock.v1.ServiceStatus; empty keeps the last. Most renewals go without it.
        """
        self._ticked_s = time.monotonic()
        if now_s < self._renew_at_s:
            return None
        self._renew_at_s = now_s + self._ttl_ms / 1000 / RENEWALS
        draining = is_draining(status)
        if now_s < self._status_at_s and draining == self._was_draining:
            return Renew(self._sid, self._ttl_ms)
        self._status_at_s, self._was_draining = now_s + STATUS_S, draining
        return Renew(self._sid, self._ttl_ms, status, draining)

    def recover(self, reason: BusUnavailable | None = None) -> Recovery:
        """After BusUnavailable, or after an answer that means fenced: a new connection, and the session on it.

        Waits for the bus as long as it takes. A session that was taken over gets a new id.

        Args:
            reason: what was raised, for the log.

        Raises:
            Stopped: the stop event was set meanwhile.
        """
        if reason is not None:
            self._stats.losses[Loss.UNREACHABLE] += 1
            if self._reminder.is_due():
                _log.warning("lost the bus", reason=str(reason))
        return self._reach(self._stop)

    def _reach(self, stop: threading.Event) -> Recovery:
        self._is_reaching = True
        self._stats.is_up = False
        self.roster.forget()
        try:
            if time.monotonic() - self._reached_s < _SOON_S:
                stop.wait(_FIRST_PAUSE_S)
            return self._reach_patiently(stop)
        finally:
            self._reached_s = time.monotonic()
            self._is_reaching = False

    def _reach_patiently(self, stop: threading.Event) -> Recovery:
        waiting_since_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while not stop.is_set():
            try:
                if self._connection is None:
                    self._connection = self._bus.connect()
                else:
                    self._connection.reconnect()
                self._greet(self._connection)
            except (BusUnavailable, PenstockError) as error:
                if isinstance(error, PenstockError) and not self._was_greeted:
                    if self._connection is not None:
                        self._connection.close()
                    raise  # it cannot work; what has worked waits until it does again
                if self._reminder.is_due():
                    waited_s = round(time.monotonic() - waiting_since_s, 1)
                    _log.warning("waiting for the bus", waited_s=waited_s, reason=str(error))
                stop.wait(pause_s * (0.5 + secrets.randbelow(512) / 1024))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._was_greeted = True
                recovery = Recovery(self._is_lost, self._is_new_run)
                self._status_at_s = 0.0
                self._renew_at_s, self._is_lost, self._is_new_run = 0.0, False, False
                self._stats.is_up = True
                return recovery
        raise Stopped

    def abandon(self) -> None:
        """Ends the lease at once without leaving in order: what the service was doing may be why it has to end."""
        self._end(Renew(self._sid, 0))

    def leave(self) -> None:
        """Ends the session in order and closes the connection. A bus that is away learns it when the lease runs out."""
        self._end(Leave(self._sid))

    def _end(self, last: Call[Any]) -> None:
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper = None
        self._stats.is_up = False
        if self._connection is None:
            return
        try:
            self._connection.call(last)
        except BusUnavailable as error:
            _log.warning("left without a word to the bus", reason=str(error))
        self._connection.close()
        self._connection = None

    def _late_renewal(self) -> Renew | None:
        """For the keeper: what the loop has missed, unless it is too late to believe in it."""
        late_s = time.monotonic() - self._ticked_s
        is_late = 2 * self._ttl_ms / 1000 / RENEWALS < late_s < self._patience_s
        return Renew(self._sid, self._ttl_ms) if is_late else None

    def _greet(self, connection: Connection) -> None:
        """Says hello until the session is active. May be broken off anywhere and begun again."""
        greeting = connection.call(self._hello(create=not self._is_known))
        self._term = max(self._term, greeting.term)
        self._is_new_run |= greeting.new_run
        if not greeting.active:
            self._is_new_run = True
            if not self._survives_restarts:
                connection.call(Leave(self._sid))
            if not self._survives_restarts or not connection.call(Revalidate(self._sid, self._ttl_ms)):
                self._sid = secrets.token_bytes(16)
                self._is_known = False
                self._is_lost = True
                self._stats.losses[Loss.FENCED] += 1
                connection.call(self._hello(create=True))
            else:
                self._stats.losses[Loss.SUSPENDED] += 1
        self._is_known = True

    def _hello(self, *, create: bool) -> Hello:
        return Hello(self._sid, self._kind, self._name, self._address, self._ttl_ms, create, self._shape, self._term)
