"""Every key, stream and group of a pool, in one table.

All names of a pool carry one hash tag, so that in a Redis Cluster the pool lives in one slot and a function may work
on several of its keys. Session, request and incarnation ids are 16 random bytes, written here in hexadecimal.
"""

from dataclasses import dataclass

# Consumer groups.
TOKENIZERS = b"tokenizers"  # on `prompts`

# Fields of stream entries.
PAYLOAD = b"p"  # a protobuf message, see the table of streams below
REQUEST = b"id"  # 16 bytes
SEQUENCE = b"seq"  # decimal; absent or -1: all sequences
REASON = b"reason"  # decimal CancelReason
SENT_NS = b"t"  # Unix nanoseconds in decimal: when a hint was written
ROUTE = b"route"  # 16 bytes: gateway session
STREAM = b"stream"  # of a dead letter: where it was read
WHY = b"why"  # of a dead letter: what is wrong with it
NO_REQUEST = b"no request id of 16 bytes"  # a WHY: what `claim` cannot use
OFFSETS = b"off"  # penstock.v1.AttachOffsets
# An entry of the log that opens a request for its shard (written by `claim` and `reject`): REQUEST, ROUTE and
HEADER = b"h"  # penstock.v1.Header
BODY = b"b"  # penstock.v1.GenerateRequest
META = b"m"  # penstock.v1.TokenizedPrompt; empty if the request was rejected before it had tokens

