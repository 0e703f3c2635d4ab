"""Reads a state of the pool."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from memory_store import Hash, Store
from memory_streams import Stream

from servicekit.bus.calls import RequestState, SessionKind
from servicekit.bus.keys import Keys, Names


class RequestView(NamedTuple):
    """One request in a state of the pool."""

    state: RequestState
    owner: bytes | None
    route: bytes
    is_cancelled: bool


@dataclass(frozen=True)
class PoolView:
    """What the world and the actors look at without asking the bus, for instance to leave out steps that do nothing."""

    run: int
    sessions: dict[bytes, tuple[SessionKind, bool, bool]]  # kind, active, its lease runs
    requests: dict[bytes, RequestView]
    results: dict[bytes, bytes]
    lengths: dict[bytes, int]  # entries by stream
    must_settle: bool  # the server was restarted a moment ago
    leases: dict[int, bytes]
    is_clean: bool  # no checkpoint or mark is left, and nothing counts as waiting or running


def look(store: Store, keys: Keys, run: int) -> PoolView:
    """The store of a server."""

    def all_of(name: bytes) -> dict[bytes, Any]:
        """The values of the keys of one kind, by the id in the key."""
        first = keys.key(name)
        found = {key[len(first) :].decode(): each for key, each in store.values.items() if key.startswith(first)}
        return {bytes.fromhex(digits): each for digits, each in found.items()}

    now_ms = store.now_ms()
    sessions: dict[bytes, Hash] = all_of(Names.SESSION)
    requests: dict[bytes, Hash] = all_of(Names.REQUEST)
    shards = store.find(keys.key(Names.SHARDS), Hash) or Hash()
    of_requests = [*all_of(Names.CHECKPOINT), *all_of(Names.MARK), *all_of(Names.RUNNING)]
    return PoolView(
        run=run,
        sessions={
            sid: (SessionKind(each[b"kind"].decode()), each[b"state"] == b"active", int(each[b"until"]) > now_ms)
            for sid, each in sorted(sessions.items())
        },
        requests={request_id: _request(each) for request_id, each in requests.items()},
        results=all_of(Names.RESULT),
        lengths={key: len(value) for key, value in store.values.items() if isinstance(value, Stream)},
        must_settle=store.find(keys.key(Names.SETTLE), bytes) not in (None, b"0"),
        leases={int(shard): bytes.fromhex(sid.decode()) for shard, sid in shards.items()},
        is_clean=not of_requests and not any(b"waits" in each for each in requests.values()),
    )


def _request(fields: Hash) -> RequestView:
    owner = fields.get(b"owner")
    return RequestView(
        RequestState(fields[b"state"].decode()),
        None if owner is None else bytes.fromhex(owner.decode()),
        fields[b"route"],
        fields[b"cancel"] != b"0",
    )
