"""Words that the output must not have: kernel and reference forbid the tokens that a plain comparison forbids."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import DEVICE, randn

from contract.domain.params import MAX_BAD_WORD_TOKENS, Sampling
from contract.domain.plan import Admission
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.sampling.penalties import changed_logits
from worker_svc.core.sampler import _adjust
from worker_svc.core.slots import HostSlots

VOCAB_SIZE = 7
LIMITS = Limits(
    num_blocks=64,
    block_size=16,
    max_num_seqs=4,
    max_model_len=96,
    max_num_batched_tokens=64,
    vocab_size=VOCAB_SIZE,
)
# Few tokens, so that words are often there.
some_tokens = st.lists(st.integers(0, 2), max_size=6)
words = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=4).map(tuple)
rows = st.lists(st.tuples(some_tokens.map(lambda found: [3, *found]), some_tokens, words), min_size=1, max_size=4)


def enter(sequences: list[tuple[list[int], list[int], tuple[tuple[int, ...], ...]]]) -> DeviceSlots:
    """A slot for each (prompt, output, words)."""
    state = DeviceSlots(HostSlots(LIMITS), DEVICE)
    for slot, (prompt, output, bad) in enumerate(sequences):
        token_ids, blocks = np.array([*prompt, *output], np.uint32), np.zeros(1, np.uint32)
        state.admit([Admission(slot, token_ids, len(prompt), 0, blocks, Sampling(bad_word_ids=bad), 0)])
    state.enter()
    return state


def forbidden(output: list[int], bad: tuple[tuple[int, ...], ...]) -> set[int]:
    return {word[-1] for word in bad if output[len(output) - len(word) + 1 :] == list(word[:-1]) or len(word) == 1}


def changed_by_both(state: DeviceSlots, slots: np.ndarray, positions: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    """The logits as the kernel changes them, which are those of the reference."""
    extras = state.sampling.extras(slots, positions, DEVICE)
    expected = _adjust(logits, state.sampling.sampler_input(slots, positions, state.tokens))
    if extras is None:
        assert expected is logits
        return logits
    on_device = torch.tensor(slots, device=DEVICE), torch.tensor(positions, device=DEVICE)
    changed = changed_logits(logits, *on_device, state, has_penalties=extras.has_penalties, changes=extras.changes)
    assert torch.equal(changed, expected)
    return changed


@settings(max_examples=60)
@given(rows, st.randoms(use_true_random=False))
def test_the_last_token_is_forbidden_where_the_output_ends_with_the_others(sequences, random) -> None:
    state, order = enter(sequences), list(range(len(sequences)))
    random.shuffle(order)
    positions = np.array([len(sequences[slot][0]) + len(sequences[slot][1]) for slot in order])
    logits = randn(len(order), VOCAB_SIZE, dtype=torch.float32)
    changed = changed_by_both(state, np.array(order), positions, logits)
    for row, slot in enumerate(order):
        _, output, bad = sequences[slot]
        gone = forbidden(output, bad)
        assert set((changed[row] == -torch.inf).nonzero().flatten().tolist()) == gone
        kept = [token for token in range(VOCAB_SIZE) if token not in gone]
        assert torch.equal(changed[row, kept], logits[row, kept])


def test_a_word_of_as_many_tokens_as_it_may_have_is_found() -> None:
    word = tuple([0, 1] * (MAX_BAD_WORD_TOKENS // 2))
    state = enter([([3], [2, *word[:-1]], (word,)), ([3], [*word[:-2], 2], (word,))])
    positions = np.array([2 + len(word) - 1, 1 + len(word) - 1])
    changed = changed_by_both(state, np.arange(2), positions, randn(2, VOCAB_SIZE, dtype=torch.float32))
    assert (changed == -torch.inf).nonzero().tolist() == [[0, 1]]


def test_the_same_parameters_hold_for_steps_that_are_launched_ahead() -> None:
    """What a step takes to the device says nothing of tokens or positions: those of the step count."""
    state = enter([([3], [0], ((0, 1), (1, 2)))])
    extras = state.sampling.extras(np.array([0]), np.array([2]), DEVICE)
    assert extras is not None
    logits, slots = randn(1, VOCAB_SIZE, dtype=torch.float32), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    found = []
    for position, token in ((2, 1), (3, 4), (4, 0)):
        changed = changed_logits(logits, slots, torch.full_like(slots, position), state, changes=extras.changes)
        found.append((changed[0] == -torch.inf).nonzero().flatten().tolist())
        state.tokens[0, position] = token
    assert found == [[1], [2], []]


def test_words_with_tokens_that_the_model_does_not_have_and_who_was_there_before_forbid_nothing() -> None:
    state = enter([([3], [0], ((0, VOCAB_SIZE), (VOCAB_SIZE, 1)))])
    assert state.sampling.extras(np.array([0]), np.array([2]), DEVICE) is None
    state = enter([([3], [0], ((1,),))])
    state.admit([Admission(0, np.array([3], np.uint32), 1, 0, np.zeros(1, np.uint32), Sampling(), 0)])
    assert state.sampling.extras(np.array([0]), np.array([1]), DEVICE) is None
