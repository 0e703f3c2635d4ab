"""Where kernels are tested, in which dtype, how near they must come, what stands around products, and paged caches."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from worker_svc.core.kernels.linear.table import Card
from worker_svc.tuning import packaged_lines

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's bf16 products are not those of the device.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
# What tables say of the card that kernels were measured on.
H200 = Card((9, 0), 132, "NVIDIA H200")
LINES = packaged_lines(H200)
# One rounding of inputs, probabilities and outputs each: bf16 keeps 8 bits, fp16 keeps 11.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Of products whose inputs are normed or whose outputs meet in gates, in `DTYPE`.
GATED_TOLERANCE = max(TOLERANCES[DTYPE], 4e-3)


def randn(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
    """Drawn on the CPU, so that all devices test the same."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def assert_near(out: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Relative to the whole, in double precision, by default as near as `out`'s dtype lets it; NaN is never near."""
    difference = out.double() - expected.double()
    limit = TOLERANCES[out.dtype] if tolerance is None else tolerance
    assert float(difference.norm() / expected.double().norm()) < limit


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An RMS norm, in double precision."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def gelu_gated(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, by tanh."""
    gate, up = gate_up.chunk(2, -1)
    return gelu(gate, approximate="tanh") * up


def silu_gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


def assert_replays_alike(compute: Callable[[], Tensor], times: int) -> None:
    """A graph of it gives, each time, bit for bit what it gives launched kernel by kernel; on a GPU."""
    expected = compute().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for _ in range(times):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def rotary_table(positions: int, head_dim: int) -> Tensor:
    """f32[positions, head_dim]: cosines, then sines."""
    frequencies = 1e4 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(positions).double()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1).float().to(DEVICE)


@dataclass(frozen=True)
class Paged:
    """A cache in which everything that no context names is NaN, and the contexts without holes beside it."""

    keys: Tensor  # [blocks, block_size, num_kv_heads, head_dim]
    values: Tensor
    tables: Tensor  # i32[slots, blocks]
    past_keys: list[Tensor]  # by slot [past, num_kv_heads, head_dim]
    past_values: list[Tensor]


def paged(
    past: list[int], room: list[int], num_kv_heads: int, head_dim: int, block_size: int, *, dtype: torch.dtype = DTYPE
) -> Paged:
    """Slot i has `past[i]` tokens and blocks for `room[i]`, in shuffled order; its table ends with a block of NaN."""
    counts = [-(-each // block_size) for each in room]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    poison = order[-1]
    shape = (len(order), block_size, num_kv_heads, head_dim)
    keys = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    values = torch.full_like(keys, float("nan"))
    tables = torch.full((len(past), max(counts) + 1), int(poison), dtype=torch.int32)
    past_keys, past_values, start = [], [], 0
    for slot, (length, count) in enumerate(zip(past, counts, strict=True)):
        blocks = order[start : start + count]
        start += count
        tables[slot, :count] = blocks
        cells = torch.arange(length)
        index = blocks[cells // block_size].long().to(DEVICE), (cells % block_size).to(DEVICE)
        past_keys.append(randn(length, num_kv_heads, head_dim, seed=10 + slot, dtype=dtype))
        past_values.append(randn(length, num_kv_heads, head_dim, seed=50 + slot, dtype=dtype))
        keys[index], values[index] = past_keys[-1], past_values[-1]
    return Paged(keys, values, tables.to(DEVICE), past_keys, past_values)


def cells_of(tables: Tensor, slot: int, positions: Tensor, block_size: int) -> Tensor:
    """i64: block * block_size + offset of each position."""
    return tables[slot, positions // block_size].long() * block_size + positions % block_size


def norm_rotate(heads: Tensor, weight: Tensor | None, eps: float, table: Tensor, positions: Tensor) -> Tensor:
    """heads [tokens, n, head_dim] normalised and rotated, in double precision."""
    x = heads.double()
    if weight is not None:
        x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    cos, sin = table[positions].double().unsqueeze(1).chunk(2, -1)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    temperature: tuple[int, float, int] = (0, 0.0, 0),
) -> Tensor:
    """query [tokens, num_heads, head_dim] from position `first` on over [context, num_kv_heads, head_dim], causally."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * query.shape[-1] ** -0.5
    places, last = (torch.arange(len(each), device=keys.device) for each in (keys, query))
    last = first + last[:, None]
    floor_scale, attn_scale, counted_from = temperature
    if floor_scale:
        scores = scores * (1 + attn_scale * ((last + counted_from) // floor_scale).double().log1p())
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    seen = places <= last
    if window is not None:
        seen &= places > last - window
    if chunk is not None:
        seen &= places // chunk == last // chunk
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(query), -1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], values)
