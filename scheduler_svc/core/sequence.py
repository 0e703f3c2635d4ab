"""Requests and their sequences as the scheduler knows them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np

from contract.domain import chain
from contract.domain.beams import BeamSearch
from contract.domain.params import Sampling, Stopping
from contract.domain.plan import NO_TOKENS, U32
from contract.domain.pooling import Pooling
from contract.domain.timeline import StartReason
from scheduler_svc.core.beams import BeamRules
from scheduler_svc.core.blocks import extend_hashes, root_hash
from scheduler_svc.core.repetition import RepetitionDetector
from scheduler_svc.core.search import Search
from scheduler_svc.core.tables import Tables


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
    num_first_tokens: int = 0  # as in `Admission`
    beams: BeamSearch | None = None  # its n outputs are found by a search; None: they are drawn
    search_words: U32 = field(default_factory=lambda: NO_TOKENS)  # of a search that another scheduler began: its log

    @property
    def all_stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence: EOS, unless it is ignored, and the request's stop ids."""
        eos = () if self.stopping.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *self.stopping.stop_token_ids)))

    def search(self) -> Search | None:
        """The search of its beams, after all that the log has of it.

        Raises:
            ValueError: that is no search of this request.
        """
        if self.beams is None:
            return None
        return Search(BeamRules.of(self.n, self.beams, self.stopping, self.all_stop_ids), self.search_words)


class Status(Enum):
    """The place of a sequence."""

    HELD = auto()  # a further sample, until the prompt's last chunk has been planned; a beam, until others have found
    WAITING = auto()
    RUNNING = auto()  # in a slot of a worker
    ENDED = auto()


class ScheduledRequest:
    """A request with all its sequences; with beams these are what its sequences are until they end."""

    def __init__(self, queued: QueuedRequest, order: int, added_ns: int, *, shares_prefixes: bool = False) -> None:
        self.queued = queued
        self.search = queued.search()
        self.added_ns = added_ns
        self.order = order  # of arrival at this scheduler: breaks ties
        self.prompt: U32 = np.ascontiguousarray(queued.prompt_token_ids, np.uint32)
        self.num_prompt_tokens = len(self.prompt)
        self.stop_token_ids = queued.all_stop_ids
        self.root = root_hash("" if shares_prefixes else queued.tenant, queued.cache_salt)
        self.sampling = queued.sampling  # of each step of a sequence
        if self.search is not None:
            self.sampling = replace(self.sampling, temperature=0.0, num_logprobs=self.search.rules.num_candidates)
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
    def num_at_first(self) -> int:
        """Sequences that wait for slots when it comes; the others follow."""
        if self.search is not None:
            return self.search.width
        return len(self.sequences) if self.queued.output_token_ids else 1

    @property
    def unseated_beams(self) -> list["SequenceState"]:
        """The beams that were to fork from a slot: they wait too if that is lost."""
        if self.search is None:
            return []
        beams = self.sequences[: self.search.width]
        return [each for each in beams if each.status is Status.HELD and not each.has_found]

    def has_ended_before(self, index: int) -> bool:
        """Return whether another scheduler had ended a sequence; the outputs of a search end together."""
        ended = self.queued.ended_sequences
        return index in ended if self.search is None else len(ended) == self.queued.n

    def go_on_from(self, parents: Sequence[int]) -> None:
        """Make the sequences those of a search's beams, each of which has one token more than its parent."""
        assert self.search is not None
        hashes = [list(sequence.block_hashes) for sequence in self.sequences]
        size = self.sequences[parents[0]].hash_block_size
        for sequence, parent, beam in zip(self.sequences, parents, self.search.beams.running, strict=False):
            sequence.output = beam.token_ids
            sequence.block_hashes, sequence.hash_block_size = list(hashes[parent]), size

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
        "chain",
        "gives_prompt_logprobs",
        "hash_block_size",
        "index",
        "num_deferrals",
        "output",
        "prompt_issued",
        "repetition",
        "request",
        "save_at",
        "seed",
        "slot",
        "start_reason",
        "started",
        "status",
        "tables",
        "worker_id",
    )

    def __init__(self, request: ScheduledRequest, index: int) -> None:
        self.request = request
        self.index = index
        self.seed = chain.sequence_seed(request.queued.seed, index)
        self.output = self._known_output()
        # Kept here while the sequence does not run. The log has nothing of a beam.
        self.chain = chain.CHAIN_START if request.search else chain.extend(chain.CHAIN_START, self.output)
        detection = request.queued.stopping.repetition_detection
        self.repetition = RepetitionDetector(detection, self.output) if detection else None  # None: it may do so
        self.status = Status.WAITING
        self.started = len(self.output) > 0
        self.start_reason = StartReason.TAKEN_OVER if self.started else StartReason.FIRST  # why it gets its next slot
        self.worker_id = ""
        self.slot = -1
        self.tables: Tables = ()
        self.prompt_issued = False  # a plan that was issued before has computed the whole prompt in `tables`
        self.block_hashes: list[bytes] = []  # of the full blocks so far, for `hash_block_size`
        self.hash_block_size = 0
        self.gives_prompt_logprobs = False  # its first row since it got its slot says that they are kept
        self.save_at: list[int] = []  # of a running one: tokens after which its state is to be saved, in this order
        self.num_deferrals = 0  # times it was left to a worker that has more of its prefix

    def _known_output(self) -> "array[int]":
        request, index = self.request, self.index
        if request.search is not None:
            beams = request.search.beams.running
            return beams[index].token_ids if index < len(beams) else array("I")
        outputs = request.queued.output_token_ids
        return array("I", outputs[index].tolist() if index < len(outputs) else ())

    @property
    def num_logged_tokens(self) -> int:
        """Tokens of it that the log has: none of a beam."""
        return len(self.output) if self.request.search is None else 0

    @property
    def has_found(self) -> bool:
        """Return whether it is a beam that has computed its step and is to be chosen from."""
        return self.request.search is not None and self.index in self.request.search.found

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

    def hash_before(self, num_tokens: int, block_size: int) -> bytes:
        """The hash of the last block among the first `num_tokens`, which are whole blocks."""
        return self.hashes(block_size)[num_tokens // block_size - 1]

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
