"""What sequences bring into their slots: each thing at its place, and nothing of anybody else's is touched."""

import numpy as np
import torch

from contract.domain.params import Sampling
from contract.domain.plan import Admission
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.state.tables import SEED, TOP_K
from worker_svc.core.sampler import Extras
from worker_svc.core.slot_sampling import SlotSampling
from worker_svc.core.slots import BlockUpdates, HostSlots

LIMITS = Limits(
    num_blocks=40, block_size=4, max_num_seqs=5, max_model_len=30, max_num_batched_tokens=64, vocab_size=100
)


def admission(slot: int, num_tokens: int, num_blocks: int, seed: int, **sampling: float) -> Admission:
    tokens, blocks = np.arange(num_tokens) + 10 * slot, np.arange(num_blocks) + 8 * slot
    params = Sampling(**sampling)  # type: ignore[arg-type]
    return Admission(slot, tokens.astype(np.uint32), num_tokens, slot, blocks.astype(np.uint32), params, seed)


def test_sequences_that_enter_together_are_each_in_their_own_slot() -> None:
    state = DeviceSlots(HostSlots(LIMITS), torch.device("cpu"))
    state.admit([admission(3, 7, 2, 2**64 - 5, temperature=0.5, min_p=0.25), admission(1, 30, 8, 9, top_k=17)])
    state.admit([admission(4, 1, 1, 11)])
    state.enter()
    assert state.tokens[3].tolist() == [*range(30, 37), *[0] * 24]
    assert state.tokens[1].tolist() == [*range(10, 40), 0]
    assert state.tokens[4].tolist() == [40, *[0] * 30]
    assert state.block_tables[0][3].tolist() == [24, 25, *[0] * 6]
    assert state.block_tables[0][1].tolist() == [*range(8, 16)]
    assert state.num_computed.tolist() == [0, 1, 0, 3, 4, 0]
    assert state.integers[:, SEED].tolist() == [0, 9, 0, -5, 11, 0]
    assert state.integers[1].tolist() == [17, 9, 30]
    assert state.floats[3].tolist() == [0.5, 1.0, 0.25, 1.0, 0.0, 0.0]
    for empty in (0, 2):
        tables = (state.tokens, state.block_tables[0], state.integers, state.floats)
        assert not any(bool(table[empty].any()) for table in tables)
    assert state.block_tables[0][state.dummy_slot].tolist() == [LIMITS.num_blocks] * 8


def test_who_comes_next_into_a_slot_writes_over_who_was_there() -> None:
    state = DeviceSlots(HostSlots(LIMITS), torch.device("cpu"))
    state.admit([admission(2, 5, 2, 1)])
    state.admit([admission(2, 9, 3, 7, temperature=0.0)])
    state.enter()
    assert state.tokens[2, :9].tolist() == list(range(20, 29))
    assert state.block_tables[0][2, :3].tolist() == [16, 17, 18]
    assert state.integers[2].tolist() == [0, 7, 9]
    assert float(state.floats[2, 0]) == 0.0


def test_of_tokens_that_the_vocabulary_does_not_have_nothing_is_asked() -> None:
    asked = SlotSampling(max_num_seqs=2, vocab_size=100)
    biases, stops = ((3, 1.0), (100, 2.0), (4_000_000_000, 3.0)), (100, 7, 2**31)
    tokens = np.array([1], np.uint32)
    sampling = Sampling(logit_bias=biases, top_k=400, num_logprobs=20)
    asked.remember(Admission(0, tokens, 1, 0, tokens, sampling, 0, 5, stops))
    extras = asked.extras(np.array([0]), np.array([1]), torch.device("cpu"))
    assert extras is not None
    assert extras.changes is not None
    assert extras.changes.entries is not None
    assert extras.changes.entries.token_ids.tolist() == [3, 7]
    assert extras.changes.entries.values.tolist() == [1.0, -np.inf]
    assert asked.integers[0, TOP_K] == 100
    few = SlotSampling(max_num_seqs=1, vocab_size=6)
    few.remember(Admission(0, tokens, 1, 0, tokens, sampling, 0))
    assert few.num_logprobs(np.array([0])).tolist() == [6]


def test_who_comes_next_into_a_slot_asks_for_nothing_of_who_was_there() -> None:
    asked, tokens = SlotSampling(max_num_seqs=2, vocab_size=100), np.array([1], np.uint32)
    everything = Sampling(logit_bias=((3, 1.0),), presence_penalty=1.0, top_p=0.5, num_logprobs=3)
    asked.remember(Admission(0, tokens, 1, 0, tokens, everything, 0, 5, (7,)))
    asked.remember(Admission(1, tokens, 1, 0, tokens, Sampling(top_k=3), 0))
    asked.remember(Admission(0, tokens, 1, 0, tokens, Sampling(), 0))
    extras = asked.extras(np.array([0, 1]), np.array([1, 1]), torch.device("cpu"))
    assert extras == Extras(has_cuts=True)
    assert asked.extras(np.array([0]), np.array([1]), torch.device("cpu")) is None


def test_what_somebody_took_is_left_to_them() -> None:
    state = DeviceSlots(HostSlots(LIMITS), torch.device("cpu"))
    state.admit([admission(2, 5, 2, 1), admission(0, 2, 1, 1)])
    assert not bool(state.tokens.any())
    taken = state.take_entering()
    state.enter()
    assert not bool(state.tokens.any())
    runs, values = np.full((12, 3), -1, np.int64), np.zeros(taken.num_cells, np.int32)
    taken.write(runs, values)
    assert runs[10:, 2].tolist() == [0, 0]
    assert runs[:10, 2].tolist() == [5, 2, 2, 6, 6, 2, 1, 2, 6, 6]
    for start, begin, length in runs[:10].tolist():
        state.cells[start : start + length] = torch.from_numpy(values[begin : begin + length])
    assert state.tokens[2, :5].tolist() == list(range(20, 25))
    assert state.tokens[0, :2].tolist() == [0, 1]
    assert state.num_computed.tolist() == [0, 0, 2, 0, 0, 0]


def test_an_appended_block_does_not_wait_for_what_enters() -> None:
    state = DeviceSlots(HostSlots(LIMITS), torch.device("cpu"))
    state.admit([admission(2, 5, 2, 1)])
    state.write_blocks(BlockUpdates(*(np.array([value]) for value in (2, 2, 39))))
    assert state.block_tables[0][2, :4].tolist() == [0, 0, 39, 0]
    state.enter()
    assert state.block_tables[0][2, :4].tolist() == [16, 17, 39, 0]