# How many entries capped streams keep, approximately.
STEPS_CAP = 128
RESULTS_CAP = 128
CANCELS_CAP = 4096
TEXT_CAP = 4096
ATTACH_CAP = 1024
DEAD_CAP = 1024
BELL_CAP = 1
SETTLE_MS = 1000  # how long a pool waits at least, after its server was restarted, for gateways to come back
GONE_CAP = 256  # sessions and workers that are gone and told so to whoever has not heard of it
MAX_DEAD_FIELDS = 32  # how many of a dead letter's own fields `claim` keeps


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of one pool.

    | stream           | entries                                 | written by               | read by     |
    |------------------|-----------------------------------------|--------------------------|-------------|
    | prompts          | REQUEST SENT_NS HEADER BODY             | submit (gateway)         | tokenizers  |
    | requests         | REQUEST SENT_NS                         | tokenized (tokenizer)    | claim       |
    | cancels          | REQUEST SEQUENCE REASON SENT_NS         | cancel (any)             | schedulers  |
    | steps:{worker}   | PAYLOAD StepPlan                        | commit (scheduler)       | all ranks   |
    | results:{worker} | PAYLOAD StepResult                      | append (worker rank 0)   | scheduler   |
    | tokens:{shard}   | REQUEST ROUTE HEADER BODY META: opening | claim, reject            | detokenizer |
    |                  | PAYLOAD TokenBatch                      | commit, reject           | detokenizer |
    | attach:{shard}   | REQUEST ROUTE OFFSETS                   | attach (gateway)         | detokenizer |
    | text:{gateway}   | PAYLOAD TextBatch                       | append (detokenizer)     | gateway     |
    |                  | REQUEST: to be asked about              | attach, retire, append   | gateway     |
    | bell             | SENT_NS                                 | append (gateway)         | idle ones   |
    | dead             | STREAM, WHY and the entry's own fields  | append (any)             | operator    |
    """

    pool: str = "penstock"

    @property
    def prefix(self) -> bytes:
        """What every key begins with, hash tag included."""
        return b"{%s}:" % self.pool.encode()

    def key(self, *parts: bytes | str) -> bytes:
        """A key of this pool."""
        return self.prefix + b":".join(part.encode() if isinstance(part, str) else part for part in parts)

    @property
    def run(self) -> bytes:
        """String: the server run id last seen."""
        return self.key("run")

    @property
    def settle(self) -> bytes:
        """String, while the pool settles after a restart of the server: until when at least, Unix milliseconds."""
        return self.key("settle")

    @property
    def shape(self) -> bytes:
        """Hash: what all services of the pool agree on, see `servicekit.shape`."""
        return self.key("shape")

    @property
    def sessions(self) -> bytes:
        """Set of session ids (hex)."""
        return self.key("sessions")

    def session(self, sid: bytes) -> bytes:
        """Hash: kind, name, address, ttl, until, state, status."""
        return self.key("sess", sid.hex())

    def owned(self, sid: bytes) -> bytes:
        """Set of request ids (hex) that a session owns."""
        return self.key("own", sid.hex())

    def request(self, request_id: bytes) -> bytes:
        """Hash: the truth about one request."""
        return self.key("req", request_id.hex())

    def cancel_mark(self, request_id: bytes) -> bytes:
        """String with TTL: a cancel that came before its request."""
        return self.key("mark", request_id.hex())

    def result(self, request_id: bytes) -> bytes:
        """String with TTL: the finished result, penstock.v1.FinishedRequest."""
        return self.key("out", request_id.hex())

    def checkpoint(self, request_id: bytes) -> bytes:
        """String: a running request's rows so far when its log was last compacted, penstock.v1.TokenBatch."""
        return self.key("ckpt", request_id.hex())

    def checkpoints(self, shard: int) -> bytes:
        """Sorted set, all of score 0: the requests (hex) of a shard that have a checkpoint."""
        return self.key("ckpts", str(shard))

    def waiting(self, tenant: str | None = None) -> bytes:
        """Hash: requests and tokens that wait for a first slot, of a tenant or of the pool; since, started: at which
        rate they do."""
        return self.key("waiting") if tenant is None else self.key("waiting", tenant)

    @property
    def due(self) -> bytes:
        """Sorted set: requests (hex) that wait for tokens or a scheduler, by the Unix millisecond of their deadline."""
        return self.key("due")

    @property
    def leases(self) -> bytes:
        """Sorted set: sessions (hex), by the Unix millisecond at which somebody has to look at them."""
        return self.key("leases")

    @property
    def survey(self) -> bytes:
        """Hash: generation of what surveys tell; base, below which nobody is told what is gone; gone: how many are."""
        return self.key("survey")

    @property
    def changed(self) -> bytes:
        """Sorted set: sessions (s and hex) and workers (w and name) by the generation of their last change."""
        return self.key("changed")

    @property
    def gone(self) -> bytes:
        """Sorted set: those of them that are there no more."""
        return self.key("gone")

    @property
    def workers(self) -> bytes:
        """Set of worker names."""
        return self.key("workers")

    def worker(self, worker: str) -> bytes:
        """Hash: incarnation, info, owner."""
        return self.key("worker", worker)

    @property
    def shards(self) -> bytes:
        """Hash: shard → the session that leases it (hex)."""
        return self.key("shards")

    @property
    def read(self) -> bytes:
        """Hash: leased shard → how many entries that its log still has were read, as its detokenizer told last."""
        return self.key("read")

    @property
    def prompts(self) -> bytes:
        """Stream: requests that wait for their tokens."""
        return self.key("prompts")

    @property
    def requests(self) -> bytes:
        """Stream: requests that wait for a scheduler."""
        return self.key("requests")

    @property
    def cancels(self) -> bytes:
        """Stream: cancel hints."""
        return self.key("cancels")

    @property
    def bell(self) -> bytes:
        """Stream: rings when a request is submitted, see `servicekit.doorbell`."""
        return self.key("bell")

    @property
    def dead(self) -> bytes:
        """Stream: what could not be read."""
        return self.key("dead")

    def steps(self, worker: str) -> bytes:
        """Stream: a worker's plans."""
        return self.key("steps", worker)

    def results(self, worker: str) -> bytes:
        """Stream: a worker's results."""
        return self.key("results", worker)

    def tokens(self, shard: int) -> bytes:
        """Stream: the log of what was generated."""
        return self.key("tokens", str(shard))

    def attach(self, shard: int) -> bytes:
        """Stream: re-attachments that a shard's detokenizer must serve."""
        return self.key("attach", str(shard))

    def text(self, gateway: bytes) -> bytes:
        """Stream: what one gateway session delivers."""
        return self.key("text", gateway.hex())
