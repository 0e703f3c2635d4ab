"""The state of one pool in memory, and every operation on it: what `functions/` does, in Python.

Nothing here locks or waits: `memory_bus` does. All values are bytes, copied where a container crosses the border.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import count as counter
from typing import Any

from servicekit.bus import calls as c
from servicekit.bus import keys as k
from servicekit.bus.memory_streams import MemoryStream

MARK_TTL_MS = 60_000  # how long a cancel waits for its request
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
    state: _SessionState = _SessionState.ACTIVE
    status: bytes = b""


@dataclass(slots=True)
class _Request:
    tenant: str
    header: bytes
    body: bytes
    digest: bytes
    route: bytes
    cancel_reason: int
    state: c.RequestState = c.RequestState.PROMPT
    meta: bytes = b""
    shard: int | None = None
    owner: bytes | None = None
    attempts: int = 0


@dataclass(slots=True)
class _Worker:
    incarnation: bytes
    info: bytes
    owner: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Mark:
    reason: int
    tenant: str | None


@dataclass(order=True, slots=True)
class _Expiry:
    at_ms: int
    order: int
    forget: Callable[[], object] = field(compare=False)


class MemoryPool:
    """One pool. `now_ms` is the server's clock: Unix milliseconds."""

    def __init__(self, keys: k.Keys, now_ms: Callable[[], int], run_id: str) -> None:
        self._keys = keys
        self._now_ms = now_ms
        self._run_id = run_id
        self._run_seen: str | None = None
        self._streams: dict[bytes, MemoryStream] = {}
        self._requests: dict[bytes, _Request] = {}
        self._results: dict[bytes, bytes] = {}
        self._marks: dict[bytes, _Mark] = {}
        self._sessions: dict[bytes, _Session] = {}
        self._workers: dict[str, _Worker] = {}
        self._leases: dict[int, bytes] = {}  # shard → session
        self._expiries: list[_Expiry] = []
        self._order = counter()
        self._operations: dict[type[c.Call[Any]], Callable[[Any], Any]] = {
            c.Hello: self._hello,
            c.Revalidate: self._revalidate,
            c.Renew: self._renew,
            c.Leave: self._leave,
            c.ListSessions: self._list_sessions,
            c.Submit: self._submit,
            c.Fetch: self._fetch,
            c.ReadGroup: self._read_group,
            c.Reclaim: self._reclaim,
            c.Acknowledge: self._acknowledge,
            c.Tokenized: self._tokenized,
            c.Reject: self._reject,
            c.Claim: self._claim,
            c.Take: self._take,
            c.Owned: self._owned,
            c.Load: self._load,
            c.Commit: self._commit,
            c.Retire: self._retire,
            c.Attach: self._attach,
            c.Cancel: self._cancel,
            c.RegisterWorker: self._register_worker,
            c.ListWorkers: self._list_workers,
            c.Pair: self._pair,
            c.LeaseShard: self._lease_shard,
            c.ReleaseShard: self._release_shard,
            c.Append: self._append,
            c.Read: self._read,
            c.LastId: self._last_id,
            c.Length: self._length,
            c.TrimLog: self._trim_log,
            c.DropStream: self._drop_stream,
        }

    def apply(self, call: c.Call[Any]) -> Any:
        """Carries out one call without waiting."""
        now_ms = self._now_ms()
        while self._expiries and self._expiries[0].at_ms <= now_ms:
            heapq.heappop(self._expiries).forget()
        return self._operations[type(call)](call)

    def new_run(self, run_id: str) -> None:
        """What a restart of the server changes, when nothing was lost."""
        self._run_id = run_id

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _hello(self, call: c.Hello) -> c.Greeting:
        now_ms = self._now_ms()
        is_new_run = self._run_seen not in (None, self._run_id)
        self._run_seen = self._run_id
        if is_new_run:
            self._leases.clear()
            for session in self._sessions.values():
                if session.state is not _SessionState.LEFT:
                    session.state = _SessionState.SUSPENDED
                    session.until_ms = max(session.until_ms, now_ms + session.ttl_ms)
        existing = self._sessions.get(call.sid)
        if existing is None:
            if call.create:
                self._sessions[bytes(call.sid)] = _Session(
                    call.kind, call.name, call.address, call.ttl_ms, now_ms + call.ttl_ms
                )
            return c.Greeting(is_new_run, active=call.create)
        if existing.state is not _SessionState.ACTIVE:
            return c.Greeting(is_new_run, active=False)
        existing.name, existing.address, existing.ttl_ms = call.name, call.address, call.ttl_ms
        existing.until_ms = now_ms + call.ttl_ms
        return c.Greeting(is_new_run, active=True)

    def _revalidate(self, call: c.Revalidate) -> bool:
        session = self._sessions.get(call.sid)
        if session is None or session.state is _SessionState.LEFT:
            return False
        session.state = _SessionState.ACTIVE
        session.until_ms = self._now_ms() + call.ttl_ms
        return True

    def _renew(self, call: c.Renew) -> bool:
        if not self._is_active(call.sid):
            return False
        session = self._sessions[call.sid]
        session.until_ms = self._now_ms() + call.ttl_ms
        session.status = bytes(call.status) or session.status
        return True

    def _leave(self, call: c.Leave) -> None:
        if session := self._sessions.get(call.sid):
            session.state = _SessionState.LEFT
            session.until_ms = min(session.until_ms, self._now_ms())
            self._free(call.sid)

    def _list_sessions(self, _: c.ListSessions) -> list[c.SessionInfo]:
        now_ms = self._now_ms()
        listed: list[c.SessionInfo] = []
        for sid, session in sorted(self._sessions.items()):
            num_owned = len(self._owned_by(sid))
            if num_owned == 0 and session.until_ms <= now_ms - FORGET_MS:
                self._free(sid)
                del self._sessions[sid]
                self._streams.pop(self._keys.text(sid), None)
                continue
            alive = self._lives(sid)
            listed.append(
                c.SessionInfo(sid, session.kind, session.name, session.address, alive, num_owned, session.status)
            )
        for name, worker in list(self._workers.items()):
            if worker.incarnation not in self._sessions:
                del self._workers[name]
                self._streams.pop(self._keys.steps(name), None)
                self._streams.pop(self._keys.results(name), None)
        return listed

    def _is_active(self, sid: bytes) -> bool:
        session = self._sessions.get(sid)
        return session is not None and session.state is _SessionState.ACTIVE

    def _lives(self, sid: bytes | None) -> bool:
        return sid is not None and self._is_active(sid) and self._sessions[sid].until_ms > self._now_ms()

    def _free(self, sid: bytes) -> None:
        self._leases = {shard: holder for shard, holder in self._leases.items() if holder != sid}
        for worker in self._workers.values():
            if worker.owner == sid:
                worker.owner = None

    # --- a request's way ----------------------------------------------------------------------------------------------

    def _submit(self, call: c.Submit) -> c.SubmitOutcome:
        if known := self._requests.get(call.request_id):
            same = known.tenant == call.tenant and known.digest == call.digest
            return c.SubmitOutcome.EXISTS if same else c.SubmitOutcome.CONFLICT
        if call.max_waiting:
            waiting = len(self._stream(self._keys.prompts)) + len(self._stream(self._keys.requests))
            if waiting >= call.max_waiting:
                return c.SubmitOutcome.OVERLOADED
        mark = self._marks.pop(call.request_id, None)
        reason = mark.reason if mark and mark.tenant in (None, call.tenant) else 0
        self._requests[bytes(call.request_id)] = _Request(
            call.tenant, bytes(call.header), bytes(call.body), bytes(call.digest), bytes(call.route), reason
        )
        self._add(self._keys.prompts, {k.REQUEST: call.request_id, k.SENT_NS: b"%d" % call.sent_ns})
        return c.SubmitOutcome.CREATED

    def _fetch(self, call: c.Fetch) -> c.StoredRequest | None:
        request = self._requests.get(call.request_id)
        return self._stored(call.request_id, request) if request else None

    def _tokenized(self, call: c.Tokenized) -> bool:
        self._delete_hint(call.entry_id)
        request = self._requests.get(call.request_id)
        if request is None or request.state is not c.RequestState.PROMPT:
            return False
        request.state, request.meta = c.RequestState.READY, bytes(call.meta)
        self._add(self._keys.requests, {k.REQUEST: call.request_id, k.SENT_NS: b"%d" % call.sent_ns})
        return True

    def _reject(self, call: c.Reject) -> bool:
        self._delete_hint(call.entry_id)
        request = self._requests.get(call.request_id)
        if request is None or request.state not in (c.RequestState.PROMPT, c.RequestState.READY):
            return False
        self._open(call.request_id, request, call.shard)
        self._add(self._keys.tokens(call.shard), {k.PAYLOAD: call.row})
        return True

    def _claim(self, call: c.Claim) -> list[c.StoredRequest] | None:
        if not self._is_active(call.sid):
            return None
        waiting = self._stream(self._keys.requests)
        claimed: list[c.StoredRequest] = []
        while len(claimed) < call.count and (head := waiting.read(b"0-0", call.count - len(claimed))):
            for entry in head:
                waiting.delete(entry.entry_id)
                request_id = entry.fields[k.REQUEST]
                request = self._requests.get(request_id)
                if request is None or request.state is not c.RequestState.READY:
                    continue
                request.owner = bytes(call.sid)
                self._open(request_id, request, call.shard)
                claimed.append(self._stored(request_id, request))
        return claimed

    def _take(self, call: c.Take) -> list[bytes] | None:
        if not self._is_active(call.sid) or call.sid == call.dead:
            return None
        if dead := self._sessions.get(call.dead):
            if dead.until_ms > self._now_ms():
                return None
            self._free(call.dead)
            del self._sessions[call.dead]
        moved = self._owned_by(call.dead)
        for request_id in moved:
            self._requests[request_id].owner = bytes(call.sid)
            self._requests[request_id].attempts += 1
        return moved

    def _owned(self, call: c.Owned) -> list[bytes] | None:
        return self._owned_by(call.sid) if self._is_active(call.sid) else None

    def _load(self, call: c.Load) -> c.Loaded | None:
        if not self._is_active(call.sid):
            return None
        loaded = c.Loaded([], {})
        for request_id in call.request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.owner == call.sid and request.shard is not None:
                loaded.requests.append(self._stored(request_id, request))
                if request.shard not in loaded.log:
                    loaded.log[request.shard] = self._stream(self._keys.tokens(request.shard)).read(b"0-0", 0)
        return loaded

    def _commit(self, call: c.Commit) -> bool:
        if not self._is_active(call.sid):
            return False
        for shard, row in call.rows:
            self._add(self._keys.tokens(shard), {k.PAYLOAD: row})
        if call.plan:
            self._add(self._keys.steps(call.worker), {k.PAYLOAD: call.plan}, k.STEPS_CAP)
        return True

    def _retire(self, call: c.Retire) -> bool:
        request = self._requests.get(call.request_id)
        if not self._leases_shard(call.sid, call.shard) or request is None:
            return False
        if request.state is not c.RequestState.RUNNING or request.shard != call.shard:
            return False
        request.state, request.owner = c.RequestState.ENDED, None
        request.header = request.body = request.meta = b""
        request_id = bytes(call.request_id)
        self._results[request_id] = bytes(call.result)
        self._forget_after(call.ttl_ms, lambda: (self._requests.pop(request_id), self._results.pop(request_id)))
        if call.route:
            self._add(self._keys.text(call.route), {k.PAYLOAD: call.text}, k.TEXT_CAP)
        return True

    def _attach(self, call: c.Attach) -> c.Attachment:
        request = self._requests.get(call.request_id)
        if request is None or request.tenant != call.tenant:
            return c.Attachment(known=False)
        if request.state is c.RequestState.ENDED:
            return c.Attachment(known=True, state=request.state, result=self._results[call.request_id])
        request.route = bytes(call.route)
        if request.shard is not None:
            fields = {k.REQUEST: call.request_id, k.ROUTE: call.route, k.OFFSETS: call.offsets}
            self._add(self._keys.attach(request.shard), fields, k.ATTACH_CAP)
        return c.Attachment(known=True, state=request.state)

    def _cancel(self, call: c.Cancel) -> bool:
        request = self._requests.get(call.request_id)
        if request is None:
            if call.sequence < 0:
                request_id, mark = bytes(call.request_id), _Mark(call.reason, call.tenant)
                self._marks[request_id] = mark
                self._forget_after(MARK_TTL_MS, lambda: self._forget_mark(request_id, mark))
            return False
        if call.tenant not in (None, request.tenant):
            return False
        if request.state is c.RequestState.ENDED:
            return True
        if call.sequence < 0:
            request.cancel_reason = request.cancel_reason or call.reason
        fields = {
            k.REQUEST: call.request_id,
            k.SEQUENCE: b"%d" % call.sequence,
            k.REASON: b"%d" % call.reason,
            k.SENT_NS: b"%d" % call.sent_ns,
        }
        self._add(self._keys.cancels, fields, k.CANCELS_CAP)
        return True

    def _owned_by(self, sid: bytes) -> list[bytes]:
        return sorted(request_id for request_id, request in self._requests.items() if request.owner == sid)

    def _open(self, request_id: bytes, request: _Request, shard: int) -> None:
        request.state, request.shard = c.RequestState.RUNNING, shard
        opening = {
            k.REQUEST: request_id,
            k.ROUTE: request.route,
            k.HEADER: request.header,
            k.BODY: request.body,
            k.META: request.meta,
        }
        self._add(self._keys.tokens(shard), opening)

    def _stored(self, request_id: bytes, request: _Request) -> c.StoredRequest:
        return c.StoredRequest(
            bytes(request_id),
            request.tenant,
            request.state,
            request.header,
            request.body,
            request.meta,
            request.route,
            request.shard,
            request.owner,
            request.cancel_reason,
            request.attempts,
        )

    def _delete_hint(self, entry_id: bytes) -> None:
        if entry_id:
            self._acknowledge(c.Acknowledge(self._keys.prompts, k.TOKENIZERS, entry_id))

    def _forget_mark(self, request_id: bytes, mark: _Mark) -> None:
        if self._marks.get(request_id) is mark:
            del self._marks[request_id]

    def _forget_after(self, ttl_ms: int, forget: Callable[[], object]) -> None:
        heapq.heappush(self._expiries, _Expiry(self._now_ms() + ttl_ms, next(self._order), forget))

    # --- workers and shards -------------------------------------------------------------------------------------------

    def _register_worker(self, call: c.RegisterWorker) -> bytes:
        if not self._is_active(call.sid):
            return b""
        known = self._workers.get(call.worker)
        owner = known.owner if known and known.incarnation == call.sid else None
        self._workers[call.worker] = _Worker(bytes(call.sid), bytes(call.info), owner)
        return self._stream(self._keys.steps(call.worker)).last_id

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
        if not self._is_active(call.sid) or worker is None or not self._lives(worker.incarnation):
            return None
        if worker.owner in self._sessions and worker.owner != call.sid:
            return None
        worker.owner = bytes(call.sid)
        return c.Pairing(worker.incarnation, worker.info, self._stream(self._keys.results(call.worker)).last_id)

    def _lease_shard(self, call: c.LeaseShard) -> bool:
        holder = self._leases.get(call.shard)
        if not self._is_active(call.sid) or (holder != call.sid and self._lives(holder)):
            return False
        self._leases[call.shard] = bytes(call.sid)
        return True

    def _release_shard(self, call: c.ReleaseShard) -> None:
        if self._leases.get(call.shard) == call.sid:
            del self._leases[call.shard]

    def _leases_shard(self, sid: bytes, shard: int) -> bool:
        return self._is_active(sid) and self._leases.get(shard) == sid

    # --- streams ------------------------------------------------------------------------------------------------------

    def _stream(self, name: bytes) -> MemoryStream:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[bytes(name)] = MemoryStream()
        return stream

    def _add(self, stream: bytes, fields: dict[bytes, bytes], cap: int = 0) -> bytes:
        return self._stream(stream).add(fields, self._now_ms(), cap)

    def _append(self, call: c.Append) -> bytes:
        return self._add(call.stream, dict(call.fields), call.cap)

    def _read(self, call: c.Read) -> dict[bytes, list[c.Entry]]:
        found = {bytes(name): self._stream(name).read(behind, call.count) for name, behind in call.streams.items()}
        return {name: entries for name, entries in found.items() if entries}

    def _read_group(self, call: c.ReadGroup) -> list[c.Entry]:
        return self._stream(call.stream).read_group(call.group, call.consumer, call.count, self._now_ms())

    def _reclaim(self, call: c.Reclaim) -> list[c.Entry]:
        stream = self._stream(call.stream)
        return stream.reclaim(call.group, call.consumer, call.min_idle_ms, call.count, self._now_ms())

    def _acknowledge(self, call: c.Acknowledge) -> None:
        self._stream(call.stream).acknowledge(call.group, call.entry_id)
        self._stream(call.stream).delete(call.entry_id)

    def _last_id(self, call: c.LastId) -> bytes:
        return self._stream(call.stream).last_id

    def _length(self, call: c.Length) -> int:
        return len(self._stream(call.stream))

    def _trim_log(self, call: c.TrimLog) -> bool:
        if not self._leases_shard(call.sid, call.shard):
            return False
        self._stream(self._keys.tokens(call.shard)).trim(call.min_id)
        return True

    def _drop_stream(self, call: c.DropStream) -> None:
        self._streams.pop(call.stream, None)
