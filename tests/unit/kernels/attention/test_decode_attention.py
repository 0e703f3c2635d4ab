"""Decode attention against double precision: splits, groups of heads, block sizes, ragged and padded batches."""

from functools import partial
from typing import Any

import pytest
import torch
from hopper import compile_for_hopper
from kernel_inputs import DEVICE, DTYPE, assert_near, attend, cells_of, norm_rotate, paged, randn, rotary_table

from worker_svc.core.kernels.attention import decode as module
from worker_svc.core.kernels.attention import decode_stream
from worker_svc.core.kernels.attention.decode import DecodeAttention, DecodeRows
from worker_svc.core.kernels.attention.decode_stream import stream_shares, stream_warps
from worker_svc.core.kernels.attention.tuning import ContextCut, Shares, find_cut, find_shares
from worker_svc.core.kernels.linear.unscaled import Unscaled

EPS = 1e-5
needs_hopper = pytest.mark.skipif(not stream_warps(DEVICE, 16, 32, 8, 128, 2), reason="needs a Hopper GPU")


def check(
    past: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    has_norms: bool = True,
    rounds: int = 2,
    hidden_size: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    chunk: int | None = None,
    temperature: tuple[int, float, int] = (0, 0.0, 0),
    dtype: torch.dtype = DTYPE,
    as_many: int = 0,
) -> None:
    count, bounds = len(past), {"window": window, "chunk": chunk}
    sinks = randn(num_heads, seed=7, scale=2.0, dtype=dtype) if has_sinks else None
    draw = partial(randn, dtype=dtype)
    cache = paged(past, [each + 1 for each in past], num_kv_heads, head_dim, block_size, dtype=dtype)
    table = rotary_table(max(past) + 1, head_dim)
    # Rows of the flat columns stand in another order than the sequences, with a stranger's row among them.
    rows = torch.tensor([row + (row > 0) for row in reversed(range(count))], device=DEVICE)
    qkv = draw(count + 1, (num_heads + 2 * num_kv_heads) * head_dim, seed=1)
    norms = (1 + draw(head_dim, seed=2, scale=0.2), 1 + draw(head_dim, seed=3, scale=0.2)) if has_norms else None
    unscaled = Unscaled(draw(count + 1, hidden_size, seed=4, scale=3.0), EPS) if hidden_size is not None else None
    scaled = qkv if unscaled is None else (qkv * unscaled.scales()).to(dtype)
    contexts = torch.tensor(past, device=DEVICE) + 1
    out = torch.full((count + 1, num_heads * head_dim), float("nan"), dtype=dtype, device=DEVICE)
    decode = DecodeAttention(
        max(count, as_many),
        num_heads,
        num_kv_heads,
        head_dim,
        table,
        scale=head_dim**-0.5,
        block_size=block_size,
        window=window,
        softcap=softcap,
        has_sinks=has_sinks,
        chunk=chunk,
        temperature=temperature,
    )
    decode_rows = DecodeRows(rows, torch.arange(count, device=DEVICE), contexts, as_many)
    for _ in range(rounds):  # the second finds what the first left in the scratch memory
        out.fill_(float("nan"))
        decode.plan(decode_rows, cache.tables)
        given = qkv.clone(), norms, EPS, decode_rows, cache.tables, cache.keys, cache.values
        decode.attend(*given, out, unscaled, sinks)
    for slot, length in enumerate(past):
        position = torch.tensor([length], device=DEVICE)
        heads = scaled[rows[slot]].view(1, -1, head_dim)
        query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
        query = norm_rotate(query, norms and norms[0], EPS, table, position)
        key = norm_rotate(key, norms and norms[1], EPS, table, position)
        keys, values = torch.cat((cache.past_keys[slot], key)), torch.cat((cache.past_values[slot], value))
        attended = attend(query, keys, values, length, **bounds, softcap=softcap, sinks=sinks, temperature=temperature)
        assert_near(out[rows[slot]], attended.flatten())
        cell = cells_of(cache.tables, slot, position, block_size)
        assert_near(cache.keys.flatten(0, 1)[cell], key)
        if unscaled is None:
            assert torch.equal(cache.values.flatten(0, 1)[cell], value)
        assert_near(cache.values.flatten(0, 1)[cell], value)
    assert torch.isnan(out[1]).all()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (6, 2), (8, 1), (16, 2)])
