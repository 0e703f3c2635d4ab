"""From a plan and the slots' state to the arrays of one batch: a pure function, no device."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_svc.core.interface import plan_error
from worker_svc.core.slots import I64, HostSlots


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequence i of a batch computes `query_lens[i]` tokens of slot `slots[i]`; tokens stand one sequence after the
    other. All are i64.
    """

    slots: I64  # [seqs]
    query_lens: I64  # [seqs]
    query_starts: I64  # [seqs + 1]: where each sequence's tokens begin, and the end
    context_lens: I64  # [seqs]: tokens with KV once the step is done
    samples: I64  # [samples]: the sequences of the batch that sample their next token; none whose prompt is pooled
    sample_positions: I64  # [samples]: index of the sampled token in its sequence

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.query_starts[-1])

    @property
    def num_decodes(self) -> int:
        """Sequences, from the first on, that advance by one token: all such, where these stand first."""
        longer = np.flatnonzero(self.query_lens != 1)
        return int(longer[0]) if len(longer) else len(self.slots)

    @property
    def only_decodes(self) -> bool:
        """Return whether every sequence computes its last known token and samples the next."""
        return len(self.samples) == len(self.slots) == self.num_tokens


def build_batch(
    slots: npt.NDArray[np.integer],
    num_tokens: npt.NDArray[np.integer],
    state: HostSlots,
    *,
    longest_first: bool = False,
) -> Batch:
    """The batch in which slot `slots[i]` advances by `num_tokens[i]` tokens; `state` is only read.

    `longest_first` puts those that advance by one token before all others, long contexts before short ones: a device
    that begins with what takes longest does not end with it.

    Raises:
        PenstockError: a slot is empty, named twice, has fewer tokens to compute, or too few blocks for them.
    """
    rows = slots.astype(np.int64)
    limits = state.limits
    if np.count_nonzero(rows >= limits.max_num_seqs) or np.count_nonzero(state.active[rows]) < len(rows):
        raise plan_error("it computes a slot that is empty or not there")
    if len(set(rows.tolist())) != len(rows):
        raise plan_error("it computes a slot twice")
    query_lens = num_tokens.astype(np.int64)
    computed, known = state.num_computed[rows], state.num_tokens[rows]
    context_lens = computed + query_lens
    if np.count_nonzero((query_lens < 1) | (context_lens > known)):
        raise plan_error("a slot must advance by at least one token and by no more than it knows")
    total = int(query_lens.sum())
    if np.count_nonzero(context_lens > limits.max_model_len) or total > limits.max_num_batched_tokens:
        raise plan_error("it computes more tokens than a context or a step may have")
    if np.count_nonzero(context_lens > state.room[rows]):
        raise plan_error("a slot has too few blocks for the tokens it computes")
    are_single = len(rows) == total
    if longest_first and len(rows) > 1:
        order = np.argsort(-computed if are_single else np.where(query_lens == 1, -computed, 1), kind="stable")
        rows, query_lens, context_lens, known = (column[order] for column in (rows, query_lens, context_lens, known))
    query_starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(query_lens, out=query_starts[1:])
    (samples,) = ((context_lens == known) & ~state.is_pooled[rows]).nonzero()
    return Batch(
        slots=rows,
        query_lens=query_lens,
        query_starts=query_starts,
        context_lens=context_lens,
        samples=samples,
        sample_positions=known[samples],
    )


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """The tokens of a batch in flat columns, i64[tokens]."""

    slots: I64
    positions: I64  # index of each token in its sequence
    slot_mappings: I64  # [kinds, tokens]: block * block_size + offset, where each token's KV goes


def tokens_of(batch: Batch, state: HostSlots) -> BatchTokens:
    """The tokens of a batch; `state` has the blocks of its slots."""
    block_size = state.limits.block_size
    if len(batch.slots) == batch.num_tokens:
        slots, positions = batch.slots, batch.context_lens - 1
    else:
        slots = np.repeat(batch.slots, batch.query_lens)
        positions = np.arange(len(slots)) + np.repeat(batch.context_lens - batch.query_starts[1:], batch.query_lens)
    indices = positions // block_size
    slot_mappings = (state.block_tables[:, slots, indices] - indices) * block_size + positions
    return BatchTokens(slots, positions, slot_mappings)


def advance(batch: Batch, state: HostSlots) -> None:
    """Move the counts on as the launched batch will: its tokens are computed, each sample is known."""
    state.num_computed[batch.slots] = batch.context_lens
    state.num_tokens[batch.slots[batch.samples]] += 1
