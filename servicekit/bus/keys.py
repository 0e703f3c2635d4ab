"""Every key, stream and group of a pool, in one table.

All names of a pool carry one hash tag, so that in a Redis Cluster the pool lives in one slot and a function may work
on several of its keys. Session, request and incarnation ids are 16 random bytes, written here in hexadecimal.
"""

from dataclasses import dataclass

# Consumer groups.
TOKENIZERS = b"tokenizers"  # on `prompts`
EXPORTERS = b"exporters"  # on `traces`

# Fields of stream entries.
PAYLOAD = b"p"  # a protobuf message, see the table of streams below
REQUEST = b"id"  # 16 bytes
SEQUENCE = b"seq"  # decimal; absent or -1: all sequences
REASON = b"reason"  # decimal CancelReason
SENT_NS = b"t"  # Unix nanoseconds in decimal: when a hint was written
ROUTE = b"route"  # 16 bytes: gateway session
DELIVERED_NS = b"d"  # Unix nanoseconds in decimal: when a client had all of its request; empty: it is not told here
STREAM = b"stream"  # of a dead letter: where it was read
WHY = b"why"  # of a dead letter: what is wrong with it
NO_REQUEST = b"no request id of 16 bytes"  # a WHY: what `claim` cannot use
OFFSETS = b"off"  # penstock.v1.AttachOffsets
# An entry of the log that opens a request for its shard (written by `claim` and `reject`): REQUEST, ROUTE and
HEADER = b"h"  # penstock.v1.Header
BODY = b"b"  # penstock.v1.GenerateRequest, without its prompt
META = b"m"  # penstock.v1.TokenizedPrompt; empty if the request was rejected before it had tokens

# Of a hint on `prompts`, beside HEADER and BODY.
PROMPT = b"q"  # penstock.v1.GenerateRequest, its prompt alone

# Fields of hashes that are also read without a function.
STATUS = b"status"  # of a session: penstock.v1.ServiceStatus
UNTOLD_TRACES = b"traces"  # of `untold`
# Of a request, then a model's digest in hexadecimal: penstock.v1.PromptLogprobs, or PromptVector of a pooled one.
PROMPT_OUTPUT = b"prompt_output:"

# How many entries capped streams keep, approximately.
STEPS_CAP = 128
RESULTS_CAP = 128
TEXT_CAP = 4096
ATTACH_CAP = 1024
DEAD_CAP = 1024
BELL_CAP = 1
TRACES_CAP = 65_536  # exact: what comes beyond it is counted in `untold`
CANCELS_KEPT_MS = 60_000  # how long a hint in `cancels` is kept: a scheduler that sleeps for so long begins anew
CAME_TOGETHER_MS = 1000  # two calls of a request whose clients came within that time: the later attachment counts
SETTLE_MS = 1000  # how long a pool waits at least, after its server was restarted, for gateways to come back
GONE_CAP = 256  # sessions and workers that are gone and told so to whoever has not heard of it
MAX_MODELS = 2  # that workers of one pool may have at once: an upgrade
MODEL_BYTES = 8  # of a model's digest
MAX_DEAD_FIELDS = 32  # how many of a dead letter's own fields `claim` keeps


def prompt_output(model_digest: bytes) -> bytes:
    """Field of a request: its prompt's logprobs or vector, by the model with this digest."""
    return PROMPT_OUTPUT + model_digest.hex().encode()


