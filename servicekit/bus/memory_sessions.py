"""Sessions, workers and shards of one pool in memory: who is alive, and who holds what."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from servicekit.bus import calls as c
from servicekit.bus.keys import SETTLE_MS, Keys
from servicekit.bus.memory_streams import MemoryStreams

FORGET_MS = 60_000  # how long a dead session is shown


class _SessionState(Enum):
    ACTIVE = "active"
    SUSPENDED = "suspended"  # the server was restarted: must revalidate
    LEFT = "left"


@dataclass(slots=True)
class _Session:
    kind: c.SessionKind
    name: str
    address: str
    ttl_ms: int
    until_ms: int
    heard_ms: int
    state: _SessionState = _SessionState.ACTIVE
    status: bytes = b""


@dataclass(slots=True)
class _Worker:
    incarnation: bytes
    info: bytes
    owner: bytes | None = None


class MemorySessions:
    """Sessions, workers and shards.

    `now_ms` is the server's clock; `num_owned` says how many requests a session owns.
    """

    def __init__(
        self, keys: Keys, streams: MemoryStreams, now_ms: Callable[[], int], num_owned: Callable[[bytes], int], run: str
    ) -> None:
        self._keys = keys
        self._streams = streams
        self._now_ms = now_ms
        self._num_owned = num_owned
        self._run_id = run
        self.run_seen = ""  # by the last hello
        self._settle_ms: int | None = None  # while the pool settles: until when at least
        self._sessions: dict[bytes, _Session] = {}
        self._workers: dict[str, _Worker] = {}
        self._leases: dict[int, bytes] = {}  # shard → session
        self._num_read: dict[int, int] = {}  # by shard that is or was leased

    def operations(self) -> dict[type[c.Call[Any]], Callable[[Any], Any]]:
        """What is done here, by call."""
        return {
            c.Hello: self._hello,
            c.Revalidate: self._revalidate,
            c.Renew: self._renew,
            c.Leave: self._leave,
            c.ListSessions: self._list_sessions,
            c.RegisterWorker: self._register_worker,
            c.ListWorkers: self._list_workers,
            c.Pair: self._pair,
            c.Unpair: self._unpair,
            c.LeaseShard: self._lease_shard,
            c.LogBacklogs: self._log_backlogs,
            c.ReleaseShard: self._release_shard,
        }

    def new_run(self, run_id: str) -> None:
        """The server came back as another run."""
        self._run_id = run_id

    def is_active(self, sid: bytes) -> bool:
        """Whether a session may act: it is neither suspended nor left nor taken."""
        session = self._sessions.get(sid)
        return session is not None and session.state is _SessionState.ACTIVE

    def leases_shard(self, sid: bytes, shard: int) -> bool:
        """Whether an active session holds a shard."""
        return self.is_active(sid) and self._leases.get(shard) == sid

    def is_settled(self) -> bool:
        """Whether every gateway has come back since the server's last restart, or stayed away for too long."""
        if self._settle_ms is None:
            return True
        now_ms = self._now_ms()
        return self._settle_ms <= now_ms and not any(
            session.kind is c.SessionKind.GATEWAY
            and session.state is _SessionState.SUSPENDED
            and session.until_ms > now_ms
            for session in self._sessions.values()
        )

    def settle(self) -> bool:
        """The same, remembered: a pool that has settled stays so until the server's next run."""
        settled = self.is_settled()
        if settled:
            self._settle_ms = None
        return settled

    def remove_expired(self, sid: bytes) -> bool:
        """Removes a session and frees what it held, unless its lease still runs. False: it runs."""
        session = self._sessions.get(sid)
        if session is not None:
            if session.until_ms > self._now_ms():
                return False
            self._forget(sid)
        return True

    def _hello(self, call: c.Hello) -> c.Greeting:
        now_ms = self._now_ms()
        # A session that comes back to a pool without memory: the server has lost everything.
        is_new_run = self.run_seen != self._run_id and (self.run_seen != "" or not call.create)
        self.run_seen = self._run_id
        if is_new_run:
            self._settle_ms = now_ms + SETTLE_MS
            self._leases.clear()
            for session in self._sessions.values():
                if session.state is not _SessionState.LEFT:
                    session.state = _SessionState.SUSPENDED
                    session.until_ms = max(session.until_ms, now_ms + session.ttl_ms)
        if call.sid not in self._sessions:
            state = self._state_of_new(call)
            if state is None:
                return c.Greeting(is_new_run, active=False)
            self._sessions[bytes(call.sid)] = _Session(call.kind, call.name, call.address, call.ttl_ms, 0, 0, state)
        session = self._sessions[call.sid]
        if session.state is not _SessionState.LEFT:
            session.name, session.address, session.ttl_ms = call.name, call.address, call.ttl_ms
            session.until_ms, session.heard_ms = now_ms + call.ttl_ms, now_ms
        return c.Greeting(is_new_run, active=session.state is _SessionState.ACTIVE)

    def _state_of_new(self, call: c.Hello) -> _SessionState | None:
        if call.create:
            return _SessionState.ACTIVE
        # Of a gateway that was lost with the last writes: it has clients, so it is waited for.
        is_waited_for = call.kind is c.SessionKind.GATEWAY and self._settle_ms is not None
        return _SessionState.SUSPENDED if is_waited_for else None

    def _revalidate(self, call: c.Revalidate) -> bool:
        session = self._sessions.get(call.sid)
        if session is None or session.state is _SessionState.LEFT:
            return False
        session.state, session.heard_ms = _SessionState.ACTIVE, self._now_ms()
        session.until_ms = session.heard_ms + call.ttl_ms
        return True

    def _renew(self, call: c.Renew) -> bool:
        if not self.is_active(call.sid):
            return False
        session = self._sessions[call.sid]
        session.heard_ms = self._now_ms()
        session.until_ms = session.heard_ms + call.ttl_ms
        session.status = bytes(call.status) or session.status
        return True

    def _leave(self, call: c.Leave) -> None:
        if session := self._sessions.get(call.sid):
            session.state, session.heard_ms = _SessionState.LEFT, self._now_ms()
            session.until_ms = min(session.until_ms, session.heard_ms)
            self._free(call.sid)

    def _list_sessions(self, _: c.ListSessions) -> list[c.SessionInfo]:
        now_ms = self._now_ms()
        listed: list[c.SessionInfo] = []
        for sid, session in sorted(self._sessions.items()):
            num_owned = self._num_owned(sid)
            if num_owned == 0 and session.until_ms <= now_ms - FORGET_MS:
                self._forget(sid)
                self._streams.drop(self._keys.text(sid))
                continue
            alive = self._lives(sid)
            listed.append(
                c.SessionInfo(
                    sid,
                    session.kind,
                    session.name,
                    session.address,
                    alive,
                    num_owned,
                    session.status,
                    session.state is _SessionState.LEFT,
                    now_ms - session.heard_ms,
                )
            )
        for name, worker in list(self._workers.items()):
            if worker.incarnation not in self._sessions:
                del self._workers[name]
                self._streams.drop(self._keys.steps(name))
                self._streams.drop(self._keys.results(name))
        return listed

    def _lives(self, sid: bytes | None) -> bool:
        return sid is not None and self.is_active(sid) and self._sessions[sid].until_ms > self._now_ms()

    def _free(self, sid: bytes) -> None:
        self._leases = {shard: holder for shard, holder in self._leases.items() if holder != sid}
        for worker in self._workers.values():
            if worker.owner == sid:
                worker.owner = None

    def _forget(self, sid: bytes) -> None:
        self._free(sid)
        del self._sessions[sid]

    def _register_worker(self, call: c.RegisterWorker) -> bytes:
        if not self.is_active(call.sid):
            return b""
        known = self._workers.get(call.worker)
        owner = known.owner if known and known.incarnation == call.sid else None
        self._workers[call.worker] = _Worker(bytes(call.sid), bytes(call.info), owner)
        return self._streams.get(self._keys.steps(call.worker)).last_id

    def _list_workers(self, _: c.ListWorkers) -> list[c.WorkerEntry]:
        return [
            c.WorkerEntry(
                name,
                worker.incarnation,
                self._lives(worker.incarnation),
                worker.info,
                worker.owner if self._lives(worker.owner) else None,
            )
            for name, worker in sorted(self._workers.items())
        ]

    def _pair(self, call: c.Pair) -> c.Pairing | None:
        worker = self._workers.get(call.worker)
        if not self.is_active(call.sid) or worker is None or not self._lives(worker.incarnation):
            return None
        if worker.owner in self._sessions and worker.owner != call.sid:
            return None
        worker.owner = bytes(call.sid)
        return c.Pairing(worker.incarnation, worker.info, self._streams.get(self._keys.results(call.worker)).last_id)

    def _unpair(self, call: c.Unpair) -> None:
        worker = self._workers.get(call.worker)
        if worker is not None and worker.owner == call.sid:
            worker.owner = None

    def _lease_shard(self, call: c.LeaseShard) -> bool:
        holder = self._leases.get(call.shard)
        if not self.is_active(call.sid) or (holder != call.sid and (call.held or self._lives(holder))):
            return False
        self._leases[call.shard] = bytes(call.sid)
        self._num_read[call.shard] = call.num_read
        return True

    def _log_backlogs(self, call: c.LogBacklogs) -> list[int]:
        read = {shard: self._num_read[shard] for shard in self._leases}
        return [max(0, len(self._streams.get(self._keys.tokens(each))) - read.get(each, 0)) for each in call.shards]

    def _release_shard(self, call: c.ReleaseShard) -> None:
        if self._leases.get(call.shard) == call.sid:
            del self._leases[call.shard]
