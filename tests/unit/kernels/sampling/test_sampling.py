"""The sampler in one pass draws what the reference draws, and moves the slots on."""

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE, DTYPE, randn

from contract.domain.params import Sampling
from contract.domain.plan import Admission
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.sampling.draw import sample_tokens
from worker_svc.core.kernels.sampling.truncation import cutoffs
from worker_svc.core.kernels.state.inputs import chunk_inputs, decode_inputs
from worker_svc.core.sampler import Draw, SamplerInput, Truncation, draw_tokens, sample
from worker_svc.core.slots import HostSlots


def reference(logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> list:
    rows = (temperatures > 0).nonzero().flatten()
    draw = Draw(rows, temperatures[rows], seeds[rows], positions[rows])
    return sample(logits.float(), SamplerInput(draw)).token_ids.tolist()


@pytest.mark.parametrize("vocab_size", [97, 1024, 4096, 5001, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_are_those_of_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    rows = 8
    logits = (torch.randn(rows, vocab_size, generator=generator) * 3).to(DEVICE, dtype)
    temperatures = torch.tensor([0.0, 1e-30, 0.3, 0.7, 1.0, 4.0, 1e9, 1.0], device=DEVICE)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(DEVICE)
    positions = torch.arange(rows, device=DEVICE) * 1000
    sampled = sample_tokens(logits, temperatures, seeds, positions)
    assert sampled.tolist() == reference(logits, temperatures, seeds, positions)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (5, 0.7, 0.05)])
def test_rows_that_truncate_draw_what_the_reference_draws(top_k: int, top_p: float, min_p: float) -> None:
    generator = torch.Generator().manual_seed(6)
    rows, index = 40, torch.arange(40, device=DEVICE)
    logits = (torch.randn(rows, 97, generator=generator) * 3).to(DEVICE)
    half = index[::2]  # the others keep all
    truncation = Truncation(
        half, torch.full_like(half, top_k), torch.full((len(half),), top_p, device=DEVICE), longest=None
    )
    draw = Draw(
        rows=index,
        temperature=torch.linspace(0.3, 2.0, rows, device=DEVICE),
        seeds=index * 7919,
        positions=index + 100,
        truncation=truncation if top_k or top_p < 1 else None,
        min_p=torch.full((rows,), min_p, device=DEVICE) if min_p else None,
    )
    is_cut = index % 2 == 0
    all_top_k, all_top_p = torch.where(is_cut, top_k, 0), torch.where(is_cut, top_p, 1.0)
    all_min_p = torch.full_like(draw.temperature, min_p)
    cut = cutoffs(logits, draw.temperature, all_top_k, all_top_p, all_min_p)
    found = sample_tokens(logits, draw.temperature, draw.seeds, draw.positions, cut)
    assert found.tolist() == draw_tokens(logits, draw).tolist()


def test_of_equals_the_first_is_taken_and_nothing_can_be_nan() -> None:
    logits = torch.full((3, 9000), float("-inf"), device=DEVICE)
    logits[0, [70, 5000, 8000]] = 3.0
    logits[1, 8999] = -1e30
    sampled = sample_tokens(logits, torch.zeros(3, device=DEVICE), *torch.zeros(2, 3, dtype=torch.int64, device=DEVICE))
    assert sampled.tolist() == [70, 8999, 0]


def test_slots_are_read_and_moved_on_and_the_dummy_stays() -> None:
    limits = Limits(
        num_blocks=20, block_size=4, max_num_seqs=5, max_model_len=16, max_num_batched_tokens=64, vocab_size=9
    )
    state = DeviceSlots(HostSlots(limits), DEVICE)
    prompts = {1: [3, 4, 5], 4: [6, 7]}
    state.admit(
        [
            Admission(
                slot=slot,
                token_ids=np.array(tokens, np.uint32),
                num_prompt_tokens=len(tokens),
                num_computed_tokens=len(tokens) - 1,
                block_ids=np.array([slot], np.uint32),
                sampling=Sampling(temperature=slot / 2),
                seed=2**64 - slot,
            )
            for slot, tokens in prompts.items()
        ]
    )
    state.enter()
    slots = torch.tensor([4, 1, state.dummy_slot, state.dummy_slot], device=DEVICE)
    table = randn(9, 1030)
    inputs = decode_inputs(slots, state, table)
    assert inputs.hidden is not None
    assert inputs.hidden.equal(torch.cat((table[[7, 5]], torch.zeros_like(table[:2]))))
    assert decode_inputs(slots, state).hidden is None
    # Two tokens of the dummy, one of slot 4, two of slot 1, and nothing of a fourth.
    contexts, ends = torch.tensor([[2, 2, 3, 0], [2, 3, 5, 5]], device=DEVICE)
    known = chunk_inputs(5, slots[[2, 0, 1, 2]], contexts, ends, state, limits.block_size, table)
    assert known.token_ids.tolist() == [0, 0, 7, 4, 5]
    assert known.positions.tolist() == [0, 1, 1, 1, 2]
    assert known.slot_mappings[0].tolist() == [80, 81, 17, 5, 6]
    assert known.hidden is not None
    assert known.hidden.equal(torch.cat((torch.zeros_like(table[:2]), table[[7, 4, 5]])))
    assert chunk_inputs(5, slots[[2, 0, 1, 2]], contexts, ends, state, limits.block_size).hidden is None
    assert inputs.token_ids.tolist() == [7, 5, 0, 0]
    assert inputs.contexts.tolist() == [2, 3, 1, 1]
    assert inputs.temperatures.tolist() == [2.0, 0.5, 0.0, 0.0]
    assert inputs.seeds.tolist() == [-4, -1, 0, 0]
    logits = torch.nn.functional.one_hot(torch.tensor([8, 2, 5, 6], device=DEVICE), 9).to(DTYPE) * 1e4
    sampled = sample_tokens(logits, inputs.temperatures, inputs.seeds, inputs.contexts, advance=(slots, state))
    assert sampled.tolist() == [8, 2, 5, 6]
    assert state.num_computed.tolist() == [0, 3, 0, 0, 2, 0]
    assert state.tokens[1, :5].tolist() == [3, 4, 5, 2, 0]
    assert state.tokens[4, :4].tolist() == [6, 7, 8, 0]
    assert state.tokens[state.dummy_slot].tolist() == [0] * 17
