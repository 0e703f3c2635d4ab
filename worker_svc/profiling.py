"""Makes runners over one loaded model, and finds out how much memory one needs beside weights and KV cache."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from contract.domain.errors import invalid
from contract.domain.kv_kinds import KVKind, blocks_of_sequence
from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan
from worker_svc.compute import ALL_GRAPHS, Compute
from worker_svc.core.distributed import Group
from worker_svc.core.interface import Limits
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.language_model import LanguageModel
from worker_svc.core.memory import DEFAULT_CPU_KV_CACHE_BYTES, Budget, MemoryProfile, num_blocks_in
from worker_svc.core.runner import ModelRunner
from worker_svc.core.states.slot_states import SlotStates, StateShape
from worker_svc.core.step_sizes import StepSizes, sizes_between
from worker_svc.runner_options import RunnerOptions

_MANY_CHUNKS = 65  # the largest graph has room for fewer: see `core.chunk_graphs`
_DECODES = (1, 17, 65)  # for which kernels may be others, as there


@dataclass(frozen=True, slots=True)
class RunnerMaker:
    """Makes runners over one loaded model: first a small one to measure with, then the real one."""

    options: RunnerOptions
    sizes: StepSizes  # where the options say nothing
    model: LanguageModel
    shape: KVCacheShape
    state: StateShape | None  # of a sequence, in layers that keep one
    num_heads: int  # query heads of this rank
    device: torch.device
    compute: Compute
    clock_ns: Callable[[], int]

    @property
    def max_num_seqs(self) -> int:
        """Of slots: no more than a step may have tokens."""
        return min(self.options.max_num_seqs or self.sizes.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_num_batched_tokens(self) -> int:
        """Of a step."""
        return self.options.max_num_batched_tokens or self.sizes.max_num_batched_tokens

    @property
    def num_saved_states(self) -> int:
        """Beside those of slots; unless the options say, no more than these."""
        if self.options.num_saved_states is not None:
            return self.options.num_saved_states
        return min(self.sizes.num_saved_states, self.max_num_seqs)

    @property
    def num_states(self) -> int:
        """Of all slots, the one that pads batches, and those that are saved."""
        return self.max_num_seqs + 1 + self.num_saved_states

    @property
    def state_bytes(self) -> int:
        """Bytes of all states."""
        return 0 if self.state is None else self.num_states * self.state.slot_bytes

    @property
    def used_sizes(self) -> StepSizes:
        """The sizes that the options say, or else those that suit."""
        return StepSizes(self.max_num_batched_tokens, self.max_num_seqs, self.num_saved_states)

    def make(
        self, num_blocks: int, max_model_len: int, *, num_graphs: int, observe: Callable[[int, int], None]
    ) -> ModelRunner:
        """Implement `Compute.make_runner`."""
        options = self.options
        limits = Limits(
            num_blocks=num_blocks,
            block_size=options.block_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            vocab_size=self.model.vocab_size,
            kinds=self.shape.layout.kinds,
            has_state=self.state is not None,
            num_saved_states=self.num_saved_states,
        )
        states = None if self.state is None else SlotStates(self.state, self.num_states, self.device)
        cache = KVCache(self.shape, num_blocks + 1, self.device)
        return self.compute.make_runner(
            self.model,
            cache,
            self.num_heads,
            limits,
            self.clock_ns,
            num_graphs=num_graphs,
            observe=observe,
            states=states,
        )


@dataclass(frozen=True, slots=True)
class _Needs:
    """Of a runner beside weights and KV cache, in bytes."""

    step_bytes: int  # state, and the peak of a full step
    graph_bytes: int


class Profiler:
    """Measures with a small KV cache, so that the real one can have the rest.

    Args:
        maker: of the runners.
        budget: of a GPU; None: on the CPU, where nothing is measured.
        max_model_len: of the longest sequence.
    """

    def __init__(self, maker: RunnerMaker, budget: Budget | None, max_model_len: int) -> None:
        self._maker = maker
        self._budget = budget
        self._max_model_len = max_model_len
        self._records = maker.options.cuda_graphs

    def profile(self, weights_bytes: int, group: Group) -> MemoryProfile:
        """The number of blocks that there will be: the fewest that any rank has room for.

        Raises:
            PenstockError: INVALID_ARGUMENT: a full step does not fit beside the weights.
        """
        options, block_bytes = self._maker.options, self._maker.shape.block_bytes
        needs = _Needs(0, 0)
        kv_bytes = DEFAULT_CPU_KV_CACHE_BYTES
        if self._budget is not None:
            way_out = "lower max_num_batched_tokens, max_num_seqs or max_model_len"
            with self._explained("a full step", way_out + (", or num_saved_states" if self._maker.state else "")):
                needs = self._measure()
            in_use_bytes = self._budget.total_bytes - self._free_bytes()
            limit_bytes = int(self._budget.total_bytes * self._budget.share)
            kv_bytes = limit_bytes - in_use_bytes - needs.step_bytes - needs.graph_bytes
        if options.kv_cache_memory_bytes is not None:
            kv_bytes = options.kv_cache_memory_bytes
        num_blocks = options.num_blocks
        if num_blocks is None:
            maker = self._maker
            each = blocks_of_sequence(maker.shape.layout.kinds, self._max_model_len, maker.max_num_batched_tokens)
            num_blocks = num_blocks_in(kv_bytes, block_bytes, maker.max_num_seqs, each)
        num_blocks = group.minimum(num_blocks, self._maker.device)
        return MemoryProfile(
            total_bytes=self._budget.total_bytes if self._budget is not None else 0,
            weights_bytes=weights_bytes,
            activation_bytes=max(0, needs.step_bytes - self._maker.state_bytes),
            state_bytes=self._maker.state_bytes,
            kv_cache_bytes=num_blocks * block_bytes,
            block_bytes=block_bytes,
            num_blocks=num_blocks,
            graph_bytes=needs.graph_bytes,
        )

    def make_runner(self, profile: MemoryProfile, max_model_len: int) -> tuple[ModelRunner, MemoryProfile]:
        """The real runner, and the profile with what its graphs came to.

        Raises:
            PenstockError: INVALID_ARGUMENT: it does not fit after all, because others have taken memory.
        """
        free_bytes: list[int] = []
        with self._explained("the KV cache", "lower gpu_memory_utilization"):
            runner = self._maker.make(
                profile.num_blocks,
                max_model_len,
                num_graphs=ALL_GRAPHS if self._records else 0,
                observe=lambda _done, _total: free_bytes.append(self._free_bytes()),
            )
        if free_bytes:
            profile = replace(profile, graph_bytes=max(0, free_bytes[0] - free_bytes[-1]))
        return runner, profile

    def _measure(self) -> _Needs:
        """With as many sequences as there are slots, all sampled by top-p, with penalties and logprobs, in two steps:
        one of as many tokens as a step may have, and one after the longest context, all of which penalties look at.
        And with the two largest graphs, of which the second says what each further one takes.

        Steps of fewer tokens come before these, so that kernels which only they use are compiled by now.
        """
        maker = self._maker
        device, kinds = maker.device, maker.shape.layout.kinds
        sizes = maker.max_num_batched_tokens, maker.max_num_seqs, self._max_model_len
        lengths, smaller = full_lengths(*sizes), smaller_steps(*sizes)
        num_blocks = max(
            sum(kind.num_blocks(length) for kind in kinds for length in each) for each in (lengths, *smaller)
        )
        before_bytes = torch.cuda.memory_allocated(device)
        free_bytes: list[int] = []
        allocated_bytes: list[int] = []
        totals: list[int] = []

        def observe(_done: int, total: int) -> None:
            free_bytes.append(self._free_bytes())
            allocated_bytes.append(torch.cuda.memory_allocated(device))
            totals.append(total)

        runner = maker.make(num_blocks, self._max_model_len, num_graphs=2 if self._records else 0, observe=observe)
        made_bytes = torch.cuda.memory_allocated(device)
        state_bytes = (allocated_bytes or [made_bytes])[0] - before_bytes
        state_bytes -= (num_blocks + 1) * maker.shape.block_bytes
        torch.cuda.reset_peak_memory_stats(device)
        has_state = maker.state is not None
        long_plan = _long_plan(len(lengths), self._max_model_len, kinds, has_state=has_state)
        for fewer in smaller:
            runner.launch(_full_plan(fewer, kinds)).result()
        for plan in (_full_plan(lengths, kinds), long_plan):
            runner.launch(plan).result()
        step_bytes = torch.cuda.max_memory_allocated(device) - made_bytes
        runner.close()
        del runner
        torch.cuda.empty_cache()
        taken_bytes = [before - after for before, after in pairwise(free_bytes)]
        graph_bytes = sum(taken_bytes) + taken_bytes[-1] * (totals[0] - len(taken_bytes)) if taken_bytes else 0
        return _Needs(max(0, state_bytes) + step_bytes, max(0, graph_bytes))

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._maker.device)[0] if self._budget is not None else 0

    @contextmanager
    def _explained(self, what: str, way_out: str) -> Iterator[None]:
        """Says of a device's refusal what it means."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            account = self._budget.describe() if self._budget is not None else "the host's memory"
            raise invalid(
                f"there is no room for {what} ({account}; {error}): {way_out}", "gpu_memory_utilization"
            ) from error


