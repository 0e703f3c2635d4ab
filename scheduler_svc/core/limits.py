"""The capacity of a worker."""

from dataclasses import dataclass, field

from contract.domain.kv_kinds import KVKind, longest_sequence
from contract.domain.model_kind import ModelKind


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The capacity of a worker."""

    num_blocks: int  # KV blocks; 0 of a model that keeps no keys and values
    block_size: int  # tokens of a block, of the kind of layers whose blocks have the fewest
    max_num_seqs: int  # slots
    max_model_len: int  # prompt and output tokens of one sequence
    max_num_batched_tokens: int = 2**32 - 1  # tokens that one step can compute
    kinds: tuple[KVKind, ...] = ()  # of a decoder's layers; empty: all see all tokens before them
    has_state: bool = False  # layers keep a state in a sequence's slot: blocks alone are of no use to another
    num_saved_states: int = 0  # of those: for sequences that begin with the same tokens, beside the slots' own
    max_plans: int = 1  # that are planned before their results come
    model_kind: ModelKind = ModelKind.DECODER
    capacity: int = field(init=False, compare=False)  # tokens of the longest sequence that the worker can compute

    def __post_init__(self) -> None:
        if self.model_kind.computes_whole_prompts:
            kinds: tuple[KVKind, ...] = ()
            capacity = min(self.max_model_len, self.max_num_batched_tokens)
        else:
            kinds = self.kinds or (KVKind(self.block_size),)
            capacity = longest_sequence(kinds, self.num_blocks, self.longest_step, self.max_model_len)
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "capacity", capacity)

    @property
    def finds_prefixes(self) -> bool:
        """Return whether blocks of one sequence are of use to others: not without states where layers keep some, nor
        where there are none."""
        return not self.model_kind.computes_whole_prompts and (not self.has_state or self.num_saved_states > 0)

    @property
    def longest_step(self) -> int:
        """Tokens by which a sequence may be planned to be ahead of what is known to be computed."""
        return max(self.max_num_batched_tokens, self.max_plans)
