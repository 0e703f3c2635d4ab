"""The step that a scheduler asks of a worker, and the answer. Columns are little-endian arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from contract.domain.params import Sampling
from contract.domain.pooling import Pooling

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]

NO_TOKENS: U32 = np.empty(0, np.uint32)
NO_FLOATS: F32 = np.empty(0, np.float32)
NO_TOKENS.flags.writeable = False
NO_FLOATS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that enters a slot; everything else about it then lives on the worker's device."""

    slot: int
    token_ids: U32  # u32[num_tokens]: the prompt and, after a preemption, the output so far
    num_prompt_tokens: int  # how many of `token_ids` are prompt: penalties tell them apart
    num_computed_tokens: int  # how many tokens have their KV in `block_ids` already, as far as tokens to come see it
    block_ids: U32  # u32[num_blocks]: the block tables so far, one kind of layers after the other; empty: none is kept
    sampling: Sampling
    seed: int  # unsigned 64-bit, of this sequence
    min_output_tokens: int = 0  # `stop_token_ids` cannot be sampled before this many output tokens
    stop_token_ids: tuple[int, ...] = ()  # EOS (unless ignored) and stop ids: masked until min_output_tokens
    request_id: bytes = b""  # 16 bytes, for logs; nothing is decided by it
    eos_token_ids: tuple[int, ...] = ()  # of these one ends an output that its grammar may end
    prompt_logprobs: bool = False  # the prompt's are to be computed, as `sampling` says; nothing is computed so far
    pooling: Pooling | None = None  # the prompt becomes a vector, and its slot samples nothing; None: it samples
    block_counts: U32 = field(default_factory=lambda: NO_TOKENS)  # u32[kinds]: of `block_ids`; empty: all of the first
    # u32[kinds]: blocks before those in `block_ids`, which no token to be computed sees; empty: none.
    first_blocks: U32 = field(default_factory=lambda: NO_TOKENS)
    # Of a model whose layers keep a state: the index of that of the computed tokens, of a slot's occupant so far or,
    # from the number of slots on, one that was saved; it is copied before anything is computed. None: nothing is.
    source_state: int | None = None
    num_first_tokens: int = 0  # of a pair of texts: tokens before those of the second type; 0: all are of the first

    @property
    def tables(self) -> list[tuple[int, U32]]:
        """By kind: the index of the first block that is there, and the blocks u32[num_blocks] from there on; empty: no
        keys and values are kept.
        """
        if not len(self.block_counts):
            return [(0, self.block_ids)] if len(self.block_ids) else []
        blocks = np.split(self.block_ids, np.cumsum(self.block_counts)[:-1])
        firsts = self.first_blocks.tolist() if len(self.first_blocks) else [0] * len(blocks)
        return list(zip(firsts, blocks, strict=True))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step for one worker. Slots that a plan does not name keep their state on the device.

    The worker carries it out in this order: release, admit, append blocks, copy blocks, compute, save states. A slot
    all of whose tokens are computed by then samples the next one; a slot that does not get there (a prefill chunk) does
    not. The next input token of a decoding slot is already on the device: it is never sent.
    """

    step: int  # counts from 1 within an epoch; a plan with step 1 starts from empty slots
    released_slots: U32 = field(default_factory=lambda: NO_TOKENS)
    admissions: tuple[Admission, ...] = ()
    append_slots: U32 = field(default_factory=lambda: NO_TOKENS)  # u32[a]: slot that gets a block
    append_blocks: U32 = field(default_factory=lambda: NO_TOKENS)  # u32[a]: the block, after those the slot has
    append_kinds: U32 = field(default_factory=lambda: NO_TOKENS)  # u32[a]: of the kind of layers; empty: of the first
    copy_sources: U32 = field(default_factory=lambda: NO_TOKENS)  # u32[c]: whole blocks, copied before computing
    copy_targets: U32 = field(default_factory=lambda: NO_TOKENS)  # u32[c]
    slots: U32 = field(default_factory=lambda: NO_TOKENS)  # u32[s]: the slots that compute in this step
    num_tokens: U32 = field(default_factory=lambda: NO_TOKENS)  # u32[s]: how many tokens each advances
    # u32[v]: slots whose state is saved once they are computed, and where to: indices as in `Admission.source_state`.
    save_slots: U32 = field(default_factory=lambda: NO_TOKENS)
    save_states: U32 = field(default_factory=lambda: NO_TOKENS)  # u32[v]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the raw logits, for the sampled tokens of a result or a row batch.

    Token t has its own logprob `sampled[t]` (NaN where none was asked for), its rank `ranks[t]` and `top_counts[t]`
    alternatives, most likely first, which stand one token after the other in `top_ids` and `top_logprobs`.
    """

    sampled: F32  # f32[tokens], natural log
    ranks: U32  # u32[tokens]: tokens of the vocabulary that are more likely, and one; 0 where none was asked for
    top_counts: U32  # u32[tokens]
    top_ids: U32  # u32[sum(top_counts)]
    top_logprobs: F32  # f32[sum(top_counts)], natural log

    @staticmethod
    def sampled_alone(sampled: F32) -> "Logprobs":
        """Those of tokens of which nothing else is known, neither ranks nor alternatives."""
        zeros = np.zeros(len(sampled), np.uint32)
        return Logprobs(sampled, zeros, zeros, NO_TOKENS, NO_FLOATS)

    @staticmethod
    def unasked(num_tokens: int) -> "Logprobs":
        """Those of tokens for which nobody asked."""
        return Logprobs.sampled_alone(np.full(num_tokens, np.nan, np.float32))

    @staticmethod
    def joined(parts: "Sequence[Logprobs]") -> "Logprobs":
        """Those of several runs of tokens, at least one, as those of one."""
        return Logprobs(
            sampled=np.concatenate([each.sampled for each in parts]),
            ranks=np.concatenate([each.ranks for each in parts]),
            top_counts=np.concatenate([each.top_counts for each in parts]),
            top_ids=np.concatenate([each.top_ids for each in parts]),
            top_logprobs=np.concatenate([each.top_logprobs for each in parts]),
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens but the first, each after all that stand before it."""

    token_ids: U32  # u32[num_prompt_tokens - 1]
    logprobs: Logprobs  # of these, by the raw logits


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one plan: tokens of slot `slots[i]` are the next `counts[i]` of `token_ids`."""

    step: int
    slots: U32  # u32[m]: the slots that sampled, and those whose prompts are pooled now
    counts: U32  # u32[m]: tokens of each, 0 to k; 0 of a pooled prompt
    token_ids: U32  # u32[sum(counts)]
    logprobs: Logprobs | None = None  # None: no slot asked
    step_ns: int = 0  # device time of the step, nanoseconds
    idle_ns: int = 0  # device time between the end of the step before and the start of this one, nanoseconds
    failures: Mapping[int, str] = field(default_factory=dict)  # slot → why its sequence cannot go on: no token counts
    # By request, of prompts that are complete with this step: kept beside the result, which does not carry them.
    prompts: Mapping[bytes, PromptLogprobs] = field(default_factory=dict)
    vectors: Mapping[bytes, F32] = field(default_factory=dict)  # likewise, f32[dimensions] of each
