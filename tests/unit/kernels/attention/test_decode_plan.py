"""The plan of decode attention against shares counted tile by tile."""

from itertools import pairwise

import pytest
import torch
import triton
from hopper import compile_for_hopper
from kernel_inputs import DEVICE
from torch import Tensor

from worker_svc.core.kernels.attention.decode import DecodeAttention, DecodeRows
from worker_svc.core.kernels.attention.decode_plan import PLAN_COLUMNS, plan_shares
from worker_svc.core.kernels.launch import options

CONTEXTS = [1, 70, 16, 17, 1, 1, 300, 32, 1]
SLOTS = [4, 9, 0, 7, 2, 11, 5, 1, 8]
ROWS = [12, 3, 8, 5, 13, 4, 10, 7, 6]


def plan_of(programs: int, contexts: list[int], tables: Tensor, block_size: int, **cut: int) -> list[list[int]]:
    columns = [torch.tensor(each[: len(contexts)], device=DEVICE) for each in (ROWS, SLOTS, contexts)]
    plan = torch.full((programs, PLAN_COLUMNS), -1, dtype=torch.int32, device=DEVICE)
    plan_shares[(programs,)](
        *columns,
        tables,
        plan,
        len(contexts),
        tables.stride(0),
        BLOCK_SIZE=block_size,
        SEQUENCES=triton.next_power_of_2(len(contexts)),
        **cut,
        **options(),
    )
    return plan.tolist()


@pytest.fixture(scope="module")
def tables() -> Tensor:
    """Tables of more slots and blocks than are needed, in which no block is like another."""
    order = torch.randperm(12 * 24, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    return order.view(12, 24)[:, :20].to(DEVICE)


@pytest.mark.parametrize("programs", [1, 3, 40])
@pytest.mark.parametrize("cost", [0, 1, 4])
@pytest.mark.parametrize(("tokens", "block_size"), [(16, 16), (16, 64), (32, 16)])
def test_a_share_begins_in_the_context_slot_row_and_block_of_its_first_tile(
    tables: Tensor, programs: int, cost: int, tokens: int, block_size: int
) -> None:
    plan = plan_of(programs, CONTEXTS, tables, block_size, BLOCK_T=tokens, COST=cost, ADDED=-1000)
    line: list[tuple[int, int] | None] = []
    for sequence, context in enumerate(CONTEXTS):
        line += [None] * cost
        line += [(sequence, start) for start in range(0, context, tokens)]
    shares = min(programs, len(line))
    for share, (first, begin, count, *_, end, slot, row, block) in enumerate(plan):
        cells = line[len(line) * share // shares : len(line) * (share + 1) // shares]
        tiles = [cell for cell in cells if cell is not None]
        assert count == len(tiles)
        if tiles:
            sequence, start = tiles[0]
            assert (first, begin) == (sequence, start)
            assert (end, slot, row) == (CONTEXTS[sequence], SLOTS[sequence], ROWS[sequence])
            assert block == tables[slot, start // block_size]


@pytest.mark.parametrize("programs", [1, 3, 8, 40])
@pytest.mark.parametrize("tokens", [16, 32])
def test_where_no_context_is_cut_shares_have_as_many(tables: Tensor, programs: int, tokens: int) -> None:
    plan = plan_of(programs, CONTEXTS, tables, 16, BLOCK_T=tokens, COST=1, ADDED=1000)
    tiles = [-(-context // tokens) for context in CONTEXTS]
    shares = min(programs, sum(tiles) + len(tiles))
    found = []
    for share, (first, start, count, _, first_share, last_share, _, others, end, slot, row, block) in enumerate(plan):
        own = range(len(CONTEXTS) * share // shares, len(CONTEXTS) * (share + 1) // shares) if share < shares else ()
        found += own
        assert count == sum(tiles[each] for each in own)
        assert (start, others) == (0, 0)
        assert first_share == last_share, "nothing is a part"
        if own:
            assert first == own[0]
            assert (end, slot, row) == (CONTEXTS[first], SLOTS[first], ROWS[first])
            assert block == tables[slot, 0]
    assert found == list(range(len(CONTEXTS)))


@pytest.mark.parametrize(
    ("contexts", "programs", "are_cut"),
    [
        ([100] * 8, 9, False),  # 8 tiles and cost each: 8 to a program instead of 7.1
        ([100] * 8, 5, False),  # 16 instead of 12.8
        ([100] * 8, 6, True),  # 16 instead of 10.7
        ([100] * 8, 24, True),
        ([100] * 7 + [230], 9, True),  # 16 instead of 8
        ([100] * 7 + [130], 9, False),  # 10 instead of 7.3
        ([1] * 9, 1, False),
    ],
)
def test_contexts_are_cut_where_a_share_would_have_more_by_more_than_parts_take(
    tables: Tensor, contexts: list[int], programs: int, are_cut: bool
) -> None:
    plan = plan_of(programs, contexts, tables, 16, BLOCK_T=16, COST=1, ADDED=4)
    assert sum(count for _, _, count, *_ in plan) == sum(-(-context // 16) for context in contexts)
    assert any(start > 0 for _, start, count, *_ in plan if count) is are_cut


def test_long_contexts_of_many_programs_are_cut_into_equal_shares(tables: Tensor) -> None:
    """Of which products have more than 32 bits."""
    programs, context = 3000, 1 << 27
    plan = plan_of(programs, [context] * 9, tables, 1 << 30, BLOCK_T=16, COST=0, ADDED=2)
    total = 9 * context // 16
    begins = [total * share // programs for share in range(programs + 1)]
    assert [count for _, _, count, *_ in plan] == [end - begin for begin, end in pairwise(begins)]
    assert [(first, start) for first, start, *_ in plan] == [divmod(begin * 16, context) for begin in begins[:-1]]


def launch_plan() -> None:
    column, tables = torch.zeros(200, dtype=torch.int64), torch.zeros(9, 9, dtype=torch.int32)
    decode = DecodeAttention(200, 4, 1, 128, torch.zeros(64, 128), scale=0.1, block_size=16)
    decode.plan(DecodeRows(column, column, column), tables)


def test_the_plan_compiles_for_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler wants one type of a number, whichever way it came to be."""
    compile_for_hopper(monkeypatch, "worker_svc.core.kernels.attention.decode.plan_shares", "shfl", launch_plan)
