"""What the parity tests switch on and off, and the proof that it was on."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

from recorder import Recorder
from reference import BUNDLED

from contract.domain.kv_kinds import blocks_of_sequence
from scheduler_svc.core.stats import Counters
from servicekit.checkpoint.model import read_checkpoint
from worker_svc.core.causal_lm import reach_of
from worker_svc.core.kv_layout import plan_layout
from worker_svc.model_config import read_model_config

BLOCK_SIZE = 4
MIN_SAVED_TOKENS = 8  # where layers keep a state
FEW_BLOCKS = 84  # the longest prompt and its output need 77
MANY_BLOCKS = 2048

# Together they have all that a family may do.
CHECKPOINTS = (
    "llama_llama3_rope_tied",
    "llama_biases",
    "granite_multipliers",
    "olmo2_norms_after",
    "phi3_packed",
    "gemma2_caps_and_windows",
    "cohere2_some_not_rotated",
    "glm4_sandwich",
    "qwen2_moe_shared",
    "glm4_moe_groups_and_correction",
    "deepseek_v3_biases",
    "llama4_chunks_and_temperature",
    "qwen3_next_states",
    BUNDLED,
)
WINDOWS = (1, 2, 4)
BUDGETS = (16, 512)
PREFIX_CACHING = (True, False)
NUM_BLOCKS = (FEW_BLOCKS, MANY_BLOCKS)


@dataclass(frozen=True)
class Case:
    window: int
    budget: int
    enable_prefix_caching: bool
    num_blocks: int

    def __str__(self) -> str:
        cached = "cached" if self.enable_prefix_caching else "uncached"
        return f"w{self.window}-{self.budget}-{cached}-{self.num_blocks}"


CASES = [Case(*values) for values in product(WINDOWS, BUDGETS, PREFIX_CACHING, NUM_BLOCKS)]


def num_blocks_of(case: Case, directory: Path, longest_step: int) -> int:
    """The blocks of a case, of which the few hold one sequence with what it keeps of each kind of layers where a step
    may take so many tokens of it."""
    if case.num_blocks != FEW_BLOCKS:
        return case.num_blocks
    attentions = read_model_config(read_checkpoint(directory)).decoder.attentions
    reaches = [reach_of(each, FEW_BLOCKS * BLOCK_SIZE) for each in attentions]
    return blocks_of_sequence(plan_layout(reaches, BLOCK_SIZE).kinds, FEW_BLOCKS * BLOCK_SIZE, longest_step)


def assert_switched_on(case: Case, recorder: Recorder, counters: Counters) -> None:
    """Prompts were cut, sequences preempted and blocks found again where the case wants it. In few blocks, windows that
    are given up leave room for others, whose preemption `test_windows_given_up` sees to."""
    assert 16 < recorder.most_batched_tokens <= 512 if case.budget == 512 else recorder.most_batched_tokens == 16
    if any(not kind.sees_all for kind in recorder.limits.kinds) and case.num_blocks == FEW_BLOCKS:
        assert recorder.num_chunks > recorder.num_admissions or case.budget == 512
        assert counters.num_cached_tokens == 0 or case.enable_prefix_caching
        return
    saves_states = case.enable_prefix_caching and recorder.limits.num_saved_states > 0
    # A pool of few blocks holds fewer tokens than the large budget, which then cuts nothing; where states are saved,
    # prompts are cut.
    is_cut = case.budget == 16 or case.num_blocks == MANY_BLOCKS or saves_states
    assert (recorder.num_chunks > recorder.num_admissions) == is_cut
    assert (counters.num_preemptions > 0) == (case.num_blocks == FEW_BLOCKS)
    # Of few blocks, those that a state was saved after may be gone when the next one shares as many.
    may_find_none = saves_states and case.num_blocks == FEW_BLOCKS
    assert (counters.num_cached_tokens > 0) == case.enable_prefix_caching or may_find_none


def pairwise(names: Sequence[str]) -> list[tuple[str, Case]]:
    """Few of all combinations, in which any two values of any two dimensions meet; always the same."""
    rows = product(names, WINDOWS, BUDGETS, PREFIX_CACHING, NUM_BLOCKS)
    return [(str(name), Case(*values)) for name, *values in covering(rows)]


def cases_of(number: int) -> list[Case]:
    """Few of `CASES`, in which any two values of any two dimensions meet: those of the checkpoint of this number. All
    checkpoints together have all cases.
    """
    return [Case(*row) for row in covering(product(WINDOWS, BUDGETS, PREFIX_CACHING, NUM_BLOCKS), number)]


def covering(all_rows: Iterable[tuple[Any, ...]], number: int = 0) -> list[tuple[Any, ...]]:
    """Some of the rows, in which any two values of any two columns meet if they ever do; greedy, and for each number
    others.
    """
    rows = list(all_rows)
    random.Random(number).shuffle(rows)
    missing = {pair for row in rows for pair in combinations(enumerate(row), 2)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(combinations(enumerate(row), 2))))
        missing.difference_update(combinations(enumerate(best), 2))
        chosen.append(best)
    return chosen
