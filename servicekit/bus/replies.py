"""Replies of the server (RESP2), each as the answer of its call."""

from dataclasses import replace
from typing import Any

from servicekit.bus import calls as c

Reply = Any  # bytes, int, None or a list of replies

_NOT_YET = 0  # instead of a list
_MOST_DIGITS = 20  # of a number of 64 bits
_OF_KEY = 2  # whose limit a submit was refused by: 0 the pool, 1 the tenant


def nothing(_: Reply) -> None:
    """The answer of a call that tells nothing."""
    return


def number(text: bytes) -> int:
    """A decimal field that only measures; 0 if it is missing or malformed."""
    return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else 0


def _entries(reply: Reply) -> list[c.Entry]:
    return [c.Entry(entry_id, dict(zip(fields[::2], fields[1::2], strict=True))) for entry_id, fields in reply or ()]


def ids(reply: Reply) -> list[bytes] | None:
    """Request ids, 16 bytes each; None: the session that asked is not active."""
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


def submitted(reply: Reply) -> c.SubmitOutcome | c.Overload | c.OverLimit:
    """The outcome of a submit."""
    if isinstance(reply, int):
        return c.SubmitOutcome(reply)
    of_tenant, of_tokens, wait_ms = reply
    if of_tenant == _OF_KEY:
        return c.OverLimit(c.Limit(of_tokens), wait_ms)
    return c.Overload(bool(of_tenant), bool(of_tokens), wait_ms)


def waiting(reply: Reply) -> c.Waiting:
    """Requests and tokens that wait."""
    return c.Waiting(*reply)


def all_stored(reply: Reply) -> list[c.StoredRequest]:
    """Requests without prompts and token ids."""
    return [_stored(request) for request in reply]


def fetched(reply: Reply) -> c.StoredRequest | None:
    """A request with its prompt; None: the server has none of this id."""
    return replace(_stored(reply), prompt=reply[14] or b"") if reply else None


def claimed(reply: Reply) -> c.Claimed | c.Settling | None:
    """Requests with their token ids; None: the session that asked is not active."""
    if reply == _NOT_YET:
        return c.NOT_YET
    if reply is None:
        return None
    requests, num_buried, num_coming, sent = reply
    return c.Claimed(map(_with_tokens, requests), num_buried, num_coming, map(number, sent))


def taken(reply: Reply) -> list[bytes] | c.Settling | None:
    """The ids of requests that a session had; None: the session that asked is not active."""
    return c.NOT_YET if reply == _NOT_YET else ids(reply)


def loaded(reply: Reply) -> c.Loaded | c.Settling | None:
    """Requests with their token ids, and what checkpoints and logs hold of them; None: as for `claimed`."""
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


def checkpoints(reply: Reply) -> list[c.Checkpoint] | None:
    """Requests of a shard, each with the rows of its checkpoint; None: the asker has not leased the shard."""
    return None if reply is None else [c.Checkpoint(_stored(request), rows) for request, rows in reply]


def greeting(reply: Reply) -> c.Greeting:
    """The answer to a hello."""
    return c.Greeting(new_run=bool(reply[0]), active=bool(reply[1]), term=reply[2], now_ms=reply[3])


def sessions(reply: Reply) -> list[c.SessionInfo]:
    """Sessions in the order of the reply."""
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


def surveyed(reply: Reply) -> c.Surveyed | None:
    """Changes of sessions and workers; None: there are none."""
    if reply is None:
        return None
    generation, is_whole, new_sessions, gone_sessions, new_workers, gone_workers, is_last = reply
    return c.Surveyed(
        generation,
        bool(is_whole),
        bool(is_last),
        sessions(new_sessions),
        [bytes.fromhex(sid.decode()) for sid in gone_sessions],
        [
            c.RegisteredWorker(
                name.decode(),
                bytes.fromhex(incarnation.decode()),
                info,
                None if owner is None else bytes.fromhex(owner.decode()),
            )
            for name, incarnation, info, owner in new_workers
        ],
        [name.decode() for name in gone_workers],
    )


def server_state(reply: Reply) -> c.ServerState:
    """The figures that matter of an INFO."""
    told = dict(line.split(":", 1) for line in reply.decode().splitlines() if ":" in line)
    writes = ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status")
    return c.ServerState(
        int(told.get("used_memory", 0)),
        int(told.get("maxmemory", 0)),
        told.get("aof_enabled") == "1",
        all(told.get(each, "ok") == "ok" for each in writes),  # a managed server may not say it
    )


def attachment(reply: Reply) -> c.Attachment:
    """The state of a request to which a client came back."""
    if reply is None or reply == _NOT_YET:
        return c.Attachment(known=False, is_settling=reply is not None)
    return c.Attachment(
        known=True, state=c.RequestState(reply[0].decode()), result=reply[1], is_elsewhere=bool(reply[2])
    )


def recalled(reply: Reply) -> c.Recalled | c.Settling | None:
    """A request as the server remembers it; None: it knows none of this id and tenant."""
    if reply == _NOT_YET:
        return c.NOT_YET
    return None if reply is None else c.Recalled(c.RequestState(reply[0].decode()), reply[1], reply[2], int(reply[3]))


def workers(reply: Reply) -> list[c.WorkerEntry]:
    """Registered workers by name."""
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


def pairing(reply: Reply) -> c.Pairing | c.Unwanted | None:
    """The worker that is the scheduler's now; None: it is not."""
    if reply == 0:
        return c.UNWANTED
    return None if reply is None else c.Pairing(bytes.fromhex(reply[0].decode()), reply[1], reply[2])


def shard_holders(reply: Reply) -> dict[int, bytes]:
    """Sessions by shard."""
    return {int(shard): bytes.fromhex(sid.decode()) for shard, sid in zip(reply[::2], reply[1::2], strict=True)}


def streams(reply: Reply) -> dict[bytes, list[c.Entry]]:
    """Entries by stream."""
    return {stream: _entries(entries) for stream, entries in reply or ()}


def group_entries(reply: Reply) -> list[c.Entry]:
    """The entries that a consumer was given."""
    # An entry that is pending and was deleted has no fields.
    return _entries([entry for entry in reply[0][1] if entry[1] is not None]) if reply else []


def reclaimed(reply: Reply) -> list[c.Entry]:
    """Entries that were another consumer's."""
    return _entries(reply[1])
