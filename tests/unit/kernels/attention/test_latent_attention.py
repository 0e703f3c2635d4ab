"""Latent attention against double precision: groups of heads, splits, block sizes, ragged and padded batches."""

import numpy as np
import pytest
import torch
from hopper import NotLaunched, compile_for_hopper
from kernel_inputs import DEVICE, DTYPE, Paged, assert_near, attend, cells_of, norm_rotate, paged, randn, rotary_table
from torch import Tensor

from worker_svc.core.attention.chunk_work import chunk_tiles
from worker_svc.core.batch import Batch
from worker_svc.core.kernels.attention import latent as module
from worker_svc.core.kernels.attention.decode import DecodeRows
from worker_svc.core.kernels.attention.latent import LatentDims, LatentKernels
from worker_svc.core.kernels.attention.prefill import PrefillTiles
from worker_svc.core.kernels.attention.tuning import LatentCut, LatentTile, find_latent_cut, find_latent_tile

SMALL = LatentDims(32, 16)
HOPPER_BYTES = 227 * 1024


def turning(positions: int, dims: LatentDims) -> Tensor:
    """A table in which the first dimensions of both halves turn, and latent ones do not."""
    table = rotary_table(positions, dims.head_dim)
    half, pairs = dims.head_dim // 2, dims.rotated // 2
    table[:, pairs:half], table[:, half + pairs :] = 1.0, 0.0
    return table


def latent_of(head: Tensor, dims: LatentDims) -> Tensor:
    half, pairs = dims.head_dim // 2, dims.rotated // 2
    return torch.cat((head[..., pairs:half], head[..., half + pairs :]), -1)


def make_kernels(count: int, num_heads: int, dims: LatentDims, table: Tensor) -> LatentKernels:
    # `attend` takes scores times head_dim**-0.5.
    return LatentKernels(count, num_heads, dims, table, dims.head_dim**-0.5)


def assert_attended(
    heads: Tensor, out: Tensor, cache: Paged, slot: int, past: int, *, num_heads: int, dims: LatentDims, table: Tensor
) -> None:
    """Of a sequence's rows: what is in `out` and what was written."""
    positions = past + torch.arange(len(heads), device=DEVICE)
    turned = norm_rotate(heads.view(len(heads), num_heads + 1, dims.head_dim), None, 0.0, table, positions)
    query, key = turned[:, :num_heads], turned[:, num_heads:]
    keys = torch.cat((cache.past_keys[slot], key))
    attended = attend(query, keys, keys, past)
    assert_near(
        latent_of(out.view(len(out), num_heads, dims.head_dim), dims).flatten(1), latent_of(attended, dims).flatten(1)
    )
    cells = cells_of(cache.tables, slot, positions, cache.keys.shape[1])
    assert_near(cache.keys.flatten(0, 1)[cells], key)


def check_decode(past: list[int], *, num_heads: int = 5, dims: LatentDims = SMALL, block_size: int = 16) -> None:
    count = len(past)
    cache = paged(past, [each + 1 for each in past], 1, dims.head_dim, block_size)
    table = turning(max(past) + 1, dims)
    # Rows of the flat columns stand in another order than the sequences, with a stranger's row among them.
    rows = torch.tensor([row + (row > 0) for row in reversed(range(count))], device=DEVICE)
    heads = randn(count + 1, (num_heads + 1) * dims.head_dim, seed=1)
    kernels = make_kernels(count, num_heads, dims, table)
    decodes = DecodeRows(rows, torch.arange(count, device=DEVICE), torch.tensor(past, device=DEVICE) + 1)
    for _ in range(2):  # the second finds what the first left in the scratch memory
        out = torch.full((count + 1, num_heads * dims.head_dim), torch.nan, dtype=DTYPE, device=DEVICE)
        kernels.write_decodes(heads, decodes, cache.tables, cache.keys)
        kernels.decode(heads, decodes, cache.tables, cache.keys, out)
    for slot, length in enumerate(past):
        row = slice(int(rows[slot]), int(rows[slot]) + 1)
        assert_attended(heads[row], out[row], cache, slot, length, num_heads=num_heads, dims=dims, table=table)
    assert torch.isnan(out[1]).all()


