"""Latent attention of chunks whose contexts are brought to all heads, against double precision and against queries that
meet latents.
"""

import numpy as np
import pytest
import torch
from hopper import NotLaunched, compile_for_hopper
from kernel_inputs import DEVICE, DTYPE, assert_near, cells_of, paged, randn, rotary_table
from torch import Tensor

from worker_svc.core.attention.chunk_work import LatentForm, LatentWork, Room
from worker_svc.core.batch import Batch
from worker_svc.core.kernels.attention import latent_expanded as module
from worker_svc.core.kernels.attention.latent_expanded import ContextTiles, QueryTiles, attend_expanded, expand
from worker_svc.core.kernels.attention.latent_shape import LatentShape
from worker_svc.core.kernels.attention.tuning import find_expanded_tile

SMALL = LatentShape(plain=24, values=20, rank=40, rotated=16, is_paired=False)


def rotary(positions: int, shape: LatentShape) -> Tensor:
    """As latent attention has it: of each half the rotated dimensions first, and latent ones do not turn."""
    table = torch.zeros(positions, 2, (shape.rank + shape.rotated) // 2)
    table[:, 0] = 1.0
    pairs = shape.rotated // 2
    table[:, :, :pairs] = rotary_table(positions, shape.rotated).view(positions, 2, pairs).cpu()
    return table.flatten(1).to(DEVICE)


def turned(halves: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotated dimensions [tokens, heads, 2, pairs] -> the same, turned, in double precision."""
    cos, sin = table[positions].double().view(len(positions), 1, 2, -1)[..., : halves.shape[-1]].unbind(-2)
    left, right = halves.double().unbind(-2)
    return torch.stack((left * cos - right * sin, right * cos + left * sin), -2)


def halves_of(rotated: Tensor, *, is_paired: bool) -> Tensor:
    """[..., rotated] as queries have it -> [..., 2, rotated / 2]."""
    if is_paired:
        return rotated.view(*rotated.shape[:-1], -1, 2).transpose(-1, -2)
    return rotated.view(*rotated.shape[:-1], 2, -1)


def expected_of(queries: Tensor, head: Tensor, up: Tensor, shape: LatentShape, table: Tensor) -> Tensor:
    """queries [tokens, heads, plain + rotated] of the last tokens of heads in the cache [context, head_dim]."""
    halves = head.double().view(len(head), 2, -1)
    latents = halves[..., shape.rotated // 2 :].flatten(1)
    made = torch.einsum("cr,hor->cho", latents, up.double())
    keys, values = made.split([shape.plain, shape.values], -1)
    plain, rotated = queries.double().split([shape.plain, shape.rotated], -1)
    positions = torch.arange(len(head) - len(queries), len(head), device=DEVICE)
    rotated = turned(halves_of(rotated, is_paired=shape.is_paired), table, positions)
    scores = torch.einsum("qhp,chp->hqc", plain, keys)
    scores += torch.einsum("qhxp,cxp->hqc", rotated, halves[..., : shape.rotated // 2])
    seen = torch.arange(len(head), device=DEVICE) <= positions[:, None]
    weights = (scores * (shape.plain + shape.rotated) ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqc,chv->qhv", weights, values).flatten(1)


def check(
    past: list[int], chunks: list[int], shape: LatentShape = SMALL, num_heads: int = 3, block_size: int = 16
) -> None:
    """Two decodes of nobody's stand before the chunks; whatever is nobody's is NaN."""
    contexts = [before + chunk for before, chunk in zip(past, chunks, strict=True)]
    cache = paged(contexts, contexts, 1, shape.rank + shape.rotated, block_size)
    table = rotary(max(contexts), shape)
    starts = 2 + np.cumsum([0, *chunks])
    nothing = np.empty(0, np.int64)
    batch = Batch(
        np.array([9, 9, *range(len(past))]),
        np.array([1, 1, *chunks]),
        np.array([0, 1, *starts]),
        np.array([1, 1, *contexts]),
        nothing,
        nothing,
    )
    work = made_work(shape, batch, room=256)
    assert work.expanded is not None
    assert int(work.expanded.num_absorbed) == 2
    up = randn(num_heads, shape.plain + shape.values, shape.rank, seed=1, scale=shape.rank**-0.5)
    # Queries are part of one product, as most families have them.
    queries = randn(int(starts[-1]), num_heads * (shape.plain + shape.rotated) + 8, seed=2)[:, :-8]
    queries[:2] = torch.nan
    out = torch.full((len(queries), num_heads * shape.values), 7.0, dtype=DTYPE, device=DEVICE)
    made = expand(cache.keys, up, work.expanded.contexts, cache.tables, shape, work.expanded.room)
    scale = (shape.plain + shape.rotated) ** -0.5
    attend_expanded(queries, made, work.expanded.queries, table, scale, shape, out)
    assert bool((out[:2] == 7).all())
    for slot in range(len(past)):
        rows = slice(int(starts[slot]), int(starts[slot + 1]))
        heads = queries[rows].reshape(chunks[slot], num_heads, -1)
        cells = cells_of(cache.tables, slot, torch.arange(contexts[slot], device=DEVICE), block_size)
        head = cache.keys.flatten(0, 2)[cells]
        assert_near(out[rows], expected_of(heads, head, up, shape, table))


def made_work(shape: LatentShape, batch: Batch, room: int) -> LatentWork:
    form = LatentForm(shape, Room(room, 0, 0))
    return form.work([torch.tensor(column, device=DEVICE) for column in form.columns(batch, 2)])


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("sizes", [(128, 128, 512, 64), (33, 24, 50, 12), (64, 64, 256, 32)], ids=str)
def test_dims_as_published_and_others(sizes: tuple[int, int, int, int], *, is_paired: bool) -> None:
    check([0, 3], [70, 40], LatentShape(*sizes, is_paired), num_heads=2)


@pytest.mark.parametrize("num_heads", [1, 3, 16])
def test_any_number_of_heads(num_heads: int) -> None:
    check([5], [140], num_heads=num_heads)


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_contexts_at_the_edges_of_blocks_and_tiles(block_size: int) -> None:
    check([0, 0, 0, 1, 63, 65], [127, 128, 129, 127, 65, 192], num_heads=1, block_size=block_size)


def test_chunks_after_longer_contexts() -> None:
    check([200, 0], [150, 64], num_heads=2)


def test_tiles_of_no_tokens_are_left_out() -> None:
    cache = paged([80], [80], 1, SMALL.rank + SMALL.rotated, 16)
    up = randn(1, SMALL.plain + SMALL.values, SMALL.rank, seed=1)
    # The second of each would read and write where nothing is.
    contexts = ContextTiles(*torch.tensor([[0, 1 << 40], [80, 0], [0, 0], [0, 1 << 40]], device=DEVICE))
    made = expand(cache.keys, up, contexts, cache.tables, SMALL, 80)
    tiles = QueryTiles(*torch.tensor([[8, 1 << 40], [60, 60], [4, 0], [0, 0]], device=DEVICE))
    out = torch.full((80, SMALL.values), 7.0, dtype=DTYPE, device=DEVICE)
    queries = randn(80, SMALL.plain + SMALL.rotated, seed=2)
    attend_expanded(queries, made, tiles, rotary(80, SMALL), 0.1, SMALL, out)
    assert bool((out[:8] == 7).all())
    assert bool((out[12:] == 7).all())
    assert not bool((out[8:12] == 7).any())


@pytest.mark.parametrize(("shared_kib", "tokens"), [(227, 64), (163, 64), (99, 32), (64, 16)])
def test_tiles_of_published_dims_fit_any_card(shared_kib: int, tokens: int) -> None:
    """Hopper, Ampere, Ada and Turing."""
    tile = find_expanded_tile(128 * 384, 640, shared_kib * 1024)
    assert tile.tokens == tokens
    assert 128 * 384 + tile.stages * tile.tokens * 640 <= shared_kib * 1024


def launch_expanded(other: str) -> None:
    """One of both kernels; in a process that is for this alone."""
    setattr(module, other, NotLaunched())
    shape, column = LatentShape(128, 128, 512, 64, is_paired=True), torch.zeros(3, dtype=torch.int64)
    cache, up = (torch.zeros(*each, dtype=torch.bfloat16) for each in ((9, 16, 1, 576), (16, 256, 512)))
    tiles, tables = (column, column, column, column), torch.zeros(9, 9, dtype=torch.int32)
    made = expand(cache, up, ContextTiles(*tiles), tables, shape, 64)
    queries, out = cache.new_zeros(64, 16 * 192 + 576)[:, : 16 * 192], cache.new_zeros(64, 16 * 128)
    attend_expanded(queries, made, QueryTiles(*tiles), torch.zeros(64, 576), 0.1, shape, out)


@pytest.mark.parametrize("kernels", [("_expand", "_attend_expanded"), ("_attend_expanded", "_expand")])
def test_kernels_fit_a_hopper(monkeypatch: pytest.MonkeyPatch, kernels: tuple[str, str]) -> None:
    where = f"worker_svc.core.kernels.attention.latent_expanded.{kernels[0]}"
    compile_for_hopper(monkeypatch, where, "wgmma.mma_async", launch_expanded, kernels[1])
