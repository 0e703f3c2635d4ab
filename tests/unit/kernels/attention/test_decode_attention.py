"""Decode attention against double precision: splits, groups of heads, block sizes, ragged and padded batches."""

from typing import Any

import pytest
import torch
from decode_checks import EPS, check_decode
from hopper import compile_for_hopper
from kernel_inputs import rotary_table

from worker_svc.core.kernels.attention import decode as module
from worker_svc.core.kernels.attention.decode import DecodeAttention, DecodeRows
from worker_svc.core.kernels.attention.tuning import ContextCut, Shares, find_cut, find_shares


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (6, 2), (8, 1), (16, 2)])
def test_groups_of_query_heads(num_heads: int, num_kv_heads: int) -> None:
    check_decode([0, 37], num_heads=num_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("count", [1, 2, 3, 17])
@pytest.mark.parametrize("as_many", [16, 64, 96])
def test_kernels_for_more_sequences_attend_as_well(count: int, as_many: int) -> None:
    past = [0, 37, 300, 15, 16, *range(40, 160, 10)][:count]
    check_decode(past, as_many=as_many if as_many > count else count, num_heads=8, num_kv_heads=4, hidden_size=None)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    check_decode([block_size - 1, block_size, block_size + 1], block_size=block_size)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("has_norms", [True, False])
def test_head_dims_with_and_without_norms(head_dim: int, *, has_norms: bool) -> None:
    check_decode([70, 3], head_dim=head_dim, has_norms=has_norms)


@pytest.mark.parametrize("window", [1, 2, 16, 20, 71, 500])
def test_a_window_ends_with_the_new_token(window: int) -> None:
    check_decode([0, 1, 19, 20, 70, 71], window=window)


@pytest.mark.parametrize("chunk", [1, 2, 16, 20, 71, 500])
def test_a_chunk_is_that_of_the_new_token(chunk: int) -> None:
    check_decode([0, 1, 15, 16, 19, 20, 21, 70, 71], chunk=chunk)


def test_queries_grow_with_their_position() -> None:
    check_decode([0, 6, 7, 8, 70], temperature=(8, 0.5, 1))
    check_decode([40, 5], temperature=(3, 1.0, 0), softcap=2.0, has_norms=False, hidden_size=96)
    check_decode([3 * each for each in range(40)], num_heads=2, num_kv_heads=1, temperature=(16, 0.3, 1))


def test_scores_are_capped_and_seen_within_a_window() -> None:
    check_decode([0, 3, 70], softcap=0.7)
    check_decode([40, 5], softcap=2.0, window=9, has_norms=False, hidden_size=96)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_take_part_in_the_softmax_once(monkeypatch: pytest.MonkeyPatch, splits: int, ahead: int) -> None:
    monkeypatch.setattr(module, "find_cut", lambda *_: ContextCut(splits, 20, 16, 3, 2, None, ahead=ahead))
    check_decode([0, 1, 16, 70], has_sinks=True, num_heads=6)
    check_decode([40, 5], has_sinks=True, window=9, softcap=2.0, has_norms=False, hidden_size=96)


def test_many_sequences_with_sinks() -> None:
    check_decode([3 * each for each in range(40)], num_heads=2, num_kv_heads=1, has_sinks=True)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("window", [5, 30])
def test_a_window_is_cut_into_splits(monkeypatch: pytest.MonkeyPatch, window: int, ahead: int) -> None:
    monkeypatch.setattr(module, "find_cut", lambda *_: ContextCut(3, 8, 16, 3, 2, None, ahead=ahead))
    check_decode([0, 4, 5, 29, 30, 90], window=window, softcap=1.0)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("chunk", [5, 30])
def test_a_chunk_is_cut_into_splits(monkeypatch: pytest.MonkeyPatch, chunk: int, ahead: int) -> None:
    monkeypatch.setattr(module, "find_cut", lambda *_: ContextCut(3, 8, 16, 3, 2, None, ahead=ahead))
    check_decode([0, 4, 5, 29, 30, 59, 90], chunk=chunk)


def test_many_sequences_with_a_window_or_chunks() -> None:
    check_decode([3 * each for each in range(40)], num_heads=2, num_kv_heads=1, window=21)
    check_decode([3 * each for each in range(40)], num_heads=2, num_kv_heads=1, chunk=21)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("splits", [1, 3])
def test_whether_tiles_are_on_their_way_before_the_queries(
    monkeypatch: pytest.MonkeyPatch, splits: int, ahead: int
) -> None:
    chosen = ContextCut(splits, 20, 16, 3, 2, None, ahead=ahead)
    monkeypatch.setattr(module, "find_cut", lambda *_: chosen)
    check_decode([0, 1, 15, 16, 17, 70])
    check_decode([33], hidden_size=96)


@pytest.mark.parametrize("head_dim", [80, 96, 120, 192])
@pytest.mark.parametrize(
    "shape", [ContextCut(3, 20, 16, 3, 2, None, ahead=0), ContextCut(3, 20, 16, 3, 2, None, ahead=2), None]
)
def test_heads_whose_dimensions_are_no_power_of_two(
    monkeypatch: pytest.MonkeyPatch, shape: ContextCut | None, head_dim: int
) -> None:
    """By cuts, and (None) by shares."""
    shares = Shares(3, 16, 3, 2, 1) if shape is None else None
    monkeypatch.setattr(module, "find_shares", lambda *_: shares)
    monkeypatch.setattr(module, "find_cut", lambda *_: shape or ContextCut(1, 512, 16, 3, 2, None, ahead=0))
    check_decode([70, 0, 17], num_heads=6, num_kv_heads=2, head_dim=head_dim)
    check_decode([33], num_heads=3, num_kv_heads=1, head_dim=head_dim, has_norms=False, hidden_size=96)


def launch_decode(head_dim: int, count: int, num_heads: int = 4, num_kv_heads: int = 1, **kind: Any) -> None:
    qkv, out = torch.zeros(2, 64, (num_heads + 2 * num_kv_heads) * head_dim, dtype=torch.bfloat16)
    cache, table = qkv.new_zeros(9, 16, num_kv_heads, head_dim), torch.zeros(4096, head_dim)
    column, tables = torch.zeros(count, dtype=torch.int64), torch.zeros(9, 9, dtype=torch.int32)
    scale = head_dim**-0.5
    decode = DecodeAttention(count, num_heads, num_kv_heads, head_dim, table, scale=scale, block_size=16, **kind)
    rows = DecodeRows(column, column, column)
    decode.attend(qkv, None, EPS, rows, tables, cache, cache, out, is_finished=decode.takes_finished(count))


@pytest.mark.parametrize(("kernel", "head_dim", "count"), [("attend_splits", 184, 3), ("attend_shares", 120, 40)])
def test_tiles_that_are_padded_fit_a_hopper_and_are_read_ahead(
    monkeypatch: pytest.MonkeyPatch, kernel: str, head_dim: int, count: int
) -> None:
    kernel = f"worker_svc.core.kernels.attention.decode.{kernel}"
    compile_for_hopper(monkeypatch, kernel, "cp.async.cg", launch_decode, head_dim, count)


def launch_chunked_decode() -> None:
    for count in (1, 16, 200):  # by few splits that begin early, by more, by none
        launch_decode(128, count, chunk=8192)
        launch_decode(128, count, temperature=(8192, 0.1, 1))


def test_chunks_and_growing_queries_compile_for_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = "worker_svc.core.kernels.attention.decode.attend_splits"
    compile_for_hopper(monkeypatch, kernel, "cp.async.cg", launch_chunked_decode)


def test_contexts_are_cut_by_what_tiles_of_a_head_take(monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = set()
    monkeypatch.setattr(module, "find_shares", lambda *given: row_bytes.add(given[2]))
    monkeypatch.setattr(module, "find_cut", lambda *given: row_bytes.add(given[3]) or find_cut(*given))
    DecodeAttention(40, 4, 4, 80, rotary_table(1, 80), scale=80**-0.5, block_size=16)
    assert row_bytes == {256}


@pytest.mark.parametrize("hidden_size", [96, 1024, 1500])
def test_rows_that_are_scaled_by_their_hidden_states(hidden_size: int) -> None:
    check_decode([70, 3, 0], hidden_size=hidden_size)
    check_decode([70, 3, 0], hidden_size=hidden_size, has_norms=False)


def test_ragged_batches_at_the_edges_of_splits_and_tiles() -> None:
    check_decode([0, 1, 127, 128, 129, 255, 256, 257, 600], num_heads=2, num_kv_heads=1)


def test_one_long_context_is_split_over_many_programs() -> None:
    check_decode([2500], num_heads=2, num_kv_heads=1)


@pytest.mark.parametrize("past", [0, 1, 16, 17, 63, 64, 65, 128, 150, 1200])
def test_one_context_of_groups_of_four_is_split_into_short_parts(past: int) -> None:
    check_decode([past], num_heads=8, num_kv_heads=2, head_dim=128)


@pytest.mark.parametrize("past", [1, 64, 128, 129, 257, 1200])
def test_one_context_of_groups_of_eight_is_split_into_longer_parts(past: int) -> None:
    check_decode([past], num_heads=16, num_kv_heads=2, head_dim=128)


@pytest.mark.parametrize(
    ("splits", "warps", "queries", "dims", "parts"),
    [
        (33, 8, 8, 128, 4),
        (16, 8, 4, 128, 8),
        (16, 8, 1, 64, 8),
        (3, 2, 1, 128, 4),
        (2, 2, 1, 128, 2),
        (33, 1, 4, 128, 4),
        (33, 2, 8, 256, 2),
        (88, 1, 16, 256, 2),
        (1, 4, 4, 128, 2),
    ],
)
def test_parts_are_added_up_as_many_at_a_time_as_there_are_and_as_registers_hold(
    splits: int, warps: int, queries: int, dims: int, parts: int
) -> None:
    cut = ContextCut(splits, 128, 64, 3, warps, None, ahead=2)
    assert module._parts_at_once(cut, queries, dims) == parts


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(17, 1), (34, 2), (48, 2), (33, 1), (64, 1)])
def test_more_queries_of_a_key_than_a_matrix_product_has_rows(num_heads: int, num_kv_heads: int) -> None:
    check_decode([150], num_heads=num_heads, num_kv_heads=num_kv_heads)
    check_decode([70, 0, 17], num_heads=num_heads, num_kv_heads=num_kv_heads, hidden_size=96, has_sinks=True)
    check_decode([600, *[index % 5 for index in range(40)]], num_heads=num_heads, num_kv_heads=num_kv_heads, rounds=1)