def check_prefill(
    past: list[int], chunks: list[int], *, num_heads: int = 5, dims: LatentDims = SMALL, block_size: int = 16
) -> None:
    contexts = [before + chunk for before, chunk in zip(past, chunks, strict=True)]
    cache = paged(past, contexts, 1, dims.head_dim, block_size)
    table = turning(max(contexts), dims)
    nothing, starts = np.empty(0, np.int64), np.cumsum([0, *chunks])
    batch = Batch(np.arange(len(past)), np.array(chunks), starts, np.array(contexts), nothing, nothing)
    positions = torch.cat([torch.arange(*each, device=DEVICE) for each in zip(past, contexts, strict=True)])
    spans = list(zip(past, contexts, strict=True))
    cells = torch.cat(
        [
            cells_of(cache.tables, slot, torch.arange(*span, device=DEVICE), block_size)
            for slot, span in enumerate(spans)
        ]
    )
    heads = randn(len(positions), (num_heads + 1) * dims.head_dim, seed=1)
    out = torch.full((len(heads), num_heads * dims.head_dim), torch.nan, dtype=DTYPE, device=DEVICE)
    kernels = make_kernels(1, num_heads, dims, table)
    kernels.write_tokens(heads, positions, cells, cache.keys)
    tiles = PrefillTiles(*(torch.tensor(column, device=DEVICE) for column in chunk_tiles(batch, 0)))
    kernels.prefill(heads, tiles, cache.tables, cache.keys, out)
    for slot, before in enumerate(past):
        rows = slice(starts[slot], starts[slot + 1])
        assert_attended(heads[rows], out[rows], cache, slot, before, num_heads=num_heads, dims=dims, table=table)


def cut(splits: int, split_tokens: int = 16, rows: int = 16, tokens: int = 16) -> LatentCut:
    return LatentCut(splits, split_tokens, LatentTile(rows, tokens, 4, 2))


@pytest.mark.parametrize("num_heads", [1, 3, 16, 17, 40, 65])
def test_decodes_of_any_number_of_heads(num_heads: int) -> None:
    check_decode([0, 37], num_heads=num_heads)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_decodes_at_the_edges_of_blocks(block_size: int) -> None:
    check_decode([block_size - 2, block_size - 1, block_size, block_size + 1], block_size=block_size)


@pytest.mark.parametrize("dims", [LatentDims(512, 64), LatentDims(24, 12), LatentDims(40, 2), LatentDims(6, 34)])
@pytest.mark.parametrize("splits", [1, 3])
def test_dims_as_published_and_others(monkeypatch: pytest.MonkeyPatch, splits: int, dims: LatentDims) -> None:
    monkeypatch.setattr(module, "find_latent_cut", lambda *_: cut(splits))
    check_decode([70, 0], dims=dims, num_heads=3)
    check_prefill([17, 0], [20, 1], dims=dims, num_heads=3)


@pytest.mark.parametrize("splits", [2, 3, 5, 9])
@pytest.mark.parametrize("split_tokens", [8, 40])
def test_contexts_are_cut_into_splits(monkeypatch: pytest.MonkeyPatch, splits: int, split_tokens: int) -> None:
    monkeypatch.setattr(module, "find_latent_cut", lambda *_: cut(splits, split_tokens))
    check_decode([0, 1, 14, 15, 16, 31, 70, 150], num_heads=3)
    check_decode([130, 3], num_heads=33)


def test_many_decodes() -> None:
    check_decode([3 * each for each in range(40)], num_heads=2)


@pytest.mark.parametrize("num_heads", [1, 3, 16, 40, 65])
def test_chunks_of_any_number_of_heads(num_heads: int) -> None:
    check_prefill([20], [12], num_heads=num_heads)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_chunks_at_the_edges_of_blocks(block_size: int) -> None:
    check_prefill([block_size - 1, 3], [3, block_size - 3], block_size=block_size)


def test_ragged_chunks_at_the_edges_of_tiles() -> None:
    check_prefill([0, 0, 63, 64, 65, 1, 130], [63, 64, 65, 2, 129, 190, 3], num_heads=2)


def test_a_long_prefix() -> None:
    check_prefill([1000], [33], num_heads=3)