def test_groups_of_query_heads(num_heads: int, num_kv_heads: int) -> None:
    check([0, 37], num_heads=num_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("count", [1, 2, 3, 17])
@pytest.mark.parametrize("as_many", [16, 64, 96])
def test_kernels_for_more_sequences_attend_as_well(count: int, as_many: int) -> None:
    past = [0, 37, 300, 15, 16, *range(40, 160, 10)][:count]
    check(past, as_many=as_many if as_many > count else count, num_heads=8, num_kv_heads=4, hidden_size=None)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    check([block_size - 1, block_size, block_size + 1], block_size=block_size)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("has_norms", [True, False])
def test_head_dims_with_and_without_norms(head_dim: int, *, has_norms: bool) -> None:
    check([70, 3], head_dim=head_dim, has_norms=has_norms)


@pytest.mark.parametrize("window", [1, 2, 16, 20, 71, 500])
def test_a_window_ends_with_the_new_token(window: int) -> None:
    check([0, 1, 19, 20, 70, 71], window=window)


@pytest.mark.parametrize("chunk", [1, 2, 16, 20, 71, 500])
def test_a_chunk_is_that_of_the_new_token(chunk: int) -> None:
    check([0, 1, 15, 16, 19, 20, 21, 70, 71], chunk=chunk)


def test_queries_grow_with_their_position() -> None:
    check([0, 6, 7, 8, 70], temperature=(8, 0.5, 1))
    check([40, 5], temperature=(3, 1.0, 0), softcap=2.0, has_norms=False, hidden_size=96)
    check([3 * each for each in range(40)], num_heads=2, num_kv_heads=1, temperature=(16, 0.3, 1))


def test_scores_are_capped_and_seen_within_a_window() -> None:
    check([0, 3, 70], softcap=0.7)
    check([40, 5], softcap=2.0, window=9, has_norms=False, hidden_size=96)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_take_part_in_the_softmax_once(monkeypatch: pytest.MonkeyPatch, splits: int, ahead: int) -> None:
    monkeypatch.setattr(module, "find_cut", lambda *_: ContextCut(splits, 20, 16, 3, 2, None, ahead=ahead))
    check([0, 1, 16, 70], has_sinks=True, num_heads=6)
    check([40, 5], has_sinks=True, window=9, softcap=2.0, has_norms=False, hidden_size=96)


def test_many_sequences_with_sinks() -> None:
    check([3 * each for each in range(40)], num_heads=2, num_kv_heads=1, has_sinks=True)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("window", [5, 30])
def test_a_window_is_cut_into_splits(monkeypatch: pytest.MonkeyPatch, window: int, ahead: int) -> None:
    monkeypatch.setattr(module, "find_cut", lambda *_: ContextCut(3, 8, 16, 3, 2, None, ahead=ahead))
    check([0, 4, 5, 29, 30, 90], window=window, softcap=1.0)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("chunk", [5, 30])
def test_a_chunk_is_cut_into_splits(monkeypatch: pytest.MonkeyPatch, chunk: int, ahead: int) -> None:
    monkeypatch.setattr(module, "find_cut", lambda *_: ContextCut(3, 8, 16, 3, 2, None, ahead=ahead))
    check([0, 4, 5, 29, 30, 59, 90], chunk=chunk)


def test_many_sequences_with_a_window_or_chunks() -> None:
    check([3 * each for each in range(40)], num_heads=2, num_kv_heads=1, window=21)
    check([3 * each for each in range(40)], num_heads=2, num_kv_heads=1, chunk=21)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("splits", [1, 3])
def test_whether_tiles_are_on_their_way_before_the_queries(
    monkeypatch: pytest.MonkeyPatch, splits: int, ahead: int
) -> None:
    chosen = ContextCut(splits, 20, 16, 3, 2, None, ahead=ahead)
    monkeypatch.setattr(module, "find_cut", lambda *_: chosen)
    check([0, 1, 15, 16, 17, 70])
    check([33], hidden_size=96)


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
    check([70, 0, 17], num_heads=6, num_kv_heads=2, head_dim=head_dim)
    check([33], num_heads=3, num_kv_heads=1, head_dim=head_dim, has_norms=False, hidden_size=96)


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
    check([70, 3, 0], hidden_size=hidden_size)
    check([70, 3, 0], hidden_size=hidden_size, has_norms=False)


def test_ragged_batches_at_the_edges_of_splits_and_tiles() -> None:
    check([0, 1, 127, 128, 129, 255, 256, 257, 600], num_heads=2, num_kv_heads=1)


def test_one_long_context_is_split_over_many_programs() -> None:
    check([2500], num_heads=2, num_kv_heads=1)


@pytest.mark.parametrize("past", [0, 1, 16, 17, 63, 64, 65, 128, 150, 1200])
def test_one_context_of_groups_of_four_is_split_into_short_parts(past: int) -> None:
    check([past], num_heads=8, num_kv_heads=2, head_dim=128)


@pytest.mark.parametrize("past", [1, 64, 128, 129, 257, 1200])
def test_one_context_of_groups_of_eight_is_split_into_longer_parts(past: int) -> None:
    check([past], num_heads=16, num_kv_heads=2, head_dim=128)


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
    check([150], num_heads=num_heads, num_kv_heads=num_kv_heads)
    check([70, 0, 17], num_heads=num_heads, num_kv_heads=num_kv_heads, hidden_size=96, has_sinks=True)
    check([600, *[index % 5 for index in range(40)]], num_heads=num_heads, num_kv_heads=num_kv_heads, rounds=1)


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
    check([1900, 1665, *[3] * 7], num_heads=2, num_kv_heads=2, rounds=1)


def test_so_many_sequences_that_nothing_is_split() -> None:
    check([200, *[index % 5 for index in range(140)]], num_heads=2, num_kv_heads=2, rounds=1)


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("cost", [0, 1, 3])
def test_shares_of_all_contexts(monkeypatch: pytest.MonkeyPatch, programs: int, cost: int) -> None:
    monkeypatch.setattr(module, "find_shares", lambda *_: Shares(programs, 16, 3, 2, cost))
    check([0, 1, 15, 16, 17, 70])
    check([70, 0, 0, 1])
    check([33], hidden_size=96)
    check([130, 97, 64, 0, 1], num_heads=8, num_kv_heads=1)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("tokens", [16, 32])
def test_shares_with_more_or_larger_tiles_on_their_way(
    monkeypatch: pytest.MonkeyPatch, tokens: int, stages: int
) -> None:
    monkeypatch.setattr(module, "find_shares", lambda *_: Shares(3, tokens, stages, 2, 1))
    check([127, 128, 3, 129, 31, 32])
    check([127, 128, 3, 129, 31, 32], block_size=64, num_heads=12)


@needs_hopper
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [
        (32, 8),
        (16, 8),
        (8, 8),
        (28, 4),
        (32, 4),
        (36, 4),
        (64, 4),
        (4, 2),
        (26, 2),
        (38, 2),
        (64, 2),
        (2, 1),
        (8, 1),
        (64, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_contexts_are_streamed(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    many = partial(check, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128, dtype=dtype)
    many([index * 7 % 90 for index in range(40)])
    many([0] * 300)
    many([15, 16, 17, 0, 2500, 31, 32, 33] * 5)
    many([700 - index for index in range(64)], hidden_size=1024)
    many([600, *[3] * 39], has_norms=False)
    many([191] * 256)  # left whole
    many([191] * 256 + [0] * 28)


def test_what_a_hopper_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_stream, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    streams = partial(stream_warps, torch.device("cuda"))
    assert streams(16, 32, 8, 128, 2) == 8
    assert streams(16, 28, 4, 128, 2) == 4
    assert streams(16, 36, 4, 128, 2) == 8
    assert streams(16, 8, 2, 128, 2) == streams(16, 32, 2, 128, 2) == 4
    assert streams(16, 8, 1, 128, 2) == 4
    assert streams(16, 34, 2, 128, 2) == streams(16, 64, 2, 128, 2) == 8
    assert not streams(32, 32, 8, 128, 2), "blocks that are no tiles"
    assert not streams(16, 48, 16, 128, 2), "many heads of keys"
    assert not streams(16, 96, 8, 128, 2), "many queries a head of keys"
    assert not streams(16, 68, 2, 128, 2), "more than 32 queries of two heads of keys"
    assert not streams(16, 32, 8, 64, 2), "small heads"
    assert not streams(16, 32, 8, 128, 4), "single precision"


@needs_hopper
@pytest.mark.parametrize("programs", [1, 2, 7])
@pytest.mark.parametrize("cost", [0, 3])
def test_streams_of_few_programs(monkeypatch: pytest.MonkeyPatch, programs: int, cost: int) -> None:
    for kv_heads, warps, tokens in ((8, 8, 16), (2, 4, 16), (2, 4, 32), (2, 8, 32)):
        shares = Shares(programs, tokens, 3, warps, cost)
        monkeypatch.setattr(module, "find_shares", lambda *_, shares=shares: shares)
        heads = 8 * warps - 3 * kv_heads
        check([0, 1, 15, 16, 17, 70, 300], num_heads=heads, num_kv_heads=kv_heads, head_dim=128, rounds=3)


def launch_streams(dtype: torch.dtype) -> None:
    for heads, kv_heads, warps, tokens in ((16, 4, 4, 16), (32, 8, 8, 16), (26, 2, 4, 32), (64, 4, 8, 32)):
        qkv = torch.zeros(64, (heads + 2 * kv_heads) * 128, dtype=dtype)
        cache, out = qkv.new_zeros(9, 16, kv_heads, 128), qkv.new_zeros(64, heads * 128)
        column, ints, floats = torch.zeros(64, dtype=torch.int64), torch.zeros(9, 9, dtype=torch.int32), torch.zeros(9)
        stream_shares(
            Shares(132, tokens, 3, warps, 2), qkv, (column,) * 3, ints, ints, cache, cache, out, (floats, floats, ints)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_that_streams_compiles_for_a_hopper_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    kernel = "worker_svc.core.kernels.attention.decode_stream._stream_shares"
    compile_for_hopper(monkeypatch, kernel, "ldmatrix", launch_streams, dtype)


def test_many_contexts_are_cut_into_shares_where_a_tile_of_all_heads_is_small_enough() -> None:
    assert find_shares(64, 8, 256, 132) == Shares(132, 16, 3, 8, 4)
    assert find_shares(64, 4, 256, 132) == Shares(264, 16, 3, 4, 4)
    assert find_shares(32, 8, 256, 132) is None, "few contexts"
    assert find_shares(64, 6, 256, 132) is None, "heads that are no power of two"
    assert find_shares(64, 16, 256, 132) is None, "many heads"
    assert find_shares(64, 4, 512, 132) is None, "large heads"
    assert find_shares(64, 8, 256, 0) is None, "little shared memory"


def test_streams_have_tiles_of_as_many_tokens_as_have_room() -> None:
    assert find_shares(64, 8, 256, 132, 8) == Shares(132, 16, 3, 8, 4)
    assert find_shares(64, 4, 256, 132, 4) == Shares(264, 16, 3, 4, 4)
    assert find_shares(64, 4, 256, 132, 8) == Shares(132, 32, 3, 8, 2)
    assert find_shares(64, 2, 256, 132, 4) == Shares(264, 32, 3, 4, 2)
    assert find_shares(64, 2, 256, 132, 8) == Shares(132, 32, 3, 8, 2)
    assert find_shares(64, 1, 256, 132, 4) == Shares(264, 32, 3, 4, 2)
    assert find_shares(32, 2, 256, 132, 4) is None, "few contexts"
