"""Sessions, workers and shards of one pool in memory: who is alive, and who holds what."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from servicekit.bus import calls as c
from servicekit.bus.interface import differs
from servicekit.bus.keys import GONE_CAP, SETTLE_MS, Keys
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
    is_draining: bool | None = None  # as its status says; None: it has none yet
    is_late: bool = False  # its lease has run out, and a survey has told so


@dataclass(slots=True)
class _Worker:
    incarnation: bytes
    info: bytes
    owner: bytes | None = None


class MemorySessions:
    """Sessions, workers and shards.

    `now_ms` is the server's clock; `num_owned` says how many requests a session owns, `has_waiting` whether any waits.
    """

    def __init__(
        self,
        keys: Keys,
        streams: MemoryStreams,
        now_ms: Callable[[], int],
        run: str,
        *,
        num_owned: Callable[[bytes], int],
        has_waiting: Callable[[], bool],
    ) -> None:
        self._keys = keys
        self._streams = streams
        self._now_ms = now_ms
        self._num_owned = num_owned
        self._has_waiting = has_waiting
        self._shape: dict[str, str] = {}  # what the pool's services agree on
        self._run_id = run
        self.run_seen = ""  # by the last hello
        self._settle_ms: int | None = None  # while the pool settles: until when at least
        self._sessions: dict[bytes, _Session] = {}
        self._workers: dict[str, _Worker] = {}
        self._generation = 0  # of what surveys tell
        self._changed: dict[bytes | str, int] = {}  # session or worker → generation of its last change, in their order
        self._gone: dict[bytes | str, int] = {}  # those of them that are there no more
        self._base = 0  # the generation before which what is gone is told no more
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
            c.Survey: self._survey,
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
        self._agree(dict(call.shape))
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
        if is_new_run:
            for sid, session in self._sessions.items():
                if session.state is not _SessionState.LEFT:
                    self._touch(sid)
        if call.sid not in self._sessions:
            state = self._state_of_new(call)
            if state is None:
                return c.Greeting(is_new_run, active=False)
            self._sessions[bytes(call.sid)] = _Session(call.kind, call.name, call.address, call.ttl_ms, 0, 0, state)
            self._touch(bytes(call.sid))
        session = self._sessions[call.sid]
        if session.state is not _SessionState.LEFT:
            if session.is_late or (session.name, session.address) != (call.name, call.address):
                self._touch(bytes(call.sid))
            session.is_late = False
            session.name, session.address, session.ttl_ms = call.name, call.address, call.ttl_ms
            session.until_ms, session.heard_ms = now_ms + call.ttl_ms, now_ms
        return c.Greeting(is_new_run, active=session.state is _SessionState.ACTIVE)

    def _agree(self, shape: dict[str, str]) -> None:
        differing = [part for part, value in shape.items() if self._shape.get(part, value) != value]
        if differing and not self._is_deserted():
            part = differing[0]
            raise differs(part, self._shape[part], shape[part])
        self._shape = shape if differing else self._shape | shape

    def _is_deserted(self) -> bool:
        """Return whether nobody is there any more, and no request that somebody could go on with."""
        now_ms = self._now_ms()
        return not self._has_waiting() and not any(
            (session.state is not _SessionState.LEFT and session.until_ms > now_ms) or self._num_owned(sid)
            for sid, session in self._sessions.items()
        )

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
        session.is_late = False
        self._touch(bytes(call.sid))
        return True

    def _renew(self, call: c.Renew) -> bool:
        if not self.is_active(call.sid):
            return False
        session = self._sessions[call.sid]
        session.heard_ms = self._now_ms()
        session.until_ms = session.heard_ms + call.ttl_ms
        session.status = bytes(call.status) or session.status
        is_draining = call.draining if call.status else session.is_draining
        if session.is_late or is_draining != session.is_draining:
            self._touch(bytes(call.sid))
        session.is_late, session.is_draining = False, is_draining
        return True

    def _leave(self, call: c.Leave) -> None:
        if session := self._sessions.get(call.sid):
            session.state, session.heard_ms = _SessionState.LEFT, self._now_ms()
            session.until_ms = min(session.until_ms, session.heard_ms)
            self._touch(bytes(call.sid))
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
            listed.append(self._info(sid, session, num_owned))
        self._forget_workers()
        return listed

    def _forget_workers(self) -> None:
        """A worker whose session is forgotten leaves nothing behind."""
        for name, worker in list(self._workers.items()):
            if worker.incarnation not in self._sessions:
                del self._workers[name]
                self._bury(name)
                self._streams.drop(self._keys.steps(name))
                self._streams.drop(self._keys.results(name))

    def _touch(self, changed: bytes | str) -> None:
        """Notes that a session or a worker has changed, came or went."""
        self._generation += 1
        self._gone.pop(changed, None)
        self._changed.pop(changed, None)
        self._changed[changed] = self._generation

    def _bury(self, gone: bytes | str) -> None:
        """The same of what is there no more: told to those who hear of it soon."""
        self._touch(gone)
        self._gone[gone] = self._generation
        if len(self._gone) > GONE_CAP:
            oldest = next(iter(self._gone))
            self._base = self._gone.pop(oldest)
            del self._changed[oldest]

    def _look_at_leases(self) -> None:
        """Those that have run out since somebody looked last: told to be dead, or, a minute later, forgotten."""
        now_ms, has_forgotten = self._now_ms(), False
        for sid, session in list(self._sessions.items()):
            if session.until_ms <= now_ms - FORGET_MS and self._num_owned(sid) == 0:
                self._forget(sid)
                self._streams.drop(self._keys.text(sid))
                has_forgotten = True
            elif session.state is _SessionState.ACTIVE and session.until_ms <= now_ms and not session.is_late:
                session.is_late = True
                self._touch(sid)
        if has_forgotten:
            self._forget_workers()

    def _survey(self, call: c.Survey) -> c.Surveyed | None:
        self._look_at_leases()
        if call.since == self._generation:
            return None
        since = call.since if self._base <= call.since <= self._generation else 0
        changes = [each for each in self._changed.items() if each[1] > since][: call.count]
        generation = changes[-1][1] if len(changes) == call.count else self._generation
        found = c.Surveyed(generation, since == 0, generation == self._generation, [], [], [], [])
        for changed, _ in changes:
            if isinstance(changed, bytes):
                if (session := self._sessions.get(changed)) is None:
                    found.gone_sessions.append(changed)
                else:
                    found.sessions.append(self._info(changed, session, 0))
            elif (worker := self._workers.get(changed)) is None:
                found.gone_workers.append(changed)
            else:
                found.workers.append(c.RegisteredWorker(changed, worker.incarnation, worker.info, worker.owner))
        return found

    def _info(self, sid: bytes, session: _Session, num_owned: int) -> c.SessionInfo:
        return c.SessionInfo(
            sid,
            session.kind,
            session.name,
            session.address,
            self._lives(sid),
            num_owned,
            session.status,
            session.state is _SessionState.LEFT,
            self._now_ms() - session.heard_ms,
        )

    def _lives(self, sid: bytes | None) -> bool:
        return sid is not None and self.is_active(sid) and self._sessions[sid].until_ms > self._now_ms()

    def _free(self, sid: bytes) -> None:
        self._leases = {shard: holder for shard, holder in self._leases.items() if holder != sid}
        for name, worker in self._workers.items():
            if worker.owner == sid:
                worker.owner = None
                self._touch(name)

    def _forget(self, sid: bytes) -> None:
        self._free(sid)
        del self._sessions[sid]
        self._bury(sid)

    def _register_worker(self, call: c.RegisterWorker) -> bytes:
        if not self.is_active(call.sid):
            return b""
        known = self._workers.get(call.worker)
        owner = known.owner if known and known.incarnation == call.sid else None
        self._workers[call.worker] = _Worker(bytes(call.sid), bytes(call.info), owner)
        self._touch(call.worker)
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
        self._touch(call.worker)
        return c.Pairing(worker.incarnation, worker.info, self._streams.get(self._keys.results(call.worker)).last_id)

    def _unpair(self, call: c.Unpair) -> None:
        worker = self._workers.get(call.worker)
        if worker is not None and worker.owner == call.sid:
            worker.owner = None
            self._touch(call.worker)

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
