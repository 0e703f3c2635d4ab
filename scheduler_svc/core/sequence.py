"""Requests and their sequences as the scheduler knows them."""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from contract.domain import chain
from contract.domain.params import Sampling, Stopping
from contract.domain.plan import U32
from contract.domain.pooling import Pooling
from contract.domain.timeline import StartReason
from scheduler_svc.core.blocks import extend_hashes, root_hash
from scheduler_svc.core.repetition import RepetitionDetector


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A tokenized request that is ready to be scheduled."""

    request_id: bytes  # 16 bytes
    prompt_token_ids: U32  # u32[num_prompt_tokens]
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    seed: int = 0  # unsigned 64-bit
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0  # lower is served first
    tenant: str = ""
    arrival_ns: int = 0  # Unix time, nanoseconds
    deadline_ns: int = 0  # Unix time, nanoseconds; 0: none
    cache_salt: str = ""  # requests with different salts share no cached blocks
    # Of a request that another scheduler began: what each sequence has generated, and which of them have ended.
    output_token_ids: tuple[U32, ...] = ()
    ended_sequences: frozenset[int] = frozenset()
    model_digest: bytes | None = None  # of the model that generated it; None: nothing was, or it is not known
    num_strikes: int = 0  # workers that died while they computed it, as far as they count
    struck_at: int = 0  # output tokens that it had when the last of them died
    pooling: Pooling | None = None  # its prompt becomes a vector, and nothing is generated; None: it is

    @property
    def all_stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence: EOS, unless it is ignored, and the request's stop ids."""
        eos = () if self.stopping.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *self.stopping.stop_token_ids)))


class Status(Enum):
    """The place of a sequence."""

    HELD = auto()  # a further sample, until the prompt's last chunk has been planned
    WAITING = auto()
    RUNNING = auto()  # in a slot of a worker
    ENDED = auto()


class ScheduledRequest:
    """A request with all its sequences."""

    def __init__(self, queued: QueuedRequest, order: int, added_ns: int, *, shares_prefixes: bool = False) -> None:
        self.queued = queued
        self.added_ns = added_ns
        self.order = order  # of arrival at this scheduler: breaks ties
        self.prompt: U32 = np.ascontiguousarray(queued.prompt_token_ids, np.uint32)
        self.num_prompt_tokens = len(self.prompt)
        self.stop_token_ids = queued.all_stop_ids
        self.root = root_hash("" if shares_prefixes else queued.tenant, queued.cache_salt)
        self.sequences = [SequenceState(self, index) for index in range(queued.n)]
        self.num_live = queued.n
        self.num_preemptions = 0
        # Whoever takes a request over cannot know it, so they are computed again; the first that were kept stay.
        self.needs_prompt_logprobs = queued.sampling.num_prompt_logprobs is not None
        self.num_strikes = queued.num_strikes
        self.struck_at = queued.struck_at
        # Of the model that generates it, from its first slot on; without a token and a slot any may begin again.
        self.model_digest = queued.model_digest

    @property
    def may_change_model(self) -> bool:
        """Return whether nothing of it depends on a model: no sequence has a token or runs."""
        return not any(each.output or each.status is Status.RUNNING for each in self.sequences)

    @property
    def request_id(self) -> bytes:
        """16 bytes."""
        return self.queued.request_id

    @property
    def num_output_tokens(self) -> int:
        """Tokens that its sequences have been given, together."""
        return sum(len(sequence.output) for sequence in self.sequences)

    def max_num_tokens(self, capacity: int) -> int:
        """Prompt and output tokens at which a sequence ends by count on a worker that can hold `capacity` tokens."""
        max_tokens = self.queued.stopping.max_tokens
        return capacity if max_tokens is None else min(capacity, self.num_prompt_tokens + max_tokens)


class SequenceState:
    """One sequence: its tokens, and its place while it runs. Counts of a running one are in its worker's columns."""

    __slots__ = (
        "block_hashes",
        "blocks",
        "chain",
        "gives_prompt_logprobs",
        "hash_block_size",
        "index",
        "num_deferrals",
        "output",
        "prompt_issued",
        "repetition",
        "request",
        "seed",
        "slot",
        "start_reason",
        "started",
        "status",
        "worker_id",
    )

    def __init__(self, request: ScheduledRequest, index: int) -> None:
        self.request = request
        self.index = index
        self.seed = chain.sequence_seed(request.queued.seed, index)
        outputs = request.queued.output_token_ids
        self.output = array("I", outputs[index].tolist() if index < len(outputs) else ())
        self.chain = chain.extend(chain.CHAIN_START, self.output)  # kept here while the sequence does not run
        detection = request.queued.stopping.repetition_detection
        self.repetition = RepetitionDetector(detection, self.output) if detection else None  # None: it may do so
        self.status = Status.WAITING
        self.started = len(self.output) > 0
        self.start_reason = StartReason.TAKEN_OVER if self.started else StartReason.FIRST  # why it gets its next slot
        self.worker_id = ""
        self.slot = -1
        self.blocks: list[int] = []
        self.prompt_issued = False  # a plan that was issued before has computed the whole prompt in `blocks`
        self.block_hashes: list[bytes] = []  # of the full blocks so far, for `hash_block_size`
        self.hash_block_size = 0
        self.gives_prompt_logprobs = False  # its first row since it got its slot says that they are kept
        self.num_deferrals = 0  # times it was left to a worker that has more of its prefix

    @property
    def computes_prompt_logprobs(self) -> bool:
        """Return whether it is to compute its prompt's logprobs, and so the whole prompt: the first that lives does."""
        if not self.request.needs_prompt_logprobs:
            return False
        return next(each for each in self.request.sequences if each.status is not Status.ENDED) is self

    @property
    def is_pooled(self) -> bool:
        """Return whether it ends once its prompt is computed: nothing is generated."""
        return self.request.queued.pooling is not None

    @property
    def computes_whole_prompt(self) -> bool:
        """Return whether nothing of its prompt may be found computed: all of its hidden states count."""
        pooling = self.request.queued.pooling
        return self.computes_prompt_logprobs or (pooling is not None and pooling.needs_whole_prompt)

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the output so far."""
        return self.request.num_prompt_tokens + len(self.output)

    def token_ids(self, start: int = 0) -> U32:
        """u32[num_tokens - start]: known tokens from position `start` on."""
        num_prompt_tokens = self.request.num_prompt_tokens
        output = np.array(self.output[max(0, start - num_prompt_tokens) :], np.uint32)
        return np.concatenate((self.request.prompt[start:], output)) if start < num_prompt_tokens else output

    def hashes(self, block_size: int) -> list[bytes]:
        """The chained hashes of all full blocks of known tokens."""
        if self.hash_block_size != block_size:
            self.hash_block_size, self.block_hashes = block_size, []
            first = self.request.sequences[0]
            if first is not self:  # samples share the prompt, so its hashes too
                self.block_hashes = first.hashes(block_size)[: self.request.num_prompt_tokens // block_size]
        if len(self.block_hashes) < self.num_tokens // block_size:
            rest = self.token_ids(len(self.block_hashes) * block_size)
            extend_hashes(self.block_hashes, self.request.root, rest, block_size)
        return self.block_hashes
