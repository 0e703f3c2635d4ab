"""Sessions: who is there."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum

from servicekit.bus.calls.call import Call


class SessionKind(Enum):
    """The kind of a session."""

    GATEWAY = "gateway"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    DETOKENIZER = "detokenizer"


@dataclass(frozen=True, slots=True)
class Greeting:
    """`new_run`: the server was restarted since the pool last said hello; every session was suspended by that.

    Also if the server remembers nothing, not even a hello, and a session comes back to it; and if this one was with
    another copy of the pool, which was ahead.
    """

    new_run: bool
    active: bool  # whether this session is active after the call
    term: int = field(default=0, compare=False)  # to be said with the next hello
    now_ms: int = field(default=0, compare=False)  # the server's clock, Unix time


@dataclass(frozen=True, slots=True)
class Hello(Call[Greeting]):
    """First on every connection of a session: creates or renews it; notices a restarted server.

    A new server run suspends every session and drops every shard lease; a suspended session comes back by `Revalidate`.
    It also gives each session its `ttl_ms` anew: that the server was down is not their fault. And the pool settles:
    `Claim`, `Take` and `Load` answer NOT_YET until a second has passed and no gateway is suspended any more whose time
    runs. Each hello gives a suspended session its time anew; a gateway that comes back (`create` False) to a pool that
    settles and was lost with the last writes is suspended like the others, so that it is waited for.
    """

    sid: bytes
    kind: SessionKind
    name: str  # what people call this process, e.g. the worker's name
    address: str  # host:port of its gRPC server, empty if none
    ttl_ms: int
    create: bool = True  # False when a session reconnects: one that was taken over must not rise again
    # (part, value), neither with a space: what all services of the pool must agree on. The first that knows a part
    # writes it down; it is gone when no session and no live request is left. Who differs is refused.
    shape: tuple[tuple[str, str], ...] = ()
    term: int = 0  # the latest that this process has heard, whatever its session was: a copy that is not as far
    # becomes another run


@dataclass(frozen=True, slots=True)
class Revalidate(Call[bool]):
    """Reactivates a suspended session. False: it does not exist any more (a new session id must be drawn)."""

    sid: bytes
    ttl_ms: int


class Renewed(IntEnum):
    """The outcome of a renewal; only FENCED is false."""

    FENCED = 0  # or suspended
    YES = 1
    UNWANTED = 2  # yes, of a worker that the pool does not take in, see `Pair`


@dataclass(frozen=True, slots=True)
class Renew(Call[Renewed]):
    """Extends a session by `ttl_ms` from now and stores its status."""

    sid: bytes
    ttl_ms: int
    status: bytes = b""  # penstock.v1.ServiceStatus, shown by `penstock status`; empty keeps the last
    draining: bool = False  # as the status says: a change of it is told by surveys at once
    models: bytes | None = None  # of a scheduler: digests of the models on which its requests began; None: as before


@dataclass(frozen=True, slots=True)
class Leave(Call[None]):
    """Ends a session in order: leases and workers are free at once; requests that it owns can be taken at once."""

    sid: bytes


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session as the pool knows it."""

    sid: bytes
    kind: SessionKind
    name: str
    address: str
    alive: bool  # active and not expired
    num_owned: int  # requests it owns
    status: bytes
    left: bool = False  # ended in order
    silent_ms: int = field(default=0, compare=False)  # since it was last heard of


@dataclass(frozen=True, slots=True)
class ReadStatus(Call[bytes]):
    """The status that a session has stored last; empty: none, or it is not known."""

    sid: bytes


@dataclass(frozen=True, slots=True)
class ListSessions(Call[list[SessionInfo]]):
    """All sessions, living and dead; sessions that are dead for a minute and own nothing are forgotten here."""
