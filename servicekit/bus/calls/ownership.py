"""Calls of a scheduler about the requests that it owns."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from servicekit.bus.calls.call import Call, Settling
from servicekit.bus.calls.requests import StoredRequest
from servicekit.bus.calls.streams import Entry


class Claimed(list[StoredRequest]):
    """Requests that a scheduler owns from now on."""

    def __init__(
        self,
        requests: Iterable[StoredRequest] = (),
        num_buried: int = 0,
        num_coming: int = 0,
        sent_ns: Iterable[int] = (),
    ) -> None:
        super().__init__(requests)
        self.num_buried = num_buried  # entries that moved to `dead`
        self.num_coming = num_coming  # entries that are left in `requests` and `prompts`
        self.sent_ns = list(sent_ns)  # of each request: when its hint was sent, Unix nanoseconds; 0: it did not say


@dataclass(frozen=True, slots=True)
class Claim(Call[Claimed | Settling | None]):
    """Takes up to `count` requests from the head of `requests`: READY → RUNNING, owned by `sid`, in `shard`.

    Each is opened in the log of its shard in the same moment. Entries that lead nowhere are deleted, those that hold
    no request id move to `dead`. None: fenced.
    """

    sid: bytes
    count: int
    shard: int


@dataclass(frozen=True, slots=True)
class Take(Call[list[bytes] | Settling | None]):
    """Takes over everything of `dead` once its lease ran out or it left: requests and workers (freed).

    The answer is the ids of the requests moved; None: `sid` is fenced, or `dead` lives.
    """

    sid: bytes
    dead: bytes


@dataclass(frozen=True, slots=True)
class Struck:
    """A request that got a strike, and what its owner makes of all that it got."""

    request_id: bytes
    strikes: int  # that count
    struck_at: int  # output tokens that it has


@dataclass(frozen=True, slots=True)
class Strike(Call[bool]):
    """A worker died while it computed these requests of `sid`: kept for whoever owns them next. False: fenced."""

    sid: bytes
    struck: tuple[Struck, ...]


@dataclass(frozen=True, slots=True)
class HandOver(Call[list[bytes] | None]):
    """Requests of `sid` become those of another scheduler session, if that one lives; a survey tells it to look.

    The answer is those of them that `sid` does not own (any more); None: fenced.
    """

    sid: bytes
    receiver: bytes
    request_ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Owned(Call[list[bytes] | None]):
    """The ids of all requests that `sid` owns: for an owner whose `Claim` or `Take` lost its answer. None: fenced."""

    sid: bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that a new owner needs, in one atomic read: its requests, their checkpoints, the logs of their shards.

    A request's rows are those of its checkpoint, if it has one, and then those of the log; some may be in both.
    """

    requests: list[StoredRequest]
    log: dict[int, list[Entry]]  # by shard
    checkpoints: dict[bytes, bytes] = field(default_factory=dict)  # penstock.v1.TokenBatch by request


@dataclass(frozen=True, slots=True)
class Load(Call[Loaded | Settling | None]):
    """Reads requests that `sid` owns, after `Take`, with what was logged. Others are left out. None: fenced."""

    sid: bytes
    request_ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Commit(Call[bool]):
    """The one write of a scheduler's step: token rows per shard and the next plan, together. False: fenced."""

    sid: bytes
    rows: tuple[tuple[int, bytes], ...] = ()  # (shard, penstock.v1.TokenBatch)
    worker: str = ""
    plan: bytes = b""  # penstock.v1.StepPlan; empty: none
    started: bytes = b""  # ids of requests that got their first slot in this plan or before: they wait no longer