def full_lengths(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> list[int]:
    """The tokens of each sequence of a step that has as many sequences, and then as many tokens, as any may have: the
    first are as long as contexts may be.
    """
    left, lengths = max_num_batched_tokens - max_num_seqs, []
    for _ in range(max_num_seqs):
        more = min(max_model_len - 1, left)
        lengths.append(1 + more)
        left -= more
    return lengths


def smaller_steps(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> list[list[int]]:
    """The tokens of each sequence of some steps that have fewer than any may have, of every number from which on
    kernels may be others. There are more chunks than any graph has room for, where there are as many slots, beside few
    sequences that decode, or more: all is launched that steps without a graph launch.
    """
    sizes = sizes_between(max_num_batched_tokens) or [max_num_batched_tokens]
    steps = []
    for index, num_tokens in enumerate(sizes):
        num_decodes = min(_DECODES[index % len(_DECODES)], max_num_seqs // 2)
        left = num_tokens - num_decodes
        num_chunks = min(_MANY_CHUNKS, max_num_seqs - num_decodes, left // 2)
        if num_chunks > 0:
            length = min(left // num_chunks, max_model_len)
            steps.append([1] * num_decodes + [length] * num_chunks)
    return steps


def _full_plan(lengths: list[int], kinds: Sequence[KVKind]) -> StepPlan:
    """One step that prefills a sequence of each of `lengths`, in blocks of its own."""
    counts = [[kind.num_blocks(length) for kind in kinds] for length in lengths]
    starts = np.cumsum([0, *map(sum, counts)]).tolist()
    blocks = [np.arange(*ends, dtype=np.uint32) for ends in pairwise(starts)]
    each = zip(lengths, blocks, counts, strict=True)
    return _plan([_admission(slot, length, 0, mine, of_kinds) for slot, (length, mine, of_kinds) in enumerate(each)])


def _long_plan(num_seqs: int, max_model_len: int, kinds: Sequence[KVKind], *, has_state: bool) -> StepPlan:
    """One step that computes the last token of so many sequences, of which one is as long as any may be. What is in the
    cache does not matter: all its blocks are the first.
    """
    counts = [kind.num_blocks(max_model_len) for kind in kinds]
    ones = np.zeros(len(kinds), np.uint32)
    others = [_admission(slot, 1, 0, ones, [1] * len(kinds)) for slot in range(1, num_seqs)]
    long = _admission(0, max_model_len, max_model_len - 1, np.zeros(sum(counts), np.uint32), counts)
    return _plan([replace(long, source_state=0 if has_state and max_model_len > 1 else None), *others])


def _plan(admissions: list[Admission]) -> StepPlan:
    """A first step, which computes all that the sequences have not computed."""
    return StepPlan(
        step=1,
        admissions=tuple(admissions),
        slots=np.array([each.slot for each in admissions], np.uint32),
        num_tokens=np.array([len(each.token_ids) - each.num_computed_tokens for each in admissions], np.uint32),
    )


def _admission(
    slot: int, num_tokens: int, num_computed: int, block_ids: NDArray[np.uint32], counts: Sequence[int]
) -> Admission:
    """`counts`: of `block_ids`, by kind of layers."""
    return Admission(
        slot=slot,
        token_ids=np.zeros(num_tokens, np.uint32),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_computed,
        block_ids=block_ids,
        block_counts=np.array(counts, np.uint32),
        sampling=Sampling(top_p=0.9, presence_penalty=0.1, num_logprobs=1),
        seed=0,
    )
