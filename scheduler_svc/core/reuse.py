"""The KV of a sequence that is on a worker already, and the choice to wait for the worker that has more of it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from scheduler_svc.core.sequence import SequenceState
from scheduler_svc.core.tables import Reused
from scheduler_svc.core.worker import WorkerState

_MAX_DEFERRALS = 8  # plans for which a sequence waits for the worker that has more of its prefix


def reusable(worker: WorkerState, sequence: SequenceState, *, has_cache: bool) -> Reused:
    """The KV that need not be computed: of a sibling that has the prompt, or, with `has_cache`, from the prefix cache.

    The last known token is always computed, since its hidden state gives the next one, or a vector; and all of them
    where the prompt's logprobs are asked for, or a vector of all its hidden states, or by a model that keeps none.
    Where layers keep a state, what is found ends where one was saved; a sibling's is past the prompt.
    """
    if sequence.computes_whole_prompt or not worker.limits.finds_prefixes:
        return worker.rules.nothing_reused()
    size = worker.limits.block_size
    found = worker.rules.nothing_reused()
    if has_cache:
        hashes = sequence.hashes(size)[: (sequence.num_tokens - 1) // size]
        found = worker.rules.find(worker.blocks, hashes, size)
        if worker.limits.has_state:
            return _up_to_a_state(worker, hashes, found)
    num_shared = sequence.request.num_prompt_tokens - 1
    if num_shared > found.num_tokens and not worker.limits.has_state:
        for sibling in sequence.request.sequences:
            has_it = sibling.worker_id == worker.worker_id and sibling.prompt_issued
            if has_it and (shared := worker.rules.shared(sibling.tables, num_shared)) is not None:
                return shared
    return found


def _up_to_a_state(worker: WorkerState, hashes: Sequence[bytes], found: Reused) -> Reused:
    """The part of what was found after which a state was saved, with it."""
    size, num_found = worker.limits.block_size, found.num_tokens
    num_blocks = worker.states.longest(hashes, num_found // size)
    while num_blocks:
        found = worker.rules.find(worker.blocks, hashes[:num_blocks], size)
        if found.num_tokens == num_blocks * size:
            return replace(found, state=worker.states.found[hashes[num_blocks - 1]], num_found=num_found)
        # A window lacks blocks there.
        num_blocks = worker.states.longest(hashes, found.num_tokens // size)
    return replace(worker.rules.nothing_reused(), num_found=num_found)


def belongs_elsewhere(
    worker: WorkerState, workers: Iterable[WorkerState], sequence: SequenceState, *, has_cache: bool
) -> bool:
    """Return whether another worker with a free slot has more of the sequence; it is waited for, but not for long."""
    others = [other for other in workers if other is not worker and other.has_slot and other.holds(sequence)]
    if not others or sequence.num_deferrals >= _MAX_DEFERRALS:
        return False
    here = reusable(worker, sequence, has_cache=has_cache).num_tokens
    if all(reusable(other, sequence, has_cache=has_cache).num_tokens <= here for other in others):
        return False
    sequence.num_deferrals += 1
    return True
