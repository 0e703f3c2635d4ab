"""The state of one pool in memory, and every operation on it: what `functions/` does, in Python.

Nothing here locks or waits: `memory_bus` does. All values are bytes, copied where a container crosses the border.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count as counter
from typing import Any

from servicekit.bus import calls as c
from servicekit.bus import keys as k
from servicekit.bus.memory_sessions import MemorySessions
from servicekit.bus.memory_streams import MemoryStreams
from servicekit.bus.memory_waiting import AT_ONCE, MemoryWaiting

MARK_TTL_MS = 60_000  # how long a cancel waits for its request


@dataclass(slots=True)
class _Request:
    tenant: str
    header: bytes
    body: bytes
    digest: bytes
    route: bytes
    cancel_reason: int
    reply: bytes
    state: c.RequestState = c.RequestState.PROMPT
    meta: bytes = b""
    shard: int | None = None
    owner: bytes | None = None
    strikes: int = 0
    struck_at: int = 0  # output tokens
    checkpoint: bytes | None = None
    witness: tuple[bytes, ...] = ()
    routed: str = ""  # the server run in which `route` was set

    def keep_witness(self, given: tuple[bytes, ...]) -> None:
        """Takes over what extends the tokens that are known of a sequence, and nothing else."""
        num_sequences = max(len(self.witness), len(given))
        known, told = (each + (b"",) * (num_sequences - len(each)) for each in (self.witness, given))
        merged = tuple(new if new.startswith(old) else old for old, new in zip(known, told, strict=True))
        if merged != known:
            self.witness = tuple(map(bytes, merged))


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
        self._streams = MemoryStreams(now_ms)
        self._sessions = MemorySessions(
            keys,
            self._streams,
            now_ms,
            run_id,
            num_owned=lambda sid: len(self._owned_by(sid)),
            has_waiting=lambda: self._waiting.count("").num_requests > 0,
        )
        self._requests: dict[bytes, _Request] = {}
        self._waiting = MemoryWaiting(now_ms)
        self._results: dict[bytes, bytes] = {}
        self._marks: dict[bytes, _Mark] = {}
        self._expiries: list[_Expiry] = []
        self._order = counter()
        self._operations: dict[type[c.Call[Any]], Callable[[Any], Any]] = {
            **self._streams.operations(),
            **self._sessions.operations(),
            c.Submit: self._submit,
            c.Fetch: self._fetch,
            c.Tokenized: self._tokenized,
            c.Reject: self._reject,
            c.Overdue: self._overdue,
            c.CountWaiting: lambda call: self._waiting.count(call.tenant),
            c.Claim: self._claim,
            c.Take: self._take,
            c.Strike: self._strike,
            c.Owned: self._owned,
            c.Load: self._load,
            c.Commit: self._commit,
            c.Retire: self._retire,
            c.Recall: self._recall,
            c.Attach: self._attach,
            c.Cancel: self._cancel,
            c.Compact: self._compact,
            c.ReadCheckpoints: self._read_checkpoints,
        }

    def apply(self, call: c.Call[Any]) -> Any:
        """Carries out one call without waiting."""
        now_ms = self._now_ms()
        while self._expiries and self._expiries[0].at_ms <= now_ms:
            heapq.heappop(self._expiries).forget()
        return self._operations[type(call)](call)

    def new_run(self, run_id: str) -> None:
        """What a restart of the server changes, when nothing was lost."""
        self._sessions.new_run(run_id)

    def _submit(self, call: c.Submit) -> c.SubmitOutcome | c.Overload:
        if known := self._requests.get(call.request_id):
            if known.tenant != call.tenant or known.digest != call.digest:
                return c.SubmitOutcome.CONFLICT
            if call.witness:
                self._confirm(call, known)
            return c.SubmitOutcome.EXISTS
        if not call.witness and (refused := self._waiting.refusal(call.tenant, call.num_tokens, call.bounds)):
            return refused
        mark = self._marks.pop(call.request_id, None)
        reason = mark.reason if mark and mark.tenant in (None, call.tenant) else 0
        request = self._requests[bytes(call.request_id)] = _Request(
            call.tenant,
            bytes(call.header),
            bytes(call.body),
            bytes(call.digest),
            bytes(call.route),
            reason,
            bytes(call.reply),
        )
        due_ms = AT_ONCE if reason else call.deadline_ns // 1_000_000
        self._waiting.begin(bytes(call.request_id), call.tenant, call.num_tokens, due_ms)
        request.routed = self._sessions.run_seen
        request.keep_witness(call.witness)
        self._hint_prompt(call.request_id, request, call.sent_ns)
        return c.SubmitOutcome.CREATED

    def _confirm(self, call: c.Submit, request: _Request) -> None:
        if request.state is c.RequestState.ENDED:
            return
        request.keep_witness(call.witness)
        if request.routed != self._sessions.run_seen:
            request.route, request.routed = bytes(call.route), self._sessions.run_seen
        if request.state is c.RequestState.PROMPT:
            self._hint_prompt(call.request_id, request, call.sent_ns)
        elif request.state is c.RequestState.READY:
            self._hint_request(call.request_id, call.sent_ns)

    def _fetch(self, call: c.Fetch) -> c.StoredRequest | None:
        request = self._requests.get(call.request_id)
        return self._stored(call.request_id, request) if request else None

    def _tokenized(self, call: c.Tokenized) -> bool:
        self._delete_hint(call.entry_id)
        request = self._requests.get(call.request_id)
        if request is None or request.state is not c.RequestState.PROMPT:
            return False
        request.state, request.meta = c.RequestState.READY, bytes(call.meta)
        self._waiting.set_tokens(call.request_id, call.num_tokens)
        self._hint_request(call.request_id, call.sent_ns)
        return True

    def _reject(self, call: c.Reject) -> bool:
        self._delete_hint(call.entry_id)
        request = self._requests.get(call.request_id)
        if request is None or request.state not in (c.RequestState.PROMPT, c.RequestState.READY):
            return False
        self._waiting.end([call.request_id], have_started=False)
        self._open(call.request_id, request, call.shard)
        self._streams.add(self._keys.tokens(call.shard), {k.PAYLOAD: call.row})
        return True

    def _overdue(self, call: c.Overdue) -> list[c.StoredRequest]:
        late = [(each, self._requests[each]) for each in self._waiting.overdue(call.count)]
        return [self._stored(request_id, request) for request_id, request in late if not request.witness]

    def _claim(self, call: c.Claim) -> c.Claimed | c.Settling | None:
        if not self._sessions.is_active(call.sid):
            return None
        if not self._sessions.settle():
            return c.NOT_YET
        waiting = self._streams.get(self._keys.requests)
        claimed = c.Claimed()
        while len(claimed) < call.count and (head := waiting.read(b"0-0", call.count - len(claimed))):
            for entry in head:
                waiting.delete(entry.entry_id)
                request_id = entry.fields.get(k.REQUEST, b"")
                if len(request_id) != 16:
                    self._bury(self._keys.requests, entry.fields)
                    claimed.num_buried += 1
                    continue
                request = self._requests.get(request_id)
                if request is None or request.state is not c.RequestState.READY:
                    continue
                request.owner = bytes(call.sid)
                self._waiting.clear_due(request_id)
                self._open(request_id, request, call.shard)
                claimed.append(self._stored(request_id, request))
        claimed.num_coming = sum(len(self._streams.get(each)) for each in (self._keys.requests, self._keys.prompts))
        return claimed

    def _take(self, call: c.Take) -> list[bytes] | c.Settling | None:
        if call.sid == call.dead or not self._sessions.is_active(call.sid):
            return None
        if not self._sessions.settle():
            return c.NOT_YET
        if not self._sessions.remove_expired(call.dead):
            return None
        moved = self._owned_by(call.dead)
        for request_id in moved:
            self._requests[request_id].owner = bytes(call.sid)
        return moved

    def _strike(self, call: c.Strike) -> bool:
        if not self._sessions.is_active(call.sid):
            return False
        for struck in call.struck:
            request = self._requests.get(struck.request_id)
            if request is not None and request.owner == call.sid:
                request.strikes, request.struck_at = struck.strikes, struck.struck_at
        return True

    def _owned(self, call: c.Owned) -> list[bytes] | None:
        return self._owned_by(call.sid) if self._sessions.is_active(call.sid) else None

    def _load(self, call: c.Load) -> c.Loaded | c.Settling | None:
        if not self._sessions.is_active(call.sid):
            return None
        if not self._sessions.is_settled():
            return c.NOT_YET
        loaded = c.Loaded([], {})
        for request_id in call.request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.owner == call.sid and request.shard is not None:
                loaded.requests.append(self._stored(request_id, request))
                if request.checkpoint is not None:
                    loaded.checkpoints[bytes(request_id)] = request.checkpoint
                if request.shard not in loaded.log:
                    loaded.log[request.shard] = self._streams.get(self._keys.tokens(request.shard)).read(b"0-0", 0)
        return loaded

    def _commit(self, call: c.Commit) -> bool:
        if not self._sessions.is_active(call.sid):
            return False
        started = [call.started[first : first + 16] for first in range(0, len(call.started), 16)]
        self._waiting.end(started, have_started=True)
        for shard, row in call.rows:
            self._streams.add(self._keys.tokens(shard), {k.PAYLOAD: row})
        if call.plan:
            self._streams.add(self._keys.steps(call.worker), {k.PAYLOAD: call.plan}, k.STEPS_CAP)
        return True

    def _retire(self, call: c.Retire) -> bool:
        if not self._sessions.leases_shard(call.sid, call.shard):
            return False
        ended = [self._retire_one(call, *each) for each in ((call.request_id, call.result), *call.others)]
        return all(ended)

    def _retire_one(self, call: c.Retire, request_id: bytes, result: bytes) -> bool:
        request_id = bytes(request_id)
        request = self._requests.get(request_id)
        if request is None or request.state is not c.RequestState.RUNNING or request.shard != call.shard:
            return False
        request.state, request.owner, request.checkpoint = c.RequestState.ENDED, None, None
        request.header = request.body = request.meta = b""
        request.witness = ()
        self._waiting.end([request_id], have_started=False)
        self._results[request_id] = bytes(result)
        self._forget_after(call.ttl_ms, lambda: (self._requests.pop(request_id), self._results.pop(request_id)))
        if request.route != call.route and self._sessions.is_active(request.route):
            self._streams.add(self._keys.text(request.route), {k.REQUEST: request_id}, k.TEXT_CAP)
        return True

    def _recall(self, call: c.Recall) -> c.Recalled | c.Settling | None:
        request = self._requests.get(call.request_id)
        if request is None and not self._sessions.is_settled():
            return c.NOT_YET
        if request is None or request.tenant != call.tenant:
            return None
        return c.Recalled(request.state, request.reply, self._results.get(call.request_id))

    def _attach(self, call: c.Attach) -> c.Attachment:
        request = self._requests.get(call.request_id)
        if request is None or request.tenant != call.tenant:
            return c.Attachment(known=False, is_settling=request is None and not self._sessions.is_settled())
        if request.state is c.RequestState.ENDED:
            return c.Attachment(known=True, state=request.state, result=self._results[call.request_id])
        before = request.route
        if call.held and before not in (call.held, call.route):
            return c.Attachment(known=True, state=request.state, is_elsewhere=True)
        request.route, request.routed = bytes(call.route), self._sessions.run_seen
        if before != call.route and self._sessions.is_active(before):
            self._streams.add(self._keys.text(before), {k.REQUEST: call.request_id}, k.TEXT_CAP)
        if request.shard is not None:
            fields = {k.REQUEST: call.request_id, k.ROUTE: call.route, k.OFFSETS: call.offsets}
            self._streams.add(self._keys.attach(request.shard), fields, k.ATTACH_CAP)
        return c.Attachment(known=True, state=request.state)

    def _cancel(self, call: c.Cancel) -> bool:
        request = self._requests.get(call.request_id)
        if request is None:
            if call.sequence < 0 and not call.route:
                request_id, mark = bytes(call.request_id), _Mark(call.reason, call.tenant)
                self._marks[request_id] = mark
                self._forget_after(MARK_TTL_MS, lambda: self._forget_mark(request_id, mark))
            return False
        if call.tenant not in (None, request.tenant) or call.route not in (b"", request.route):
            return False
        if request.state is c.RequestState.ENDED:
            return True
        if call.sequence < 0:
            request.cancel_reason = request.cancel_reason or call.reason
            if request.state in (c.RequestState.PROMPT, c.RequestState.READY):
                self._waiting.set_due(bytes(call.request_id))
        fields = {
            k.REQUEST: call.request_id,
            k.SEQUENCE: b"%d" % call.sequence,
            k.REASON: b"%d" % call.reason,
            k.SENT_NS: b"%d" % call.sent_ns,
        }
        self._streams.add(self._keys.cancels, fields, k.CANCELS_CAP)
        return True

    def _compact(self, call: c.Compact) -> bool:
        if not self._sessions.leases_shard(call.sid, call.shard):
            return False
        for request_id, checkpoint in call.checkpoints:
            request = self._requests.get(request_id)
            if request and request.state is c.RequestState.RUNNING and request.shard == call.shard:
                request.checkpoint = bytes(checkpoint)
        self._streams.get(self._keys.tokens(call.shard)).trim(call.min_id)
        return True

    def _read_checkpoints(self, call: c.ReadCheckpoints) -> list[c.Checkpoint] | None:
        if not self._sessions.leases_shard(call.sid, call.shard):
            return None
        found = [
            c.Checkpoint(self._stored(request_id, request), request.checkpoint)
            for request_id, request in sorted(self._requests.items(), key=lambda item: item[0])
            if request_id > call.after and request.shard == call.shard and request.checkpoint is not None
        ]
        return found[: call.count]

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
        self._streams.add(self._keys.tokens(shard), opening)

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
            request.strikes,
            request.struck_at,
            request.witness,
        )

    def _hint_prompt(self, request_id: bytes, request: _Request, sent_ns: int) -> None:
        hint = {k.REQUEST: request_id, k.SENT_NS: b"%d" % sent_ns, k.HEADER: request.header, k.BODY: request.body}
        self._streams.add(self._keys.prompts, hint)

    def _hint_request(self, request_id: bytes, sent_ns: int) -> None:
        self._streams.add(self._keys.requests, {k.REQUEST: request_id, k.SENT_NS: b"%d" % sent_ns})

    def _bury(self, stream: bytes, fields: dict[bytes, bytes]) -> None:
        kept = dict(list(fields.items())[: k.MAX_DEAD_FIELDS])
        self._streams.add(self._keys.dead, {k.STREAM: stream, k.WHY: k.NO_REQUEST} | kept, k.DEAD_CAP)

    def _delete_hint(self, entry_id: bytes) -> None:
        if entry_id:
            self._streams.acknowledge(self._keys.prompts, k.TOKENIZERS, entry_id)

    def _forget_mark(self, request_id: bytes, mark: _Mark) -> None:
        if self._marks.get(request_id) is mark:
            del self._marks[request_id]

    def _forget_after(self, ttl_ms: int, forget: Callable[[], object]) -> None:
        heapq.heappush(self._expiries, _Expiry(self._now_ms() + ttl_ms, next(self._order), forget))
