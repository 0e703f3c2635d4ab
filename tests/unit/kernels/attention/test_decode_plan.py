"""The plan of decode attention against shares counted tile by tile."""

import pytest
import torch
import triton
from kernel_inputs import DEVICE

from worker_svc.core.kernels.attention.decode_plan import PLAN_COLUMNS, plan_shares
from worker_svc.core.kernels.launch import options

CONTEXTS = [1, 70, 16, 17, 1, 1, 300, 32, 1]
SLOTS = [4, 9, 0, 7, 2, 11, 5, 1, 8]
ROWS = [12, 3, 8, 5, 13, 4, 10, 7, 6]


@pytest.mark.parametrize("programs", [1, 3, 40])
@pytest.mark.parametrize("cost", [0, 1, 4])
@pytest.mark.parametrize(("tokens", "block_size"), [(16, 16), (16, 64), (32, 16)])
def test_a_share_begins_in_the_context_slot_row_and_block_of_its_first_tile(
    programs: int, cost: int, tokens: int, block_size: int
) -> None:
    # Tables of more slots and blocks than are needed, in which no block is like another.
    order = torch.randperm(12 * 24, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    tables = order.view(12, 24)[:, :20].to(DEVICE)
    columns = [torch.tensor(each, device=DEVICE) for each in (ROWS, SLOTS, CONTEXTS)]
    plan = torch.full((programs, PLAN_COLUMNS), -1, dtype=torch.int32, device=DEVICE)
    plan_shares[(programs,)](
        *columns,
        tables,
        plan,
        len(CONTEXTS),
        tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK_T=tokens,
        COST=cost,
        SEQUENCES=triton.next_power_of_2(len(CONTEXTS)),
        **options(),
    )
    line: list[tuple[int, int] | None] = []
    for sequence, context in enumerate(CONTEXTS):
        line += [None] * cost
        line += [(sequence, start) for start in range(0, context, tokens)]
    shares = min(programs, len(line))
    for share, (first, begin, count, *_, end, slot, row, block) in enumerate(plan.tolist()):
        cells = line[len(line) * share // shares : len(line) * (share + 1) // shares]
        tiles = [cell for cell in cells if cell is not None]
        assert count == len(tiles)
        if tiles:
            sequence, start = tiles[0]
            assert (first, begin) == (sequence, start)
            assert (end, slot, row) == (CONTEXTS[sequence], SLOTS[sequence], ROWS[sequence])
            assert block == tables[slot, start // block_size]