class Names:
    """The part of each key after the pool's prefix; after a colon, an id: of sessions, requests and API keys in
    hexadecimal, the name of a worker, the number of a shard.
    """

    # The pool.
    RUN = b"run"  # string: the server run id last seen
    TERM = b"term"  # string: how many runs of the server the pool has seen, or of other servers if it was with these
    SETTLE = b"settle"  # string, after a restart of the server: until when the pool settles at least, Unix milliseconds
    SHAPE = b"shape"  # hash: what all services of the pool agree on, see `servicekit.shape`
    MODELS = b"models"  # set: digests of the models whose workers may be paired
    # Sessions, and what surveys tell of them.
    SESSIONS = b"sessions"  # set of session ids
    SESSION = b"sess:"  # hash: kind, name, address, ttl, until, state, status
    OWNED = b"own:"  # of a session: set of request ids
    LEASES = b"leases"  # sorted set: sessions, by the Unix millisecond at which somebody has to look at them
    SURVEY = b"survey"  # hash: generation; base, below which nobody is told what is gone; gone: how many are
    CHANGED = b"changed"  # sorted set: sessions (s and id) and workers (w and name), by generation of their last change
    GONE = b"gone"  # sorted set: those of them that are there no more
    # Requests.
    REQUEST = b"req:"  # hash: the truth about one request
    MARK = b"mark:"  # of a request, hash with TTL: a cancel that came before it
    RESULT = b"out:"  # of a request, string with TTL: penstock.v1.FinishedRequest
    CHECKPOINT = b"ckpt:"  # of a request, string: its rows when its log was last compacted, penstock.v1.TokenBatch
    CHECKPOINTS = b"ckpts:"  # of a shard, sorted set, all of score 0: requests that have a checkpoint
    WAITING = b"waiting"  # hash: requests and tokens that wait for a first slot; since, started: at which rate they do
    # The same of a tenant, whose name follows after a colon.
    DUE = b"due"  # sorted set: requests that wait for tokens or a scheduler, by the Unix millisecond of their deadline
    RATE = b"rate:"  # of an API key, hash: r and a Unix second: calls in it; t: tokens; e: ends of requests
    RUNNING = b"running:"  # of an API key, set: requests that have not ended
    UNTOLD = b"untold"  # hash: how many entries `traces` had no room for, see UNTOLD_TRACES
    # Workers, and shards of the log.
    WORKERS = b"workers"  # set of names
    WORKER = b"worker:"  # hash: incarnation, info, owner
    SHARDS = b"shards"  # hash: shard → the session that leases it
    READ = (
        b"read"  # hash: leased shard → how many entries that its log still has were read, as its detokenizer told last
    )
    # Streams, see `Keys`.
    PROMPTS = b"prompts"  # requests that wait for their tokens
    REQUESTS = b"requests"  # requests that wait for a scheduler
    CANCELS = b"cancels"  # cancel hints
    BELL = b"bell"  # rings when a request is submitted, see `servicekit.doorbell`
    TRACES = b"traces"  # requests that have ended, for a collector of traces
    DEAD = b"dead"  # what could not be read
    STEPS = b"steps:"  # a worker's plans
    RESULTS = b"results:"  # a worker's results
    TOKENS = b"tokens:"  # of a shard: the log of what was generated
    ATTACH = b"attach:"  # of a shard: re-attachments that its detokenizer must serve
    TEXT = b"text:"  # of a gateway's session: what it delivers


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of one pool.

    | stream           | entries                                 | written by               | read by     |
    |------------------|-----------------------------------------|--------------------------|-------------|
    | prompts          | REQUEST SENT_NS HEADER BODY PROMPT      | submit (gateway)         | tokenizers  |
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
    | traces           | PAYLOAD FinishedRequest DELIVERED_NS    | retire, delivered        | exporters   |
    | dead             | STREAM, WHY and the entry's own fields  | append (any)             | operator    |
    """

    pool: str = "penstock"

    @property
    def prefix(self) -> bytes:
        """The beginning of every key, hash tag included."""
        return b"{%s}:" % self.pool.encode()

    def key(self, name: bytes | str, of: bytes | str = b"") -> bytes:
        """A key of this pool."""
        name, of = (each.encode() if isinstance(each, str) else each for each in (name, of))
        return self.prefix + name + of

    @property
    def run(self) -> bytes:
        """String: the server run id last seen."""
        return self.key(Names.RUN)

    @property
    def untold(self) -> bytes:
        """Hash: how many entries `traces` had no room for."""
        return self.key(Names.UNTOLD)

    @property
    def shards(self) -> bytes:
        """Hash: who leases shards."""
        return self.key(Names.SHARDS)

    def session(self, sid: bytes) -> bytes:
        """Hash: a session."""
        return self.key(Names.SESSION, sid.hex())

    def request(self, request_id: bytes) -> bytes:
        """Hash: the truth about one request."""
        return self.key(Names.REQUEST, request_id.hex())

    @property
    def prompts(self) -> bytes:
        """Stream: requests that wait for their tokens."""
        return self.key(Names.PROMPTS)

    @property
    def requests(self) -> bytes:
        """Stream: requests that wait for a scheduler."""
        return self.key(Names.REQUESTS)

    @property
    def cancels(self) -> bytes:
        """Stream: cancel hints."""
        return self.key(Names.CANCELS)

    @property
    def bell(self) -> bytes:
        """Stream: rings when a request is submitted."""
        return self.key(Names.BELL)

    @property
    def traces(self) -> bytes:
        """Stream: requests that have ended."""
        return self.key(Names.TRACES)

    @property
    def dead(self) -> bytes:
        """Stream: what could not be read."""
        return self.key(Names.DEAD)

    def steps(self, worker: str) -> bytes:
        """Stream: a worker's plans."""
        return self.key(Names.STEPS, worker)

    def results(self, worker: str) -> bytes:
        """Stream: a worker's results."""
        return self.key(Names.RESULTS, worker)

    def tokens(self, shard: int) -> bytes:
        """Stream: the log of what was generated."""
        return self.key(Names.TOKENS, str(shard))

    def attach(self, shard: int) -> bytes:
        """Stream: re-attachments that a shard's detokenizer must serve."""
        return self.key(Names.ATTACH, str(shard))

    def text(self, gateway: bytes) -> bytes:
        """Stream: what one gateway session delivers."""
        return self.key(Names.TEXT, gateway.hex())
