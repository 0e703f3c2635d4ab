"""What can be asked of the bus: each call is a value, with the type of its answer.

A connection carries out any number of calls in one write (`Connection.execute`), in order. Every call that changes
state is one atomic server-side function (RECOVERY in docs/recovery.md says why) and may be sent again: it says what it
found instead of doing its work twice. Sessions, not connections, own things: a call that needs an active session and
finds it fenced, suspended or expired *and taken over* says so in its answer and changes nothing.

A session is alive while its `until` lies ahead of the server's clock. One whose `until` has passed may still renew, as
long as nobody took what it held. Times that decide anything are the server's; `*_ns` fields only measure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Final, Generic, TypeVar

R = TypeVar("R")


class Call(Generic[R]):
    """A request to the bus whose answer has type R."""

    __slots__ = ()


class SessionKind(Enum):
    """What a session is."""

    GATEWAY = "gateway"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    DETOKENIZER = "detokenizer"


class RequestState(Enum):
    """Where a request is; it only moves downwards."""

    PROMPT = "PROMPT"  # submitted, has no tokens yet
    READY = "READY"  # has tokens, waits for a scheduler
    RUNNING = "RUNNING"  # owned by a scheduler, or rejected and waiting for its detokenizer to end it
    ENDED = "ENDED"  # retired; the result is readable for its TTL


class Settling(Enum):
    """The answer of a call that a pool puts off while it settles; to be asked again.

    After a restart of the server, which may have lost its last writes, requests are given out only when every gateway
    that lives has said what its clients have, and a second has passed in any case.
    """

    NOT_YET = "not yet"


NOT_YET: Final = Settling.NOT_YET


@dataclass(frozen=True, slots=True)
class Entry:
    """One stream entry. `entry_id` is `ms-seq` as the server made it."""

    entry_id: bytes
    fields: dict[bytes, bytes]


# --- sessions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Greeting:
    """`new_run`: the server was restarted since the pool last said hello; every session was suspended by that.

    Also if the server remembers nothing, not even a hello, and a session comes back to it.
    """

    new_run: bool
    active: bool  # whether this session is active after the call


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


@dataclass(frozen=True, slots=True)
class Revalidate(Call[bool]):
    """Reactivates a suspended session. False: it does not exist any more (a new session id must be drawn)."""

    sid: bytes
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Renew(Call[bool]):
    """Extends a session by `ttl_ms` from now and stores its status. False: fenced or suspended."""

    sid: bytes
    ttl_ms: int
    status: bytes = b""  # penstock.v1.ServiceStatus, shown by `penstock status`; empty keeps the last


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
class ListSessions(Call[list[SessionInfo]]):
    """All sessions, living and dead; sessions that are dead for a minute and own nothing are forgotten here."""


# --- a request's way --------------------------------------------------------------------------------------------------


class SubmitOutcome(IntEnum):
    """What `submit` found."""

    CREATED = 0
    EXISTS = 1  # the same id with the same digest: this is a retry
    CONFLICT = 2  # the same id with another digest
    OUT_OF_MEMORY = 3  # the server is at 80 % of its memory


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may wait for its first slot; 0: no bound. A request beyond a bound on tokens may still wait alone."""

    requests: int = 0
    tokens: int = 0  # of prompts
    tenant_requests: int = 0  # of one tenant
    tenant_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Overload:
    """Refused by `submit`: as much waits as its bounds allow."""

    of_tenant: bool  # the tenant's bound, else the pool's
    of_tokens: bool  # the bound on tokens, else the one on requests
    wait_ms: int  # in which all that waits there would start, at the rate of late; 0: nothing has started lately


