"""Penalties, biases and forbidden tokens change logits as the reference changes them."""

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE, DTYPE, randn

from contract.domain.params import Sampling
from contract.domain.plan import Admission
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.sampling.changes import Changes, Entries
from worker_svc.core.kernels.sampling.penalties import changed_logits
from worker_svc.core.sampler import SamplerInput, _adjust
from worker_svc.core.slots import HostSlots

# Histories of fewer tokens than a program counts at a time, and of more than all programs of a row do.
LENGTHS = (1, 2, 900, 9000, 17, 300)
SAMPLINGS = [
    Sampling(repetition_penalty=1.3),
    Sampling(),
    Sampling(presence_penalty=0.7, frequency_penalty=-0.3),
    Sampling(repetition_penalty=0.8, frequency_penalty=0.01),
    Sampling(presence_penalty=-1.5, allowed_token_ids=(5, 20, 96)),
    Sampling(frequency_penalty=0.5, logit_bias=((3, 1.5), (0, -100.0))),
]


def make_state(vocab_size: int) -> tuple[DeviceSlots, list[np.ndarray]]:
    """Six sequences in seven slots, the last 40 % of each its output; few tokens are seen often."""
    limits = Limits(
        num_blocks=20000,
        block_size=16,
        max_num_seqs=7,
        max_model_len=9100,
        max_num_batched_tokens=64,
        vocab_size=vocab_size,
    )
    state, rng = DeviceSlots(HostSlots(limits), DEVICE), np.random.default_rng(3)
    histories = [(rng.random(length) ** 3 * vocab_size).astype(np.uint32) for length in LENGTHS]
    for slot, (history, sampling) in enumerate(zip(histories, SAMPLINGS, strict=True)):
        num_prompt, num_blocks = max(1, int(len(history) * 0.6)), -(-len(history) // 16)
        blocks = np.zeros(num_blocks, np.uint32)
        stops = (5, vocab_size - 1) if slot == 4 else ()
        state.admit([Admission(slot, history, num_prompt, 0, blocks, sampling, 0, 100, stops)])
    state.enter()
    return state, histories


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
@pytest.mark.parametrize("vocab_size", [97, 5001])
@pytest.mark.parametrize("slots", [[5, 2, 0, 3, 1, 4], [3], [4, 1], [1, 5]])
def test_logits_are_changed_as_the_reference_changes_them(
    slots: list[int], vocab_size: int, dtype: torch.dtype
) -> None:
    state, _ = make_state(vocab_size)
    logits = randn(len(slots), vocab_size, scale=3.0, dtype=dtype)
    before = logits.clone()
    rows, positions = np.array(slots), np.array([LENGTHS[slot] for slot in slots])
    extras = state.sampling.extras(rows, positions, DEVICE)
    assert extras is not None
    on_device = torch.tensor(rows, device=DEVICE), torch.tensor(positions, device=DEVICE)
    changed = changed_logits(logits, *on_device, state, has_penalties=extras.has_penalties, changes=extras.changes)
    expected = _adjust(logits.float(), state.sampling.sampler_input(rows, positions, state.tokens))
    assert changed.dtype == torch.float32
    # Products and differences are rounded once or twice.
    torch.testing.assert_close(changed, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before)
    if 4 in slots:
        row = changed[slots.index(4)]
        assert (row > -torch.inf).nonzero().flatten().tolist() == ([20] if vocab_size == 97 else [20, 96])


def test_tokens_behind_a_position_are_not_seen() -> None:
    state, _ = make_state(97)
    slots, logits = torch.tensor([2, 2], device=DEVICE), randn(1, 97, dtype=torch.float32).expand(2, -1).contiguous()
    positions = torch.tensor([500, 900], device=DEVICE)
    prompt_only, all_of_it = changed_logits(logits, slots, positions, state, has_penalties=True)
    assert torch.equal(prompt_only, logits[0])
    assert not torch.equal(all_of_it, logits[0])


def test_nothing_is_copied_where_nothing_changes() -> None:
    state, _ = make_state(97)
    logits = randn(1, 97)
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert changed_logits(logits, one, one, state) is logits


def test_as_many_entries_as_anybody_likes() -> None:
    state, _ = make_state(97)
    logits = randn(300, 97, dtype=torch.float32)
    rows = torch.arange(300, device=DEVICE)
    entries = Entries(rows, rows % 97, torch.full((300,), 2.0, device=DEVICE))
    slots = torch.ones_like(rows)
    changed = changed_logits(logits, slots, torch.full_like(rows, 2), state, changes=Changes(entries))
    assert torch.equal(changed, _adjust(logits, SamplerInput(changes=Changes(entries))))
