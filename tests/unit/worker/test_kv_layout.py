"""Blocks of equal bytes for all kinds of layers: no two layers share a cell, whatever their kinds."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.domain.errors import PenstockError
from contract.domain.kv_kinds import SEES_ALL, KVKind, Reach
from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan
from worker_svc.core.batch import build_batch, tokens_of
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.interface import Limits
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.kv_layout import plan_layout
from worker_svc.core.slots import HostSlots


def shape(reaches: tuple[Reach, ...], block_size: int = 4) -> KVCacheShape:
    return KVCacheShape(len(reaches), 1, 2, block_size, torch.float32, reaches=reaches)


@pytest.mark.parametrize(
    ("num_full", "num_windows", "expected"),
    [
        (5, 29, (5, 6)),  # Gemma 3 4B
        (4, 22, (4, 6)),  # 1B
        (8, 40, (8, 5)),  # 12B
        (10, 52, (11, 5)),  # 27B
        (12, 12, (12, 1)),  # gpt-oss
        (8, 24, (8, 3)),  # Cohere 2, OLMo 3
        (13, 0, (13, 1)),
    ],
)
def test_a_block_wastes_little_in_the_models_that_there_are(
    num_full: int, num_windows: int, expected: tuple[int, int]
) -> None:
    layout = plan_layout([Reach()] * num_full + [Reach(512)] * num_windows, 16)
    assert (layout.num_rows, layout.num_pages) == expected
    sizes = [kind.block_size for kind in layout.kinds]
    assert sizes == [16 * expected[1], 16][: len(sizes)]
    assert layout.num_rows * layout.num_pages <= 1.1 * max(num_full, num_windows)


REACHES = [SEES_ALL, SEES_ALL, Reach(5), Reach(5), Reach(5), Reach(9), Reach(chunk=5)]


@given(reaches=st.lists(st.sampled_from(REACHES), min_size=1, max_size=14))
@settings(max_examples=60)
def test_layers_of_a_kind_have_cells_of_their_own_in_every_block(reaches: list[Reach]) -> None:
    made = shape(tuple(reaches))
    layout = made.layout
    assert [layout.kinds[place.kind].reach for place in layout.layers] == reaches
    for index, kind in enumerate(layout.kinds):  # a block is of one kind at a time
        cache, num_pages = KVCache(made, 3, torch.device("cpu")), kind.block_size // 4
        layers = [number for number, place in enumerate(layout.layers) if place.kind == index]
        for block, layer, page in product(range(3), layers, range(num_pages)):
            for cells in cache.layer(layer):
                mine = cells[block * layout.num_pages + page]
                assert not mine.any()
                mine.fill_(100 * layer + block + 1)
        for block in range(3):
            cells = cache.keys[:, block * layout.num_pages : (block + 1) * layout.num_pages]
            assert {each % 100 for each in cells.unique().tolist()} <= {0, block + 1}
        cache.copy_blocks(torch.tensor([2]), torch.tensor([0]))
        assert all((cache.layer(layer)[0][:num_pages] == 100 * layer + 3).all() for layer in layers)


LIMITS = Limits(40, 4, 3, 60, 64, 100, kinds=(KVKind(12), KVKind(4, Reach(6))))


def admission(num_tokens: int, computed: int, *tables: tuple[int, list[int]]) -> Admission:
    return Admission(
        slot=1,
        token_ids=np.arange(num_tokens, dtype=np.uint32),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=computed,
        block_ids=np.array([block for _, blocks in tables for block in blocks], np.uint32),
        sampling=Sampling(),
        seed=0,
        block_counts=np.array([len(blocks) for _, blocks in tables], np.uint32),
        first_blocks=np.array([first for first, _ in tables], np.uint32),
    )


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def test_each_kind_has_its_own_tables_of_pages() -> None:
    host = HostSlots(LIMITS)
    state = DeviceSlots(host, torch.device("cpu"))
    entering = admission(24, 20, (0, [7, 9]), (3, [3, 4, 5]))
    host.admit(entering)
    state.admit([entering])
    state.enter()
    assert state.block_tables[0][1, :7].tolist() == [21, 22, 23, 27, 28, 29, 0]
    assert state.block_tables[1][1, :7].tolist() == [0, 0, 0, 9, 12, 15, 0]
    assert all(table[state.dummy_slot].eq(3 * LIMITS.num_blocks).all() for table in state.block_tables)
    assert host.room[1] == 24
    plan = StepPlan(2, append_slots=u32(1, 1), append_blocks=u32(11, 13), append_kinds=u32(1, 0))
    for updates in host.append(plan):
        state.write_blocks(updates)
    assert state.block_tables[0][1, 6:9].tolist() == [39, 40, 41]
    assert state.block_tables[1][1, 6].tolist() == 33
    assert host.room[1] == 28
    for kind in (0, 1):
        assert state.block_tables[kind][1, 3:9].tolist() == host.block_tables[kind, 1, 3:9].tolist()
    tokens = tokens_of(build_batch(u32(1), u32(4), host), host)
    assert tokens.slot_mappings.tolist() == [[116, 117, 118, 119], [60, 61, 62, 63]]


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ([(0, [7, 9])], "the blocks of 1 kinds of layers, not of 2"),
        ([(0, [7, 9]), (4, [4, 5])], "lacks blocks that its tokens see"),
        ([(1, [9]), (3, [3, 4, 5])], "lacks blocks that its tokens see"),
        ([(0, [7, 9]), (3, [3, 4, 40])], "block 40 is not among"),
        ([(0, [7] * 7), (3, [3])], "more blocks than it can hold"),
    ],
)
def test_a_plan_whose_tables_do_not_fit_the_kinds_is_refused(tables: list[tuple[int, list[int]]], why: str) -> None:
    with pytest.raises(PenstockError, match=why):
        HostSlots(LIMITS).admit(admission(24, 20, *tables))


def test_a_block_of_a_kind_that_is_not_there_is_refused() -> None:
    host = HostSlots(LIMITS)
    host.admit(admission(24, 20, (0, [7, 9]), (3, [3, 4, 5])))
    with pytest.raises(PenstockError, match="kind 2 of 2 kinds"):
        host.append(StepPlan(2, append_slots=u32(1), append_blocks=u32(11), append_kinds=u32(2)))
