"""Rotation, cache writes and attention of chunks against double precision: prefixes, tile edges, ragged batches."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hopper import compile_for_hopper
from kernel_inputs import DEVICE, DTYPE, assert_near, attend, cells_of, norm_rotate, paged, randn, rotary_table

from worker_svc.core.attention.chunk_work import chunk_tiles
from worker_svc.core.batch import Batch
from worker_svc.core.kernels.attention import prefill as kernel
from worker_svc.core.kernels.attention.prefill import PrefillTiles, prefill_attention
from worker_svc.core.kernels.attention.prefill_stream import can_stream_prefill, stream_prefill
from worker_svc.core.kernels.attention.rope import rope_write
from worker_svc.core.kernels.attention.tuning import find_prefill_tile
from worker_svc.core.kernels.linear.unscaled import Unscaled

EPS = 1e-6


def make_batch(past: list[int], chunks: list[int]) -> Batch:
    nothing = np.empty(0, np.int64)
    starts = np.concatenate(([0], np.cumsum(chunks)))
    slots = np.arange(len(past))
    contexts = np.array(past) + chunks
    return Batch(slots, np.array(chunks), starts, contexts, nothing, nothing)


def check(
    past: list[int],
    chunks: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    has_norms: bool = True,
    hidden_size: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    chunk: int | None = None,
    temperature: tuple[int, float, int] = (0, 0.0, 0),
    attends: Callable[..., None] = prefill_attention,
) -> None:
    sinks = randn(num_heads, seed=7, scale=2.0) if has_sinks else None
    contexts = [before + chunk for before, chunk in zip(past, chunks, strict=True)]
    cache = paged(past, contexts, num_kv_heads, head_dim, block_size)
    table = rotary_table(max(contexts), head_dim)
    batch = make_batch(past, chunks)
    positions = torch.cat([torch.arange(a, b, device=DEVICE) for a, b in zip(past, contexts, strict=True)])
    owners = torch.tensor(np.repeat(np.arange(len(past)), chunks), device=DEVICE)
    cells = torch.cat(
        [cells_of(cache.tables, slot, positions[owners == slot], block_size) for slot in range(len(past))]
    )
    given = randn(len(positions), (num_heads + 2 * num_kv_heads) * head_dim, seed=1)
    norms = (1 + randn(head_dim, seed=2, scale=0.2), 1 + randn(head_dim, seed=3, scale=0.2)) if has_norms else None
    unscaled = Unscaled(randn(len(given), hidden_size, seed=4, scale=3.0), EPS) if hidden_size is not None else None
    qkv = given.clone()
    rope_write(qkv, norms, EPS, table, positions, cells, cache.keys, cache.values, unscaled)
    if unscaled is not None:
        given = (given * unscaled.scales()).to(DTYPE)
    out = torch.full((len(positions), num_heads * head_dim), float("nan"), dtype=DTYPE, device=DEVICE)
    tiles = PrefillTiles(*(torch.tensor(column, device=DEVICE) for column in chunk_tiles(batch, 0)))
    changes = {"window": window, "softcap": softcap, "sinks": sinks, "chunk": chunk, "temperature": temperature}
    kind = changes if attends is prefill_attention else {}
    attends(qkv, tiles, cache.tables, cache.keys, cache.values, out, head_dim**-0.5, **kind)
    query, key, value = given.view(len(given), -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), 1)
    query = norm_rotate(query, norms and norms[0], EPS, table, positions)
    key = norm_rotate(key, norms and norms[1], EPS, table, positions)
    assert_near(cache.keys.flatten(0, 1)[cells], key)
    if unscaled is None:
        assert torch.equal(cache.values.flatten(0, 1)[cells], value)
    assert_near(cache.values.flatten(0, 1)[cells], value)
    for slot, before in enumerate(past):
        own = owners == slot
        keys = torch.cat((cache.past_keys[slot], key[own]))
        values = torch.cat((cache.past_values[slot], value[own]))
        attended = attend(query[own], keys, values, before, **changes)
        assert_near(out[own], attended.flatten(1))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (6, 2), (8, 1), (5, 1)])
def test_groups_of_query_heads(num_heads: int, num_kv_heads: int) -> None:
    check([20], [40], num_heads=num_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    check([block_size - 1, 3], [block_size + 2, 30], block_size=block_size)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("has_norms", [True, False])
def test_head_dims_with_and_without_norms(head_dim: int, *, has_norms: bool) -> None:
    check([17, 0], [33, 5], head_dim=head_dim, has_norms=has_norms)


@pytest.mark.parametrize("window", [1, 7, 64, 70, 1000])
def test_each_query_sees_a_window_that_ends_with_itself(window: int) -> None:
    check([0, 90, 3], [70, 66, 1], window=window)


@pytest.mark.parametrize("chunk", [1, 7, 64, 70, 128, 1000])
def test_each_query_sees_its_own_chunk(chunk: int) -> None:
    """Chunks of 64 and 128 tokens begin with a tile, whose rows see all tiles since then but the last ones."""
    check([0, 90, 3, 127, 128], [70, 66, 1, 3, 130], chunk=chunk, num_heads=2, num_kv_heads=1)


def test_queries_grow_with_their_position() -> None:
    check([30, 0], [40, 9], temperature=(8, 0.5, 1))
    check([30, 0], [140, 9], temperature=(3, 1.0, 0), softcap=2.0, has_norms=False)


def test_scores_are_capped_within_a_window_or_without() -> None:
    check([30, 0], [40, 9], softcap=0.7)
    check([30, 0], [40, 9], softcap=2.0, window=11, has_norms=False)


def test_sinks_take_part_in_the_softmax() -> None:
    check([30, 0], [40, 9], has_sinks=True, num_heads=6)
    check([30, 0], [70, 9], has_sinks=True, window=11, has_norms=False)


def test_heads_whose_memory_is_aligned_to_eight_elements() -> None:
    check([20], [40], num_heads=5, num_kv_heads=1, head_dim=120)


def launch_prefill(**kind: Any) -> None:
    qkv, out = torch.zeros(2, 64, 7 * 184, dtype=torch.bfloat16)
    cache, tables = qkv.new_zeros(9, 16, 1, 184), torch.zeros(9, 9, dtype=torch.int32)
    tiles = PrefillTiles(*torch.zeros(4, 1, dtype=torch.int64))
    prefill_attention(qkv, tiles, tables, cache, cache, out[:, : 5 * 184], 184**-0.5, **kind)


def launch_chunked_prefill() -> None:
    launch_prefill(chunk=8192)
    launch_prefill(temperature=(8192, 0.1, 1))


def test_tiles_that_are_padded_fit_a_hopper_and_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "worker_svc.core.kernels.attention.prefill._prefill_attention"
    compile_for_hopper(monkeypatch, where, "cp.async.cg", launch_prefill)
    compile_for_hopper(monkeypatch, where, "cp.async.cg", launch_chunked_prefill)


@pytest.mark.parametrize("hidden_size", [96, 1024, 1500])
def test_rows_that_are_scaled_by_their_hidden_states(hidden_size: int) -> None:
    check([17, 0], [33, 5], hidden_size=hidden_size)
    check([17, 0], [33, 5], hidden_size=hidden_size, has_norms=False)


@pytest.fixture(params=["few", "many"])
def _programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many":
        monkeypatch.setattr(kernel, "find_prefill_tile", lambda _, head_dim: find_prefill_tile(1000, head_dim))


@pytest.mark.usefixtures("_programs")
def test_ragged_chunks_at_the_edges_of_tiles() -> None:
    check([0, 0, 63, 64, 65, 1, 130], [63, 64, 65, 2, 129, 190, 3], num_heads=2, num_kv_heads=1)


@pytest.mark.usefixtures("_programs")
def test_a_long_prefix() -> None:
    check([1000], [70], num_heads=2, num_kv_heads=1)


def test_tiles_of_no_rows_are_left_out() -> None:
    cache = paged([80], [80], 1, 64, 16)
    qkv, out = randn(80, 3 * 64, seed=1), torch.full((80, 64), 7.0, dtype=DTYPE, device=DEVICE)
    # The second would read and write where nothing is.
    tiles = PrefillTiles(*torch.tensor([[8, 1 << 40], [60, 60], [4, 0], [0, 0]], device=DEVICE))
    prefill_attention(qkv, tiles, cache.tables, cache.keys, cache.values, out, cache.keys.shape[-1] ** -0.5)
    assert bool((out[:8] == 7).all())
    assert bool((out[12:] == 7).all())
    assert not bool((out[8:12] == 7).any())


def test_rows_before_the_first_are_left_alone_and_some_queries_are_scaled() -> None:
    cache = paged([0, 0], [4, 4], 2, 64, 16)
    qkv = randn(4, 8 * 64, seed=1)
    before, alike = qkv.clone(), qkv.clone()
    positions = torch.arange(4, device=DEVICE)
    cells = cells_of(cache.tables, 1, positions, 16)
    work = None, 0.0, rotary_table(4, 64), positions, cells, cache.keys, cache.values
    rope_write(qkv, *work, first=1, num_scaled=torch.tensor([2], device=DEVICE), scale=2.0)
    assert torch.equal(qkv[:1], before[:1])
    assert torch.isnan(cache.keys.flatten(0, 1)[cells[:1]]).all()
    assert not torch.isnan(cache.keys.flatten(0, 1)[cells[1:]]).any()
    rope_write(alike, *work)
    assert torch.equal(qkv[1, : 4 * 64], 2 * alike[1, : 4 * 64])
    assert torch.equal(qkv[2:], alike[2:])


needs_hopper = pytest.mark.skipif(not can_stream_prefill(DEVICE, 16, 2, 128, 2), reason="needs a Hopper GPU")


@needs_hopper
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (6, 2), (8, 1), (5, 1), (14, 2), (32, 8)])
def test_streamed_tiles_of_groups_of_query_heads(num_heads: int, num_kv_heads: int) -> None:
    kind: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 128}
    check([20], [40], attends=stream_prefill, **kind)
    check([0, 0, 63, 64, 65, 1, 130], [63, 64, 65, 2, 129, 190, 3], attends=stream_prefill, **kind)


@needs_hopper
@pytest.mark.parametrize("past", [0, 1, 15, 16, 17, 127, 128, 129, 1000])
def test_streamed_contexts_of_any_length(past: int) -> None:
    """Whatever stands after them in their last block, and in blocks of others."""
    for chunk in (1, 2, 15, 16, 17, 63, 64, 65, 200, 1000):
        check([past, 0], [chunk, 3], head_dim=128, attends=stream_prefill)


@needs_hopper
def test_streamed_tiles_of_no_rows_are_left_out() -> None:
    cache = paged([80], [80], 1, 128, 16)
    qkv, out = randn(80, 4 * 128, seed=1), torch.full((80, 256), 7.0, dtype=DTYPE, device=DEVICE)
    tiles = PrefillTiles(*torch.tensor([[8, 1 << 40], [60, 60], [4, 0], [0, 0]], device=DEVICE))
    stream_prefill(qkv, tiles, cache.tables, cache.keys, cache.values, out, 0.1)
    assert bool((out[:8] == 7).all())
    assert bool((out[12:] == 7).all())
    assert not bool((out[8:12] == 7).any())


def launch_streams() -> None:
    for heads, kv_heads in ((32, 8), (28, 4)):
        qkv, cache = torch.zeros(64, (heads + 2 * kv_heads) * 128).bfloat16(), torch.zeros(9, 16, kv_heads, 128)
        tiles, tables = PrefillTiles(*torch.zeros(4, 1, dtype=torch.int64)), torch.zeros(9, 9, dtype=torch.int32)
        out = qkv.new_zeros(64, heads * 128)
        stream_prefill(qkv, tiles, tables, cache.bfloat16(), cache.bfloat16(), out, 0.1)


def test_the_kernel_that_streams_compiles_for_a_hopper_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "worker_svc.core.kernels.attention.prefill_stream._stream_prefill"
    compile_for_hopper(monkeypatch, where, "wgmma.mma_async", launch_streams)
