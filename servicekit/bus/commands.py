"""The table of calls: the command that each is sent as, and which of `replies` makes its answer."""

from collections.abc import Callable
from typing import Any, TypeVar

import hiredis

from servicekit.bus import calls as c
from servicekit.bus import keys as k
from servicekit.bus import replies
from servicekit.bus.library import Library
from servicekit.bus.replies import Reply

C = TypeVar("C", bound=c.Call[Any])
Command = tuple[bytes | str | int, ...]


def pack(command: Command) -> bytes:
    """One command as it is sent."""
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed


def block_s(call: c.Call[Any]) -> float:
    """The time that a call may wait on the server, seconds."""
    return call.block_ms / 1000 if isinstance(call, c.Read | c.ReadGroup) else 0.0


def awake_s(call: c.Call[Any]) -> float:
    """The part of that for which its caller wants nobody to sleep, seconds."""
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
            replies.greeting,
        )
        add(c.Revalidate, "revalidate", lambda q: (q.sid.hex(), q.ttl_ms), bool)
        add(c.Renew, "renew", _renew, c.Renewed)
        add(c.Leave, "leave", lambda q: (q.sid.hex(),), replies.nothing)
        self._add(
            c.ReadStatus,
            lambda q: (b"HGET", self._keys.session(q.sid), k.STATUS),
            lambda reply: reply or b"",
        )
        self._add(c.ReadServerState, lambda _: (b"INFO", b"memory", b"persistence"), replies.server_state)
        add(c.ListSessions, "list_sessions", lambda _: (), replies.sessions)
        add(c.Survey, "survey", lambda q: (q.since, q.count), replies.surveyed)

    def _add_requests(self) -> None:
        add = self._add_function
        add(c.Submit, "submit", _submit, replies.submitted)
        add(c.Fetch, "fetch", lambda q: (q.request_id,), replies.fetched)
        add(
            c.Tokenized,
            "tokenized",
            lambda q: (q.request_id, q.entry_id, q.meta, q.sent_ns, q.num_tokens, q.token_ids),
            bool,
        )
        add(c.Reject, "reject", lambda q: (q.request_id, q.entry_id, q.shard, q.row), bool)
        add(c.Overdue, "overdue", lambda q: (q.count,), replies.all_stored)
        add(c.CountWaiting, "count_waiting", lambda q: (q.tenant,), replies.waiting)
        add(c.Claim, "claim", lambda q: (q.sid.hex(), q.count, q.shard), replies.claimed)
        add(c.Take, "take", lambda q: (q.sid.hex(), q.dead.hex()), replies.taken)
        add(c.Strike, "strike", lambda q: (q.sid.hex(), *(each for s in q.struck for each in _struck(s))), bool)
        add(c.HandOver, "hand_over", lambda q: (q.sid.hex(), q.receiver.hex(), *q.request_ids), replies.ids)
        add(c.Owned, "owned", lambda q: (q.sid.hex(),), replies.ids)
        add(c.Load, "load", lambda q: (q.sid.hex(), *q.request_ids), replies.loaded)
        self._add(c.Commit, self._commit, bool)
        add(
            c.KeepPromptOutput,
            "keep_prompt_output",
            lambda q: (q.request_id, k.prompt_output(q.model_digest), q.output),
            bool,
        )
        self._add(
            c.ReadPromptOutput,
            lambda q: (b"HGET", self._keys.request(q.request_id), k.prompt_output(q.model_digest)),
            lambda reply: reply,
        )
        add(
            c.Retire,
            "retire",
            lambda q: (q.sid.hex(), q.shard, q.ttl_ms, q.route, ",".join(map(str, q.tokens)), *_retired(q)),
            bool,
        )
        add(c.Delivered, "delivered", lambda q: tuple(part for each in q.several for part in each), replies.nothing)
        self._add(c.CountUntold, lambda _: (b"HGET", self._keys.untold, k.UNTOLD_TRACES), lambda reply: int(reply or 0))
        add(c.Recall, "recall", lambda q: (q.request_id, q.tenant), replies.recalled)
        add(
            c.Attach,
            "attach",
            lambda q: (q.request_id, q.tenant, q.route, q.routed_ms, q.offsets, q.held),
            replies.attachment,
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
        add(c.ListWorkers, "list_workers", lambda _: (), replies.workers)
        add(c.Pair, "pair", lambda q: (q.sid.hex(), q.worker), replies.pairing)
        add(c.Unpair, "unpair", lambda q: (q.sid.hex(), q.worker), replies.nothing)
        add(c.LeaseShard, "lease_shard", lambda q: (q.sid.hex(), q.shard, int(q.held), q.num_read), bool)
        self._add(c.ListShards, lambda _: (b"HGETALL", self._keys.shards), replies.shard_holders)
        add(c.LogBacklogs, "log_backlogs", lambda q: q.shards, list)
        add(c.ReleaseShard, "release_shard", lambda q: (q.sid.hex(), q.shard), replies.nothing)
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
            replies.checkpoints,
        )

    def _add_streams(self) -> None:
        self._add(c.Append, _append, bytes)
        self._add(c.Read, _read, replies.streams)
        self._add(c.ReadGroup, _read_group, replies.group_entries)
        self._add(
            c.Reclaim,
            lambda q: (b"XAUTOCLAIM", q.stream, q.group, q.consumer, q.min_idle_ms, b"0-0", b"COUNT", q.count),
            replies.reclaimed,
        )
        self._add_function(c.Acknowledge, "acknowledge", lambda q: (q.stream, q.group, q.entry_id), replies.nothing)
        self._add_function(c.LastId, "last_id", lambda q: (q.stream,), bytes)
        self._add(c.Length, lambda q: (b"XLEN", q.stream), int)
        self._add(c.DropStream, lambda q: (b"UNLINK", q.stream), replies.nothing)

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
