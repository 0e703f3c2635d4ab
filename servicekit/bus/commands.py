"""Calls on the wire: the command that each is sent as, and its answer made from the reply (RESP2)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import hiredis

from servicekit.bus import calls as c
from servicekit.bus import keys as k
from servicekit.bus.library import Library

C = TypeVar("C", bound=c.Call[Any])
Command = tuple[bytes | str | int, ...]
Reply = Any  # bytes, int, None or a list of replies


_NOT_YET = 0  # instead of a list
_OF_KEY = 2  # whose limit a submit was refused by: 0 the pool, 1 the tenant


def pack(command: Command) -> bytes:
    """One command as it is sent."""
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed


def _nothing(_: Reply) -> None:
    return None


def _entries(reply: Reply) -> list[c.Entry]:
    return [c.Entry(entry_id, dict(zip(fields[::2], fields[1::2], strict=True))) for entry_id, fields in reply or ()]


def _ids(reply: Reply) -> list[bytes] | None:
    return None if reply is None else [bytes.fromhex(request_id.decode()) for request_id in reply]


def _stored(reply: Reply) -> c.StoredRequest:
    request_id, tenant, state, header, body, meta, route, shard, owner, cancel, strikes, struck_at, *told = reply[:14]
    witness, model_digest = told
    return c.StoredRequest(
        request_id,
        tenant.decode(),
        c.RequestState(state.decode()),
        header or b"",
        body or b"",
        meta or b"",
        route,
        None if shard is None else int(shard),
        None if owner is None else bytes.fromhex(owner.decode()),
        int(cancel),
        int(strikes),
        int(struck_at),
        tuple(witness),
        model_digest or b"",
    )


def _with_tokens(reply: Reply) -> c.StoredRequest:
    return replace(_stored(reply), token_ids=reply[14] or b"")


def _submitted(reply: Reply) -> c.SubmitOutcome | c.Overload | c.OverLimit:
    if isinstance(reply, int):
        return c.SubmitOutcome(reply)
    of_tenant, of_tokens, wait_ms = reply
    if of_tenant == _OF_KEY:
        return c.OverLimit(c.Limit(of_tokens), wait_ms)
    return c.Overload(bool(of_tenant), bool(of_tokens), wait_ms)


def _waiting(reply: Reply) -> c.Waiting:
    return c.Waiting(*reply)


def _all_stored(reply: Reply) -> list[c.StoredRequest]:
    return [_stored(request) for request in reply]


def _optional_stored(reply: Reply) -> c.StoredRequest | None:
    return replace(_stored(reply), prompt=reply[14] or b"") if reply else None


def _claimed(reply: Reply) -> c.Claimed | c.Settling | None:
    if reply == _NOT_YET:
        return c.NOT_YET
    return None if reply is None else c.Claimed(map(_with_tokens, reply[0]), *reply[1:])


def _taken(reply: Reply) -> list[bytes] | c.Settling | None:
    return c.NOT_YET if reply == _NOT_YET else _ids(reply)


def _loaded(reply: Reply) -> c.Loaded | c.Settling | None:
    if reply == _NOT_YET:
        return c.NOT_YET
    if reply is None:
        return None
    requests, logs, checkpoints = reply
    return c.Loaded(
        [_with_tokens(request) for request in requests],
        {int(shard): _entries(log) for shard, log in logs},
        dict(checkpoints),
    )


def _checkpoints(reply: Reply) -> list[c.Checkpoint] | None:
    return None if reply is None else [c.Checkpoint(_stored(request), rows) for request, rows in reply]


def _greeting(reply: Reply) -> c.Greeting:
    return c.Greeting(new_run=bool(reply[0]), active=bool(reply[1]), term=reply[2])


def _sessions(reply: Reply) -> list[c.SessionInfo]:
    return [
        c.SessionInfo(
            bytes.fromhex(sid.decode()),
            c.SessionKind(kind.decode()),
            name.decode(),
            address.decode(),
            bool(alive),
            num_owned,
            status,
            bool(left),
            silent_ms,
        )
        for sid, kind, name, address, alive, num_owned, status, left, silent_ms in reply
    ]


def _surveyed(reply: Reply) -> c.Surveyed | None:
    if reply is None:
        return None
    generation, is_whole, sessions, gone_sessions, workers, gone_workers, is_last = reply
    return c.Surveyed(
        generation,
        bool(is_whole),
        bool(is_last),
        _sessions(sessions),
        [bytes.fromhex(sid.decode()) for sid in gone_sessions],
        [
            c.RegisteredWorker(
                name.decode(),
                bytes.fromhex(incarnation.decode()),
                info,
                None if owner is None else bytes.fromhex(owner.decode()),
            )
            for name, incarnation, info, owner in workers
        ],
        [name.decode() for name in gone_workers],
    )


def _server_state(reply: Reply) -> c.ServerState:
    told = dict(line.split(":", 1) for line in reply.decode().splitlines() if ":" in line)
    writes = ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status")
    return c.ServerState(
        int(told.get("used_memory", 0)),
        int(told.get("maxmemory", 0)),
        told.get("aof_enabled") == "1",
        all(told.get(each, "ok") == "ok" for each in writes),  # a managed server may not say it
    )


def _attachment(reply: Reply) -> c.Attachment:
    if reply is None or reply == _NOT_YET:
        return c.Attachment(known=False, is_settling=reply is not None)
    return c.Attachment(
        known=True, state=c.RequestState(reply[0].decode()), result=reply[1], is_elsewhere=bool(reply[2])
    )


def _recalled(reply: Reply) -> c.Recalled | c.Settling | None:
    if reply == _NOT_YET:
        return c.NOT_YET
    return None if reply is None else c.Recalled(c.RequestState(reply[0].decode()), reply[1], reply[2], int(reply[3]))


def _workers(reply: Reply) -> list[c.WorkerEntry]:
    entries = [
        c.WorkerEntry(
            name.decode(),
            bytes.fromhex(incarnation.decode()),
            bool(alive),
            info,
            None if owner is None else bytes.fromhex(owner.decode()),
        )
        for name, incarnation, alive, info, owner in reply
    ]
    return sorted(entries, key=lambda entry: entry.worker)


def _pairing(reply: Reply) -> c.Pairing | c.Unwanted | None:
    if reply == 0:
        return c.UNWANTED
    return None if reply is None else c.Pairing(bytes.fromhex(reply[0].decode()), reply[1], reply[2])


def _streams(reply: Reply) -> dict[bytes, list[c.Entry]]:
    return {stream: _entries(entries) for stream, entries in reply or ()}


def _group_entries(reply: Reply) -> list[c.Entry]:
    # An entry that is pending and was deleted has no fields.
    return _entries([entry for entry in reply[0][1] if entry[1] is not None]) if reply else []


def _reclaimed(reply: Reply) -> list[c.Entry]:
    return _entries(reply[1])


def block_s(call: c.Call[Any]) -> float:
    """The time that a call may wait on the server."""
    return call.block_ms / 1000 if isinstance(call, c.Read | c.ReadGroup) else 0.0


def awake_s(call: c.Call[Any]) -> float:
    """For how long of that its caller wants nobody to sleep."""
    return call.awake_s if isinstance(call, c.Read | c.ReadGroup) else 0.0


class Commands:
    """Encodes the calls of one pool and decodes their replies."""

    def __init__(self, keys: k.Keys, library: Library) -> None:
        self.run_key = keys.run  # a key of the pool, whose slot is that of all
        self._keys = keys
        self._prefix = keys.prefix
        self._library = library
        self._commit_function = library.function("commit")
        self._encoders: dict[type[c.Call[Any]], Callable[[Any], Command]] = {}
        self._decoders: dict[type[c.Call[Any]], Callable[[Reply], Any]] = {}
        self._add_sessions()
        self._add_requests()
        self._add_workers()
        self._add_streams()

    def encode(self, call: c.Call[Any]) -> bytes:
        """The call as it is sent.

        Raises:
            ValueError: a `Read` without streams.
        """
        return pack(self._encoders[type(call)](call))

    def repair(self, call: c.Call[Any], error: Exception) -> list[bytes] | None:
        """The commands to send after an error so that the last reply is the call's, packed; None: nothing helps."""
        if isinstance(call, c.ReadGroup | c.Reclaim) and str(error).startswith("NOGROUP"):
            return [pack((b"XGROUP", b"CREATE", call.stream, call.group, b"0", b"MKSTREAM")), self.encode(call)]
        if isinstance(call, c.Append) and call.cap and str(error).startswith("OOM"):
            # A capped stream cannot fill the server, and what stands in it lets requests end, which makes room.
            fields = (part for pair in call.fields.items() for part in pair)
            function = self._library.function("append")
            return [pack((b"FCALL", function, 1, self._prefix, call.stream, call.cap, *fields))]
        return None

    def decode(self, call: c.Call[Any], reply: Reply) -> Any:
        """The answer that a reply without an error means."""
        return self._decoders[type(call)](reply)

    def _add(self, kind: type[C], encode: Callable[[C], Command], decode: Callable[[Reply], Any]) -> None:
        self._encoders[kind], self._decoders[kind] = encode, decode

    def _add_function(
        self, kind: type[C], name: str, arguments: Callable[[C], Command], decode: Callable[[Reply], Any]
    ) -> None:
        head: Command = (b"FCALL", self._library.function(name), 1, self._prefix)
        self._add(kind, lambda call: head + arguments(call), decode)

    def _add_sessions(self) -> None:
        add = self._add_function
        add(
            c.Hello,
            "hello",
            lambda q: (
                q.sid.hex(),
                q.kind.value,
                q.name,
                q.address,
                q.ttl_ms,
                int(q.create),
                q.term,
                *sum(q.shape, ()),
            ),
            _greeting,
        )
        add(c.Revalidate, "revalidate", lambda q: (q.sid.hex(), q.ttl_ms), bool)
        add(c.Renew, "renew", _renew, c.Renewed)
        add(c.Leave, "leave", lambda q: (q.sid.hex(),), _nothing)
        self._add(
            c.ReadStatus,
            lambda q: (b"HGET", self._keys.session(q.sid), k.STATUS),
            lambda reply: reply or b"",
        )
        self._add(c.ReadServerState, lambda _: (b"INFO", b"memory", b"persistence"), _server_state)
        add(c.ListSessions, "list_sessions", lambda _: (), _sessions)
        add(c.Survey, "survey", lambda q: (q.since, q.count), _surveyed)

    def _add_requests(self) -> None:
        add = self._add_function
        add(c.Submit, "submit", _submit, _submitted)
        add(c.Fetch, "fetch", lambda q: (q.request_id,), _optional_stored)
        add(
            c.Tokenized,
            "tokenized",
            lambda q: (q.request_id, q.entry_id, q.meta, q.sent_ns, q.num_tokens, q.token_ids),
            bool,
        )
        add(c.Reject, "reject", lambda q: (q.request_id, q.entry_id, q.shard, q.row), bool)
        add(c.Overdue, "overdue", lambda q: (q.count,), _all_stored)
        add(c.CountWaiting, "count_waiting", lambda q: (q.tenant,), _waiting)
        add(c.Claim, "claim", lambda q: (q.sid.hex(), q.count, q.shard), _claimed)
        add(c.Take, "take", lambda q: (q.sid.hex(), q.dead.hex()), _taken)
        add(c.Strike, "strike", lambda q: (q.sid.hex(), *(each for s in q.struck for each in _struck(s))), bool)
        add(c.HandOver, "hand_over", lambda q: (q.sid.hex(), q.receiver.hex(), *q.request_ids), _ids)
        add(c.Owned, "owned", lambda q: (q.sid.hex(),), _ids)
        add(c.Load, "load", lambda q: (q.sid.hex(), *q.request_ids), _loaded)
        self._add(c.Commit, self._commit, bool)
        add(
            c.Retire,
            "retire",
            lambda q: (q.sid.hex(), q.shard, q.ttl_ms, q.route, ",".join(map(str, q.tokens)), *_retired(q)),
            bool,
        )
        add(c.Delivered, "delivered", lambda q: tuple(part for each in q.several for part in each), _nothing)
        self._add(c.CountUntold, lambda _: (b"HGET", self._keys.untold, k.UNTOLD_TRACES), lambda reply: int(reply or 0))
        add(c.Recall, "recall", lambda q: (q.request_id, q.tenant), _recalled)
        add(
            c.Attach,
            "attach",
            lambda q: (q.request_id, q.tenant, q.route, q.routed_ms, q.offsets, q.held),
            _attachment,
        )
        add(
            c.Cancel,
            "cancel",
            lambda q: (
                q.request_id,
                q.reason,
                q.sent_ns,
                q.sequence,
                q.route,
                *(() if q.tenant is None else (q.tenant,)),
            ),
            bool,
        )

    def _add_workers(self) -> None:
        add = self._add_function
        add(c.RegisterWorker, "register_worker", lambda q: (q.sid.hex(), q.worker, q.info, q.model_digest), bytes)
        add(c.ListWorkers, "list_workers", lambda _: (), _workers)
        add(c.Pair, "pair", lambda q: (q.sid.hex(), q.worker), _pairing)
        add(c.Unpair, "unpair", lambda q: (q.sid.hex(), q.worker), _nothing)
        add(c.LeaseShard, "lease_shard", lambda q: (q.sid.hex(), q.shard, int(q.held), q.num_read), bool)
        add(c.LogBacklogs, "log_backlogs", lambda q: q.shards, list)
        add(c.ReleaseShard, "release_shard", lambda q: (q.sid.hex(), q.shard), _nothing)
        add(
            c.Compact,
            "compact",
            lambda q: (q.sid.hex(), q.shard, q.min_id, *(part for checkpoint in q.checkpoints for part in checkpoint)),
            bool,
        )
        add(
            c.ReadCheckpoints,
            "read_checkpoints",
            lambda q: (q.sid.hex(), q.shard, q.after, q.count),
            _checkpoints,
        )

    def _add_streams(self) -> None:
        self._add(c.Append, _append, bytes)
        self._add(c.Read, _read, _streams)
        self._add(c.ReadGroup, _read_group, _group_entries)
        self._add(
            c.Reclaim,
            lambda q: (b"XAUTOCLAIM", q.stream, q.group, q.consumer, q.min_idle_ms, b"0-0", b"COUNT", q.count),
            _reclaimed,
        )
        self._add_function(c.Acknowledge, "acknowledge", lambda q: (q.stream, q.group, q.entry_id), _nothing)
        self._add_function(c.LastId, "last_id", lambda q: (q.stream,), bytes)
        self._add(c.Length, lambda q: (b"XLEN", q.stream), int)
        self._add(c.DropStream, lambda q: (b"UNLINK", q.stream), _nothing)

    def _commit(self, call: c.Commit) -> Command:
        head = (b"FCALL", self._commit_function, 1, self._prefix, call.sid.hex(), call.worker, call.plan, call.started)
        return head + tuple(part for row in call.rows for part in row)