def launch_many_queries() -> None:
    for count in (1, 4, 16, 64, 128, 256):
        launch_decode(128, count, num_heads=34, num_kv_heads=2)
        launch_decode(256, count, num_heads=64, num_kv_heads=1)


def test_many_queries_of_a_key_compile_for_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = "worker_svc.core.kernels.attention.decode.attend_splits"
    compile_for_hopper(monkeypatch, kernel, "cp.async.cg", launch_many_queries)


def test_where_nothing_is_streamed_more_queries_of_a_key_than_a_matrix_product_has_rows_are_cut_into_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "multiprocessors", lambda *_: 132)
    for num_heads, takes in ((32, True), (34, False)):
        decode = DecodeAttention(40, num_heads, 2, 64, rotary_table(1, 64), scale=0.125, block_size=16)
        assert decode.takes_finished(40) is takes


def test_whole_tiles_need_fewer_splits_than_there_are() -> None:
    check_decode([1900, 1665, *[3] * 7], num_heads=2, num_kv_heads=2, rounds=1)


def test_so_many_sequences_that_nothing_is_split() -> None:
    check_decode([200, *[index % 5 for index in range(140)]], num_heads=2, num_kv_heads=2, rounds=1)


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("cost", [0, 1, 3])
def test_shares_of_all_contexts(monkeypatch: pytest.MonkeyPatch, programs: int, cost: int) -> None:
    monkeypatch.setattr(module, "find_shares", lambda *_: Shares(programs, 16, 3, 2, cost))
    check_decode([0, 1, 15, 16, 17, 70])
    check_decode([70, 0, 0, 1])
    check_decode([33], hidden_size=96)
    check_decode([130, 97, 64, 0, 1], num_heads=8, num_kv_heads=1)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("tokens", [16, 32])
def test_shares_with_more_or_larger_tiles_on_their_way(
    monkeypatch: pytest.MonkeyPatch, tokens: int, stages: int
) -> None:
    monkeypatch.setattr(module, "find_shares", lambda *_: Shares(3, tokens, stages, 2, 1))
    check_decode([127, 128, 3, 129, 31, 32])
    check_decode([127, 128, 3, 129, 31, 32], block_size=64, num_heads=12)


def test_many_contexts_are_cut_into_shares_where_a_tile_of_all_heads_is_small_enough() -> None:
    assert find_shares(64, 8, 256, 132) == Shares(132, 16, 3, 8, 4)
    assert find_shares(64, 4, 256, 132) == Shares(264, 16, 3, 4, 4)
    assert find_shares(32, 8, 256, 132) is None, "few contexts"
    assert find_shares(64, 6, 256, 132) is None, "heads that are no power of two"
    assert find_shares(64, 16, 256, 132) is None, "many heads"
    assert find_shares(64, 4, 512, 132) is None, "large heads"
    assert find_shares(64, 8, 256, 0) is None, "little shared memory"
