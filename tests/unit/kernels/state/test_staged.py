"""A step reads what was written for it and for no other, and writes what enters the slots' tables."""

import numpy as np
import torch
from kernel_inputs import DEVICE

from contract.domain.params import Sampling
from contract.domain.plan import Admission
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.state.staged import conclude, enter, receive
from worker_svc.core.slots import HostSlots
from worker_svc.core.staging import Staging

LIMITS = Limits(
    num_blocks=40, block_size=4, max_num_seqs=5, max_model_len=1200, max_num_batched_tokens=64, vocab_size=100
)
NUM_COLUMNS = 600


def admission(slot: int, num_tokens: int) -> Admission:
    tokens, blocks = np.arange(num_tokens) % 90 + slot, np.arange(-(-num_tokens // 4)) % 30 + slot
    return Admission(
        slot, tokens.astype(np.uint32), num_tokens, slot, blocks.astype(np.uint32), Sampling(temperature=slot / 4), 2
    )


def test_each_step_reads_its_own_words_and_what_enters_with_it() -> None:
    host = HostSlots(LIMITS)
    state, expected = DeviceSlots(host, DEVICE), DeviceSlots(host, DEVICE)
    num_runs, num_cells = 2 * state.num_tables, 3000
    packed = torch.zeros(NUM_COLUMNS + num_runs * 3 + num_cells // 2, dtype=torch.int64, device=DEVICE)
    columns, runs, cells = packed.split([NUM_COLUMNS, num_runs * 3, num_cells // 2])
    staging = Staging(DEVICE, len(packed) + 10)
    rng = np.random.default_rng(0)
    entering = [[admission(0, 1100), admission(3, 7)], [], [admission(3, 1), admission(1, 513)], *[[]] * 8]
    for step, admissions in enumerate(entering):
        for each in (state, expected):
            each.admit(admissions)
        words = staging.next()
        words[:NUM_COLUMNS] = numbers = rng.integers(-(2**62), 2**62, NUM_COLUMNS)
        of_runs, of_cells, _ = np.split(words[NUM_COLUMNS:], [len(runs), len(runs) + len(cells)])
        state.take_entering().write(of_runs.reshape(-1, 3), of_cells.view(np.int32))
        receive(staging.words, staging.turn, packed)
        enter(runs.view(-1, 3), cells.view(torch.int32), state)
        staging.launched()
        expected.enter()
        assert columns.tolist() == numbers.tolist()
        assert state.cells.equal(expected.cells)
        slots = torch.tensor([2, state.dummy_slot], device=DEVICE)
        conclude(staging.turn, staging.num_done, slots, slots + step, state)
        assert state.num_computed[[2, state.dummy_slot]].tolist() == [2 + step, 0]
        assert int(staging.num_done) == step + 1
        expected.num_computed[2] = 2 + step