def _renew(call: c.Renew) -> Command:
    models: Command = () if call.models is None else (call.models,)
    return (call.sid.hex(), call.ttl_ms, call.status, int(call.draining), *models)


def _submit(call: c.Submit) -> Command:
    bounds = call.bounds
    return (
        *(call.request_id, call.tenant, call.header, call.body, call.prompt),
        *(call.digest, call.route, call.routed_ms, call.sent_ns, call.reply),
        *(call.num_tokens, call.deadline_ns // 1_000_000),
        *(bounds.requests, bounds.tokens, bounds.tenant_requests, bounds.tenant_tokens),
        call.model_digest,
        "" if call.metered is None else _metered(call.metered),
        *call.witness,
    )


def _metered(metered: c.Metered) -> str:
    numbers = (
        metered.rpm,
        metered.tpm,
        metered.max_running,
        metered.tokens,
        metered.call_tokens,
        metered.call_requests,
    )
    return f"{metered.key.hex()} {' '.join(map(str, numbers))} {metered.leader.hex()}"


def _retired(call: c.Retire) -> Command:
    traces = call.traces or [b""] * (1 + len(call.others))
    several = zip(((call.request_id, call.result), *call.others), traces, strict=True)
    return tuple(part for (request_id, result), trace in several for part in (request_id, result, trace))


def _struck(struck: c.Struck) -> Command:
    return struck.request_id, struck.strikes, struck.struck_at


def _append(call: c.Append) -> Command:
    cap: Command = (b"MAXLEN", b"~", call.cap) if call.cap else ()
    return (b"XADD", call.stream, *cap, b"*", *(part for pair in call.fields.items() for part in pair))


def _read(call: c.Read) -> Command:
    if not call.streams:
        raise ValueError("Read needs at least one stream")
    block: Command = (b"BLOCK", call.block_ms) if call.block_ms else ()
    return (b"XREAD", b"COUNT", call.count, *block, b"STREAMS", *call.streams.keys(), *call.streams.values())


def _read_group(call: c.ReadGroup) -> Command:
    block: Command = (b"BLOCK", call.block_ms) if call.block_ms else ()
    head: Command = (b"XREADGROUP", b"GROUP", call.group, call.consumer, b"COUNT", call.count)
    return (*head, *block, b"STREAMS", call.stream, b"0" if call.pending else b">")