def test_tiles_of_no_rows_are_left_out() -> None:
    cache = paged([80], [80], 1, SMALL.head_dim, 16)
    heads, out = randn(80, 2 * SMALL.head_dim, seed=1), torch.full((80, SMALL.head_dim), 7.0, dtype=DTYPE).to(DEVICE)
    # The second would read and write where nothing is.
    tiles = PrefillTiles(*torch.tensor([[8, 1 << 40], [60, 60], [4, 0], [0, 0]], device=DEVICE))
    make_kernels(1, 1, SMALL, turning(80, SMALL)).prefill(heads, tiles, cache.tables, cache.keys, out)
    assert bool((out[:8] == 7).all())
    assert bool((out[12:] == 7).all())
    assert not bool((latent_of(out[8:12], SMALL) == 7).any())


def test_cuts_have_a_program_for_each_multiprocessor_as_far_as_contexts_are_long_enough() -> None:
    tile = LatentTile(64, 64, 8, 2)
    assert find_latent_cut(1, 128, tile, 1 << 17, 132).splits == 66
    assert find_latent_cut(16, 128, tile, 1 << 17, 132).splits == 4
    assert find_latent_cut(100, 128, tile, 1 << 17, 132).splits == 1
    assert find_latent_cut(1, 128, tile, 1000, 132).splits == 8


@pytest.mark.parametrize(("rows", "expected"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (8192, 64)])
def test_tiles_have_no_more_rows_than_needed(rows: int, expected: int) -> None:
    assert find_latent_tile(rows, 512, 1152, HOPPER_BYTES).rows == expected
    assert find_latent_tile(rows, 514, 2112, HOPPER_BYTES).rows == 16


@pytest.mark.parametrize(("shared_kib", "rows", "tokens"), [(227, 64, 64), (163, 32, 32), (99, 16, 32), (64, 16, 16)])
def test_tiles_of_published_dims_fit_any_card(shared_kib: int, rows: int, tokens: int) -> None:
    """Hopper, Ampere, Ada and Turing."""
    row_bytes = LatentDims(512, 64).tile_dims * 2
    tile = find_latent_tile(128, 512, row_bytes, shared_kib * 1024)
    assert (tile.rows, tile.tokens) == (rows, tokens)
    assert (tile.rows + tile.stages * tile.tokens) * 1152 <= shared_kib * 1024


def test_dims_are_padded_to_powers_of_two_that_products_can_have() -> None:
    assert LatentDims(512, 64).tile_dims == 576
    assert LatentDims(24, 12).tile_dims == 64
    assert LatentDims(514, 40).tile_dims == 1024 + 64


KERNELS = ("write_latents", "attend_latents", "add_parts")


def launch_latent(kernel: str, num_heads: int, dims: LatentDims) -> None:
    """One kernel of decodes in splits and of chunks; in a process that is for this alone."""
    for other in {*KERNELS} - {kernel}:
        setattr(module, other, NotLaunched())
    setattr(module, "multiprocessors", lambda *_: 132)  # noqa: B010  (it is no attribute to mypy that one may set)
    table, heads = torch.zeros(4096, dims.head_dim), torch.zeros(64, (num_heads + 1) * dims.head_dim).bfloat16()
    cache, tables = heads.new_zeros(9, 16, 1, dims.head_dim), torch.zeros(9, 9, dtype=torch.int32)
    out, column = heads[:, dims.head_dim :].contiguous(), torch.zeros(3, dtype=torch.int64)
    kernels, rows = make_kernels(8, num_heads, dims, table), DecodeRows(column, column, column)
    kernels.write_decodes(heads, rows, tables, cache)
    kernels.decode(heads, rows, tables, cache, out)
    kernels.write_tokens(heads, column, column, cache)
    kernels.prefill(heads, PrefillTiles(column, column, column, column), tables, cache, out)


@pytest.mark.parametrize(
    ("kernel", "num_heads", "rank", "instruction"),
    [
        ("attend_latents", 128, 512, "wgmma.mma_async"),
        ("attend_latents", 16, 512, "cp.async.cg"),
        ("attend_latents", 16, 560, "cp.async.cg"),
        ("write_latents", 128, 512, "st.global"),
        ("add_parts", 128, 512, "st.global"),
    ],
)
def test_kernels_fit_a_hopper(
    monkeypatch: pytest.MonkeyPatch, kernel: str, num_heads: int, rank: int, instruction: str
) -> None:
    where = f"worker_svc.core.kernels.attention.latent.{kernel}"
    dims = LatentDims(rank, 576 - rank)
    compile_for_hopper(monkeypatch, where, instruction, launch_latent, kernel, num_heads, dims)
