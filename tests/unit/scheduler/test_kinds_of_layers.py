"""Blocks by kinds of layers: those of windows are given up, found again where enough of them is left, and not wanted
for a whole context."""

import numpy as np
import pytest
from scheduling import Scheduling, make_request

from contract.domain.kv_kinds import KVKind, Reach, blocks_of_sequence, longest_sequence
from scheduler_svc.core.blocks import BlockManager, extend_hashes
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.tables import TableRules, held_blocks

FULL, WINDOW = KVKind(6), KVKind(2, Reach(5))


def limits(num_blocks: int = 60, *kinds: KVKind, max_num_seqs: int = 4, budget: int = 8) -> WorkerLimits:
    return WorkerLimits(num_blocks, 2, max_num_seqs, 120, budget, kinds or (FULL, WINDOW))


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 15, 16, 17])
def test_a_window_has_blocks_of_all_that_a_token_to_come_sees_and_no_block_that_none_does(
    size: int, window: int
) -> None:
    kind = KVKind(size, Reach(window))
    for position in range(70):
        first = kind.first_seen(position)
        oldest = max(0, position - window + 1)
        assert first * size <= oldest < (first + 1) * size
        if first:
            assert kind.unseen_from(first - 1) <= position


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("chunk", [1, 2, 3, 6, 16, 17])
def test_of_a_chunk_there_are_the_blocks_from_its_first_token_on_until_the_next_begins(size: int, chunk: int) -> None:
    kind = KVKind(size, Reach(chunk=chunk))
    held = []
    for position in range(100):
        first, begins = kind.first_seen(position), position // chunk * chunk
        assert first * size <= begins < (first + 1) * size
        if first:
            assert kind.unseen_from(first - 1) <= position
        after = kind.unseen_from(position // size)
        assert kind.first_seen(after) > position // size >= kind.first_seen(after - 1)
        held.append(position // size + 1 - first)
    assert max(held) <= kind.most_blocks(100, 1) <= max(held) + 1


@pytest.mark.parametrize("step", [1, 2, 7])
@pytest.mark.parametrize(
    "kind", [KVKind(1, Reach(1)), KVKind(2, Reach(5)), KVKind(4, Reach(4)), KVKind(4, Reach(5)), KVKind(3, Reach(2))]
)
def test_the_most_blocks_are_those_of_the_worst_place_of_a_step_and_no_more(kind: KVKind, step: int) -> None:
    held = [(p + step - 1) // kind.block_size + 1 - kind.first_seen(p) for p in range(100)]
    assert kind.most_blocks(200, step) == max(held)
    assert kind.most_blocks(3, step) == min(max(held), kind.num_blocks(3))


def test_the_longest_sequence_is_the_last_that_fits() -> None:
    for num_blocks in range(30):
        longest = longest_sequence((FULL, WINDOW), num_blocks, 8, 100)
        assert blocks_of_sequence((FULL, WINDOW), longest, 8) <= num_blocks
        assert longest == 100 or blocks_of_sequence((FULL, WINDOW), longest + 1, 8) > num_blocks
    assert longest_sequence((KVKind(4),), 7, 8, 100) == 28
    assert longest_sequence((WINDOW,), 10, 8, 100) == 100


def hashes(num_tokens: int) -> list[bytes]:
    made: list[bytes] = []
    extend_hashes(made, b"root", np.arange(num_tokens, dtype=np.uint32), 2)
    return made


def registered(rules: TableRules, num_tokens: int) -> tuple[BlockManager, list[list[int]]]:
    """A free, known prefix: blocks by kind."""
    blocks, by_kind = BlockManager(100), []
    for index, kind in enumerate(rules.kinds):
        table = blocks.allocate(num_tokens // kind.block_size)
        for at, block in enumerate(table):
            known = hashes(num_tokens)[(at + 1) * kind.block_size // 2 - 1]
            blocks.register(block, known + bytes((index,)) if index else known)
        blocks.free(table)
        by_kind.append(table)
    return blocks, by_kind


def test_a_prefix_is_found_as_far_as_a_window_has_what_the_next_token_sees() -> None:
    rules = TableRules((FULL, WINDOW), 8)
    blocks, (full, window) = registered(rules, 36)
    found = rules.find(blocks, hashes(36), 2)
    assert (found.num_tokens, held_blocks(found.tables)) == (36, [*full, *window[16:]])
    blocks._forget(window[16])  # tokens 32 and 33
    found = rules.find(blocks, hashes(36), 2)
    assert (found.num_tokens, found.tables[1].first, found.tables[1].blocks) == (30, 13, window[13:15])
    for block in window[:13]:  # nobody sees them
        blocks._forget(block)
    assert rules.find(blocks, hashes(36), 2).num_tokens == 30
    blocks._forget(window[14])
    assert rules.find(blocks, hashes(36), 2).num_tokens == 0
    blocks, (full, window) = registered(rules, 36)
    blocks._forget(full[2])
    assert rules.find(blocks, hashes(36), 2).num_tokens == 12


def test_windows_alone_are_found_without_what_stands_before_them() -> None:
    rules = TableRules((WINDOW,), 8)
    blocks, (window,) = registered(rules, 20)
    for block in window[:7]:
        blocks._forget(block)
    found = rules.find(blocks, hashes(20), 2)
    assert (found.num_tokens, found.tables[0].first, found.tables[0].blocks) == (20, 8, window[8:])


def test_blocks_that_no_token_sees_any_more_are_free_and_a_prompt_wants_no_more_than_it_can_hold() -> None:
    scheduling = Scheduling({"a": limits(60)}, enable_prefix_caching=False)
    scheduling.add(make_request(1, list(range(1, 10)) * 10, max_tokens=12))
    scheduling.schedule()
    worker = scheduling.scheduler.workers["a"]
    full, window = worker.sequences[0].tables
    assert (len(full.blocks), window.first, len(window.blocks)) == (15, 2, WINDOW.most_blocks(90, 8) - 2)
    held = []
    while scheduling.scheduler.requests:
        scheduling.step()
        if (sequence := worker.sequences[0]) is not None:
            held.append(len(sequence.tables[1].blocks))
    assert max(held) <= WINDOW.most_blocks(90, 8) == 7
    assert held[-1] <= WINDOW.most_blocks(90, 3)  # while it decodes, two plans ahead of what is known
    scheduling.assert_nothing_is_left()


def test_more_sequences_run_where_windows_are_given_up() -> None:
    running = []
    for kinds in ((KVKind(2), KVKind(2)), (KVKind(2), KVKind(2, Reach(5)))):
        scheduling = Scheduling({"a": limits(60, *kinds)}, enable_prefix_caching=False)
        for number in range(4):
            scheduling.add(make_request(number + 1, [number] * 40, max_tokens=2))
        most = 0
        while scheduling.scheduler.requests:
            scheduling.step()
            most = max(most, scheduling.scheduler.workers["a"].num_running)
        running.append(most)
        scheduling.assert_nothing_is_left()
    assert running == [1, 2]


def test_a_prompt_is_found_again_after_its_windows_were_given_up() -> None:
    scheduling = Scheduling({"a": limits(60)})
    prompt = [1 + each % 7 for each in range(40)]
    for number, tail in ((1, [1]), (2, [2]), (3, [3] * 9)):
        scheduling.add(make_request(number, prompt + tail, max_tokens=4))
        scheduling.run()
    assert [scheduling.written[(number).to_bytes(16, "big"), 0].cached_tokens[0] for number in (1, 2, 3)] == [0, 36, 36]
    scheduling.assert_nothing_is_left()


def test_samples_share_a_prompt_as_far_as_the_first_still_has_what_they_see() -> None:
    for step in range(3):
        scheduling = Scheduling({"a": limits(60)}, enable_prefix_caching=False)
        scheduling.add(make_request(1, [1 + each % 7 for each in range(41)], n=3, max_tokens=30))
        for _ in range(step):
            scheduling.step()
        scheduling.run()
        scheduling.assert_nothing_is_left()
    assert scheduling.paged["a"].num_copies > 0


def test_a_sequence_alone_goes_to_its_end_in_the_fewest_blocks_that_hold_it() -> None:
    kinds = (FULL, WINDOW)
    num_blocks = blocks_of_sequence(kinds, 100, 8)
    scheduling = Scheduling({"a": limits(num_blocks)}, enable_prefix_caching=False)
    assert scheduling.scheduler.workers["a"].limits.capacity >= 100
    for number in (1, 2):
        scheduling.add(make_request(number, [number] * 10, max_tokens=90))
    scheduling.run()
    assert scheduling.scheduler.stats().counters.num_preemptions > 0
    scheduling.assert_nothing_is_left()


@pytest.mark.parametrize("kind", [KVKind(1), KVKind(1, Reach(2)), KVKind(1, Reach(chunk=2))])
def test_blocks_of_steps_that_gave_no_token_stay_for_those_to_come(kind: KVKind) -> None:
    scheduling = Scheduling({"a": WorkerLimits(6, 1, 1, 6, 1, (kind,))}, enable_prefix_caching=False)
    scheduling.add(make_request(1, [1], max_tokens=4))
    assert [scheduling.schedule() is not None for _ in range(2)] == [True, True]
    for _ in range(2):
        scheduling.complete(silent=(0,))
    (table,) = next(scheduling.scheduler.workers["a"].running()).tables
    assert len(table.blocks) == 2
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_prompt_that_no_worker_can_hold_of_all_kinds_is_refused_by_what_it_can_hold() -> None:
    scheduling = Scheduling({"a": limits(12)})
    capacity = longest_sequence((FULL, WINDOW), 12, 8, 120)
    scheduling.add(make_request(1, [1] * capacity, max_tokens=4))
    assert f"{capacity}" in scheduling.written[(1).to_bytes(16, "big"), 0].error.message