@dataclass(frozen=True, slots=True)
class Submit(Call[SubmitOutcome | Overload]):
    """Writes `req` in state PROMPT and the `prompts` hint. A cancel mark that came before is taken over.

    The request waits, and counts as waiting, until a `Commit` says that it got its first slot or it ends.

    With a witness it confirms, after a restart of the server, a request that was accepted before; no bound refuses it.
    If the request is there, only what the witness adds to the one stored changes, per sequence: an older one shortens
    nothing, one of another history is not taken. Its hint is written again (PROMPT: `prompts`, READY: `requests`); a
    request that has ended stays so. The first gateway that confirms a request in a server run gets its route, since an
    attachment may be among the writes that were lost; one that comes later, or after an `Attach`, does not: it may have
    slept while its client went elsewhere.
    """

    request_id: bytes
    tenant: str
    header: bytes
    body: bytes
    digest: bytes  # of what makes two submits the same request
    route: bytes  # the gateway session that gets the text
    sent_ns: int
    reply: bytes = b""  # penstock.v1.ReplyForm: what another gateway must know to go on; kept as long as the result
    num_tokens: int = 0  # of its prompt, as far as can be said before it is tokenized
    deadline_ns: int = 0  # Unix time by the server's clock, after which it is `Overdue`; 0: none
    bounds: Bounds = Bounds()
    witness: tuple[bytes, ...] = ()  # per sequence: u32 little-endian per token that its client has; (): a new request


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """The hash `req` as a service reads it."""

    request_id: bytes
    tenant: str
    state: RequestState
    header: bytes
    body: bytes
    meta: bytes  # penstock.v1.TokenizedPrompt, empty before it was tokenized
    route: bytes
    shard: int | None
    owner: bytes | None
    cancel_reason: int  # CancelReason; 0: not cancelled
    strikes: int  # workers that died while they computed it, see `Strike`
    witness: tuple[bytes, ...] = ()  # as in `Submit`; (): none was needed


@dataclass(frozen=True, slots=True)
class Fetch(Call[StoredRequest | None]):
    """Reads one request; None if there is none (any more)."""

    request_id: bytes


@dataclass(frozen=True, slots=True)
class ReadGroup(Call[list[Entry]]):
    """New entries of a stream for one consumer of a group (made when missing). Blocks up to `block_ms`; 0: not at all.

    Only the last call of an `execute` may block. With `pending`, instead of new entries those that this consumer was
    given and nobody acknowledged, the oldest first; that changes nothing, and whoever asks may be another process.
    """

    stream: bytes
    group: bytes
    consumer: bytes
    count: int
    block_ms: int = 0
    pending: bool = False


@dataclass(frozen=True, slots=True)
class Reclaim(Call[list[Entry]]):
    """Entries that another consumer of the group took longer than `min_idle_ms` ago and never acknowledged."""

    stream: bytes
    group: bytes
    consumer: bytes
    min_idle_ms: int
    count: int


@dataclass(frozen=True, slots=True)
class Acknowledge(Call[None]):
    """A hint that leads nowhere (its request is gone): acknowledged and deleted."""

    stream: bytes
    group: bytes
    entry_id: bytes


@dataclass(frozen=True, slots=True)
class Tokenized(Call[bool]):
    """PROMPT → READY: stores the tokens, hints `requests`, deletes the hint. False: it was not PROMPT."""

    request_id: bytes
    entry_id: bytes  # of the `prompts` hint
    meta: bytes  # penstock.v1.TokenizedPrompt
    sent_ns: int
    num_tokens: int = 0  # of its prompt


@dataclass(frozen=True, slots=True)
class Overdue(Call[list[StoredRequest]]):
    """Up to `count` requests in state PROMPT or READY that are cancelled or past their deadline: for `Reject`.

    Those with a witness are left out: their end comes behind what their clients have, from a scheduler.
    """

    count: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for its first slot."""

    num_requests: int
    num_tokens: int  # of prompts; those of text are estimated until it is tokenized
    num_tenant_requests: int
    num_tenant_tokens: int


@dataclass(frozen=True, slots=True)
class CountWaiting(Call[Waiting]):
    """What waits in the pool, and of it what is a tenant's."""

    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Reject(Call[bool]):
    """PROMPT or READY → RUNNING without owner: opens the request in the log and writes the row that ends it.

    False: the request is gone or further already. `entry_id` acknowledges the `prompts` hint; empty: there is none.
    """

    request_id: bytes
    entry_id: bytes
    shard: int
    row: bytes  # penstock.v1.TokenBatch with one finish row for every sequence


