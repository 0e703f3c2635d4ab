"""A request's way, from its submit to its end."""

from dataclasses import dataclass
from enum import Enum, IntEnum

from servicekit.bus.calls.call import Call, Settling
from servicekit.bus.calls.limits import Metered, OverLimit
from servicekit.bus.calls.waiting import NO_BOUNDS, Bounds, Overload


class RequestState(Enum):
    """The state of a request; it only moves downwards."""

    PROMPT = "PROMPT"  # submitted, has no tokens yet
    READY = "READY"  # has tokens, waits for a scheduler
    RUNNING = "RUNNING"  # owned by a scheduler, or rejected and waiting for its detokenizer to end it
    ENDED = "ENDED"  # retired; the result is readable for its TTL


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """The hash `req` as a service reads it."""

    request_id: bytes
    tenant: str
    state: RequestState
    header: bytes
    body: bytes  # penstock.v1.GenerateRequest without its prompt
    meta: bytes  # penstock.v1.TokenizedPrompt, empty before it was tokenized
    route: bytes
    shard: int | None
    owner: bytes | None
    cancel_reason: int  # CancelReason; 0: not cancelled
    strikes: int  # see `Strike`
    struck_at: int  # output tokens that it had at the last strike
    witness: tuple[bytes, ...] = ()  # as in `Submit`; (): none was needed
    model_digest: bytes = b""  # of the model that computed the witness
    prompt: bytes = b""  # told by `Fetch` alone: penstock.v1.GenerateRequest, its prompt alone
    token_ids: bytes = b""  # told by `Claim` and `Load` alone: of the prompt, u32 little-endian each


class SubmitOutcome(IntEnum):
    """The answer of `submit`."""

    CREATED = 0
    EXISTS = 1  # the same id with the same digest: this is a retry
    CONFLICT = 2  # the same id with another digest
    OUT_OF_MEMORY = 3  # the server is at 80 % of its memory, which it may notice a second late


@dataclass(frozen=True, slots=True)
class Submit(Call[SubmitOutcome | Overload | OverLimit]):
    """Writes `req` in state PROMPT and the `prompts` hint. A cancel mark that came before is taken over.

    The request waits, and counts as waiting, until a `Commit` says that it got its first slot or it ends.

    With a witness it confirms, after a restart of the server, a request that was accepted before; no bound refuses it.
    If the request is there, only what the witness adds to the one stored changes, per sequence: an older one shortens
    nothing, one of another history is not taken. Its hint is written again (PROMPT: `prompts`, READY: `requests`); a
    request that has ended stays so. Of the gateways that confirm a request in a server run, that to which its client
    came last gets its route, since an attachment may be among the writes that were lost, and a gateway may have slept
    while its client went elsewhere.
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
    bounds: Bounds = NO_BOUNDS
    # Per sequence u32 little-endian for each token that its client has, then perhaps per sequence
    # `contract.domain.logprob_records` of these; (): a new request
    witness: tuple[bytes, ...] = ()
    model_digest: bytes = b""  # of the model that computed the witness; empty: nothing is known of it
    prompt: bytes = b""  # the part of the body that its tokenizer alone reads
    metered: Metered | None = None  # what it counts for, of a key with limits; with a witness only as one that goes on
    routed_ms: int = 0  # when the client came to the gateway that has the route, by the server's clock


@dataclass(frozen=True, slots=True)
class Fetch(Call[StoredRequest | None]):
    """Reads one request; None if there is none (any more)."""

    request_id: bytes


@dataclass(frozen=True, slots=True)
class Tokenized(Call[bool]):
    """PROMPT → READY: stores the tokens, hints `requests`, deletes the hint. False: it was not PROMPT."""

    request_id: bytes
    entry_id: bytes  # of the `prompts` hint
    meta: bytes  # penstock.v1.TokenizedPrompt
    sent_ns: int
    num_tokens: int = 0  # of its prompt
    token_ids: bytes = b""  # the same, u32 little-endian each: their scheduler alone reads them


@dataclass(frozen=True, slots=True)
class Overdue(Call[list[StoredRequest]]):
    """Up to `count` requests in state PROMPT or READY that are cancelled or past their deadline: for `Reject`.

    Those with a witness are left out: their end comes after what their clients have, from a scheduler.
    """

    count: int


@dataclass(frozen=True, slots=True)
class Reject(Call[bool]):
    """PROMPT or READY → RUNNING without owner: opens the request in the log and writes the row that ends it.

    False: the request is gone or further already. `entry_id` acknowledges the `prompts` hint; empty: there is none.
    """

    request_id: bytes
    entry_id: bytes
    shard: int
    row: bytes  # penstock.v1.TokenBatch with one finish row for every sequence


@dataclass(frozen=True, slots=True)
class KeepPromptOutput(Call[bool]):
    """Keeps what was computed of a prompt with its request, for as long as that and its result are kept.

    The first that is told of a model stays. False: nothing was kept, as that is there or the request is not (any
    more).
    """

    request_id: bytes
    model_digest: bytes  # of the model that computed it
    output: bytes  # penstock.v1.PromptLogprobs, or penstock.v1.PromptVector of a request that is pooled


@dataclass(frozen=True, slots=True)
class ReadPromptOutput(Call[bytes | None]):
    """Reads what `KeepPromptOutput` kept of a model; None: nothing is there (any more)."""

    request_id: bytes
    model_digest: bytes


@dataclass(frozen=True, slots=True)
class Retire(Call[bool]):
    """RUNNING → ENDED, once, by the session that leases the shard. False: not the lease holder, or ended already.

    Writes the result for `ttl_ms`, drops payload, checkpoint and ownership. The last text went before: whoever takes
    the shard over finds the same end in the log. A gateway that was attached meanwhile finds an entry with REQUEST in
    its `text`, as one that lost the request does.

    Several requests that end for one gateway are ended together. False then: one of them was not ended by this call.
    """

    sid: bytes
    shard: int
    request_id: bytes
    result: bytes  # penstock.v1.FinishedRequest
    ttl_ms: int
    route: bytes = b""  # gateway session that got the last text; empty: none
    others: tuple[tuple[bytes, bytes], ...] = ()  # (request_id, result) of further requests
    tokens: tuple[int, ...] = ()  # of prompt and output, of each request in this order; (): not told
    traces: tuple[bytes, ...] = ()  # of each request in this order, for a collector; empty ones, and (): not told


@dataclass(frozen=True, slots=True)
class Recalled:
    """A request that the gateway did not submit, as far as it may be told of it."""

    state: RequestState
    reply: bytes  # penstock.v1.ReplyForm
    result: bytes | None = None  # penstock.v1.FinishedRequest, once it has ended
    delivered_ns: int = 0  # Unix time at which its client had all of it; 0: it has not


@dataclass(frozen=True, slots=True)
class Recall(Call[Recalled | Settling | None]):
    """Reads how a request is answered and, if it has ended, its result. None: unknown, or another tenant's.

    NOT_YET: unknown in a pool that settles; its gateway may have yet to tell of it.
    """

    request_id: bytes
    tenant: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """The answer of `attach`. Neither `known` nor a `result`: the request never was, or its result expired."""

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
    Who asks for a client that came long before that of the session that has the route does not get it: it was late,
    and its client has gone on.
    """

    request_id: bytes
    tenant: str
    route: bytes
    offsets: bytes  # penstock.v1.AttachOffsets
    held: bytes = b""  # only if the route is this one, or `route` already; empty: whatever it is
    routed_ms: int = 0  # when the client came to that gateway, by the server's clock


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