class Claimed(list[StoredRequest]):
    """Requests that a scheduler owns from now on."""

    def __init__(self, requests: Iterable[StoredRequest] = (), num_buried: int = 0) -> None:
        super().__init__(requests)
        self.num_buried = num_buried  # entries that moved to `dead`


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
class Strike(Call[bool]):
    """A worker died while it computed these requests of `sid`: each gets a strike. False: fenced.

    An incarnation counts once for a request that it is told of again right away.
    """

    sid: bytes
    incarnation: bytes  # the worker's session
    request_ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Owned(Call[list[bytes] | None]):
    """The ids of all requests that `sid` owns: for an owner whose `Claim` or `Take` lost its answer. None: fenced."""

    sid: bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a new owner needs, in one atomic read: its requests, their checkpoints, all entries of their shards' logs.

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
    started: bytes = b""  # ids of the requests that this plan gives a slot, 16 bytes each: they wait no longer


@dataclass(frozen=True, slots=True)
class Retire(Call[bool]):
    """RUNNING → ENDED, once, by the session that leases the shard. False: not the lease holder, or ended already.

    Writes the result for `ttl_ms`, drops payload, checkpoint and ownership, and appends the last text to its gateway. A
    gateway that was attached meanwhile finds an entry with REQUEST in its `text`, as one that lost the request does.
    """

    sid: bytes
    shard: int
    request_id: bytes
    result: bytes  # penstock.v1.FinishedRequest
    ttl_ms: int
    route: bytes = b""  # gateway session of the last text; empty: none
    text: bytes = b""  # penstock.v1.TextBatch


@dataclass(frozen=True, slots=True)
class Recalled:
    """What a gateway can tell of a request that it did not submit."""

    state: RequestState
    reply: bytes  # penstock.v1.ReplyForm
    result: bytes | None = None  # penstock.v1.FinishedRequest, once it has ended


@dataclass(frozen=True, slots=True)
class Recall(Call[Recalled | Settling | None]):
    """Reads how a request is answered and, if it has ended, its result. None: unknown, or another tenant's.

    NOT_YET: unknown in a pool that settles; its gateway may have yet to tell of it.
    """

    request_id: bytes
    tenant: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """What `attach` found. Neither `known` nor a `result`: the request never was, or its result expired."""

    known: bool
    state: RequestState | None = None
    result: bytes | None = None  # penstock.v1.FinishedRequest
    is_elsewhere: bool = False  # it has another route than `held`: nothing was changed
    is_settling: bool = False  # not known so far, but the pool settles: its gateway may have yet to tell of it


@dataclass(frozen=True, slots=True)
class Attach(Call[Attachment]):
    """Routes a request's text to a gateway session, from the given offsets on.

    A request of another tenant is not known. An ended one answers with its result. The session that had the route, if
    it is active, finds an entry with REQUEST in its `text` and asks again: that is how it learns that it lost it.
    """

    request_id: bytes
    tenant: str
    route: bytes
    offsets: bytes  # penstock.v1.AttachOffsets
    held: bytes = b""  # only if the route is this one, or `route` already; empty: whatever it is


@dataclass(frozen=True, slots=True)
class Cancel(Call[bool]):
    """Sets the cancel flag (sequence −1) and hints `cancels`. False: not known (a mark stays for a minute).

    A cancel for one sequence only hints: its sender decides the same again after a crash. With a tenant, a request of
    another tenant is not known and gets no mark. With a route, nothing happens if the request has another one: who
    lost a client must not end what that client follows through another gateway. Nor does it leave a mark.
    """

    request_id: bytes
    reason: int  # CancelReason
    sent_ns: int
    tenant: str | None = None
    sequence: int = -1
    route: bytes = b""  # empty: whatever it is


# --- workers and shards -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegisterWorker(Call[bytes]):
    """A worker's session (its incarnation) takes its name; answers the last id of `steps:{worker}` to read behind.

    Another incarnation's pairing ends by that. Empty: fenced.
    """

    sid: bytes
    worker: str
    info: bytes  # penstock.v1.WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """One worker as the pool knows it."""

    worker: str
    incarnation: bytes  # its session
    alive: bool
    info: bytes
    owner: bytes | None  # the scheduler session paired with it, if that one is alive


@dataclass(frozen=True, slots=True)
class ListWorkers(Call[list[WorkerEntry]]):
    """All workers that ever registered and were not forgotten."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """A scheduler and a worker's incarnation: one epoch."""

    incarnation: bytes
    info: bytes
    results_after: bytes  # read `results:{worker}` behind this entry


@dataclass(frozen=True, slots=True)
class Pair(Call[Pairing | None]):
    """The scheduler session becomes the worker's owner. None: it is fenced, the worker is dead or another's.

    A worker of an expired session is that session's until it is taken over: `Take` first.
    """

    sid: bytes
    worker: str


@dataclass(frozen=True, slots=True)
class Unpair(Call[None]):
    """Gives a worker back, so that another scheduler may pair with it; nothing happens if it is another's already."""

    sid: bytes
    worker: str


@dataclass(frozen=True, slots=True)
class LeaseShard(Call[bool]):
    """Leases a shard for as long as the session is alive. False: another living session has it, or fenced.

    With `held`, only if the session has it already: who lost a shard meanwhile may have missed what another holder
    compacted, and must not get it back without rebuilding it.
    """

    sid: bytes
    shard: int
    held: bool = False
    num_read: int = 0  # entries that its log still has and the session has read, see `LogBacklogs`


@dataclass(frozen=True, slots=True)
class LogBacklogs(Call[list[int]]):
    """How many entries of each shard's log its detokenizer has not read, as far as it has told."""

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseShard(Call[None]):
    """Gives a shard back; nothing happens if another session has it."""

    sid: bytes
    shard: int


@dataclass(frozen=True, slots=True)
class Compact(Call[bool]):
    """Replaces the beginning of a shard's log: stores checkpoints, then drops entries of `tokens:{shard}` before
    `min_id`. False: `sid` does not lease the shard.

    Of every running request that was opened before `min_id` there must be a checkpoint, given here or before, that has
    its rows before `min_id`. One of a request that does not run in this shard (any more) is passed over. `retire`
    deletes checkpoints.
    """

    sid: bytes
    shard: int
    min_id: bytes  # `0-0`: nothing is dropped
    checkpoints: tuple[tuple[bytes, bytes], ...] = ()  # (request, penstock.v1.TokenBatch)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a compaction has kept of a running request: it, which has all that its opening had, and its rows."""

    request: StoredRequest
    rows: bytes  # penstock.v1.TokenBatch


@dataclass(frozen=True, slots=True)
class ReadCheckpoints(Call[list[Checkpoint] | None]):
    """Checkpoints of a shard in order of request ids, from the first one behind `after` on; none are left: empty.

    None: `sid` does not lease the shard. For the lease holder several reads are as good as one: nobody else compacts
    or retires, and of what is committed meanwhile it finds all in the log.
    """

    sid: bytes
    shard: int
    after: bytes = b""  # a request id; empty: from the beginning
    count: int = 64


# --- streams ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append(Call[bytes]):
    """Adds an entry; the answer is its id. `cap` trims the stream to about so many entries; 0: not at all.

    A server that is full takes entries into capped streams only.
    """

    stream: bytes
    fields: Mapping[bytes, bytes]
    cap: int = 0


@dataclass(frozen=True, slots=True)
class Read(Call[dict[bytes, list[Entry]]]):
    """Entries behind the given ids, by stream; streams without new entries are left out.

    Blocks up to `block_ms` until there is one; 0: not at all. Only the last call of an `execute` may block.
    """

    streams: Mapping[bytes, bytes] = field(default_factory=dict)  # stream → id to read behind
    count: int = 64  # entries per stream
    block_ms: int = 0


@dataclass(frozen=True, slots=True)
class LastId(Call[bytes]):
    """The id of a stream's last entry, `0-0` if it never had one."""

    stream: bytes


@dataclass(frozen=True, slots=True)
class Length(Call[int]):
    """How many entries a stream has."""

    stream: bytes


@dataclass(frozen=True, slots=True)
class DropStream(Call[None]):
    """Deletes a stream: a gateway's own text stream when it leaves."""

    stream: bytes
