"""Attention over keys and values that are kept as 8-bit floats, against double precision over what they stand for."""

from functools import partial
from typing import Any

import pytest
import torch
from hopper import NotLaunched, compile_for_hopper
from kernel_inputs import DEVICE, DTYPE, assert_near, attend, cells_of, norm_rotate, paged, randn, rotary_table
from torch import Tensor

from worker_svc.core.kernels.attention import decode as module
from worker_svc.core.kernels.attention.decode import DecodeAttention, DecodeRows
from worker_svc.core.kernels.attention.decode_stream import stream_shares
from worker_svc.core.kernels.attention.prefill import PrefillTiles, prefill_attention
from worker_svc.core.kernels.attention.rope import rope_write
from worker_svc.core.kernels.attention.tuning import ContextCut, Shares
from worker_svc.core.kernels.linear.unscaled import Unscaled
from worker_svc.core.kv_scales import KEPT_DTYPE, narrow, widen

EPS = 1e-6
SCALES = (0.013, 0.0071)  # the largest keys are beyond 448 of these
HEADS, KV_HEADS = 6, 2
needs_eight_bits = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE) < (8, 9), reason="needs 8-bit floats"
)


class EightBits:
    """A cache in which everything that no context names is NaN, and what contexts have in it."""

    def __init__(self, past: list[int], room: list[int], head_dim: int, *, num_kv_heads: int = KV_HEADS) -> None:
        self.block_size = 16
        cache = paged(past, room, num_kv_heads, head_dim, self.block_size)
        self.tables = cache.tables
        self.keys, self.values = narrow(3 * cache.keys, SCALES[0]), narrow(3 * cache.values, SCALES[1])

    def of(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """The keys and values [length, KV_HEADS, head_dim] of a context."""
        cells = cells_of(self.tables, slot, torch.arange(length, device=DEVICE), self.block_size)
        return tuple(  # type: ignore[return-value]
            widen(each.view(torch.uint8).flatten(0, 1)[cells].view(KEPT_DTYPE), scale, torch.float64)
            for each, scale in zip((self.keys, self.values), SCALES, strict=True)
        )


def assert_kept(found: Tensor, exact: Tensor, scale: float) -> None:
    """Almost all are the nearest of those that can be kept, none is further off than the next."""
    nearest = widen(narrow(exact, scale), scale, torch.float64)
    steps = nearest.abs() / 8 + scale * 2**-9
    assert bool(((found - nearest).abs() <= steps * 1.01).all())
    assert float((found == nearest).double().mean()) > 0.98


def check_decode(
    past: list[int],
    *,
    head_dim: int = 64,
    hidden_size: int | None = None,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    **kind: Any,
) -> None:
    """`heads`: of queries, and of keys."""
    count, (num_heads, num_kv_heads) = len(past), heads
    cache = EightBits(past, [each + 1 for each in past], head_dim, num_kv_heads=num_kv_heads)
    table = rotary_table(max(past) + 1, head_dim)
    qkv = randn(count, (num_heads + 2 * num_kv_heads) * head_dim, seed=1, scale=2.0)
    norms = 1 + randn(head_dim, seed=2, scale=0.2), 1 + randn(head_dim, seed=3, scale=0.2)
    unscaled = Unscaled(randn(count, hidden_size, seed=4, scale=3.0), EPS) if hidden_size is not None else None
    exact = qkv.double() if unscaled is None else qkv.double() * unscaled.scales().double()
    decode = DecodeAttention(
        *(count, num_heads, num_kv_heads, head_dim, table),
        scale=head_dim**-0.5,
        block_size=16,
        item_bytes=1,
        has_scales=True,
        **kind,
    )
    contexts, slots = torch.tensor(past, device=DEVICE) + 1, torch.arange(count, device=DEVICE)
    rows = DecodeRows(slots, slots, contexts)
    decode.plan(rows, cache.tables)
    out = torch.full((count, num_heads * head_dim), float("nan"), dtype=DTYPE, device=DEVICE)
    given = qkv.clone(), norms, EPS, rows, cache.tables, cache.keys, cache.values, out
    decode.attend(*given, unscaled, scales=SCALES)
    for slot, length in enumerate(past):
        position = torch.tensor([length], device=DEVICE)
        query, key, value = exact[slot].view(1, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), 1)
        keys, values = cache.of(slot, length + 1)
        assert_kept(keys[-1:], norm_rotate(key, norms[1], EPS, table, position), SCALES[0])
        assert_kept(values[-1:], value, SCALES[1])
        attended = attend(norm_rotate(query, norms[0], EPS, table, position), keys, values, length, **kind)
        assert_near(out[slot], attended.flatten())


@needs_eight_bits
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_new_tokens_attend_to_what_is_kept_their_own_keys_included(head_dim: int) -> None:
    check_decode([0, 1, 15, 16, 17, 70], head_dim=head_dim)
    check_decode([33, 0], head_dim=head_dim, hidden_size=96)


@needs_eight_bits
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("splits", [1, 3])
def test_contexts_are_cut_into_splits(monkeypatch: pytest.MonkeyPatch, splits: int, ahead: int) -> None:
    monkeypatch.setattr(module, "find_cut", lambda *_: ContextCut(splits, 20, 16, 3, 2, None, ahead=ahead))
    check_decode([0, 1, 15, 16, 17, 70])
    check_decode([40, 5], window=9, softcap=2.0)
    check_decode([40, 5], chunk=20, temperature=(8, 0.3, 1))


@needs_eight_bits
@pytest.mark.parametrize("programs", [1, 3, 7])
def test_shares_of_all_contexts(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr(module, "find_shares", lambda *_: Shares(programs, 16, 3, 2, 1))
    check_decode([0, 1, 15, 16, 17, 70])
    check_decode([33, 0, 90], hidden_size=96)


@needs_eight_bits
def test_many_contexts_are_cut_into_shares() -> None:
    """On a Hopper they are streamed."""
    check_decode([2 * each for each in range(40)])
    if DEVICE.type == "cuda":
        for heads in ((32, 8), (16, 8), (28, 4), (64, 4), (26, 2), (38, 2), (8, 1), (64, 1)):
            check_decode([15, 16, 17, 0, 2500, 31, 32, 33] * 5, head_dim=128, heads=heads)
            check_decode([700 - index for index in range(64)], head_dim=128, heads=heads, hidden_size=1024)
            check_decode([191] * 256, head_dim=128, heads=heads)  # left whole


@needs_eight_bits
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("hidden_size", [None, 96])
@pytest.mark.parametrize("kind", [{}, {"softcap": 2.0, "window": 11}, {"chunk": 32}], ids=str)
def test_chunks_are_written_and_attend_to_what_is_kept(
    head_dim: int, hidden_size: int | None, kind: dict[str, Any]
) -> None:
    past, length = 40, 75
    cache, table = EightBits([past], [past + length], head_dim), rotary_table(past + length, head_dim)
    positions = torch.arange(past, past + length, device=DEVICE)
    qkv = randn(length, (HEADS + 2 * KV_HEADS) * head_dim, seed=1, scale=2.0)
    unscaled = Unscaled(randn(length, hidden_size, seed=4, scale=3.0), EPS) if hidden_size is not None else None
    exact = qkv.double() if unscaled is None else qkv.double() * unscaled.scales().double()
    cells = cells_of(cache.tables, 0, positions, 16)
    rope_write(qkv, None, EPS, table, positions, cells, cache.keys, cache.values, unscaled, scales=SCALES)
    out = torch.full((length, HEADS * head_dim), float("nan"), dtype=DTYPE, device=DEVICE)
    tiles = PrefillTiles(*torch.tensor([[0, 64], [past, past + 64], [64, length - 64], [0, 0]], device=DEVICE))
    prefill_attention(*(qkv, tiles, cache.tables, cache.keys, cache.values, out, head_dim**-0.5), scales=SCALES, **kind)
    query, key, value = exact.view(length, -1, head_dim).split((HEADS, KV_HEADS, KV_HEADS), 1)
    keys, values = cache.of(0, past + length)
    assert_kept(keys[past:], norm_rotate(key, None, EPS, table, positions), SCALES[0])
    assert_kept(values[past:], value, SCALES[1])
    attended = attend(norm_rotate(query, None, EPS, table, positions), keys, values, past, **kind)
    assert_near(out, attended.flatten(1))


def launch_decode() -> None:
    for count in (1, 16, 64, 200):  # by few splits that begin early, by more, ahead by stages, by none
        qkv, out = torch.zeros(2, 200, 6 * 128, dtype=torch.bfloat16)
        cache, table = torch.zeros(9, 16, 1, 128, dtype=KEPT_DTYPE), torch.zeros(64, 128)
        column, tables = torch.zeros(count, dtype=torch.int64), torch.zeros(9, 9, dtype=torch.int32)
        # Capped scores are left to splits.
        decode = DecodeAttention(count, 4, 1, 128, table, scale=0.1, block_size=16, has_scales=True, softcap=30.0)
        decode.attend(qkv, None, EPS, DecodeRows(column, column, column), tables, cache, cache, out, scales=SCALES)


def launch_shares(other: str) -> None:
    """One of both kernels; in a process that is for this alone."""
    setattr(module, other, NotLaunched())
    qkv, out = torch.zeros(2, 64, 6 * 128, dtype=torch.bfloat16)
    cache, table = torch.zeros(9, 16, 1, 128, dtype=KEPT_DTYPE), torch.zeros(64, 128)
    column, tables = torch.zeros(64, dtype=torch.int64), torch.zeros(9, 9, dtype=torch.int32)
    decode = DecodeAttention(64, 4, 1, 128, table, scale=0.1, block_size=16, item_bytes=1, has_scales=True)
    decode.attend(qkv, None, EPS, DecodeRows(column, column, column), tables, cache, cache, out, scales=SCALES)


def launch_streams() -> None:
    for heads, kv_heads, warps, tokens in ((16, 4, 4, 16), (32, 8, 8, 16), (26, 2, 4, 32), (64, 4, 8, 32)):
        qkv, cache = torch.zeros(64, (heads + 2 * kv_heads) * 128).bfloat16(), torch.zeros(9, 16, kv_heads, 128)
        column, ints, floats = torch.zeros(64, dtype=torch.int64), torch.zeros(9, 9, dtype=torch.int32), torch.zeros(9)
        cache, out = cache.to(KEPT_DTYPE), qkv.new_zeros(64, heads * 128)
        stream_shares(
            Shares(264, tokens, 3, warps, 2),
            qkv,
            (column,) * 3,
            ints,
            ints,
            cache,
            cache,
            out,
            (floats, floats, ints),
            0.5,
        )


def launch_prefill() -> None:
    qkv, out = torch.zeros(2, 64, 6 * 128, dtype=torch.bfloat16)
    cache, tables = torch.zeros(9, 16, 1, 128, dtype=KEPT_DTYPE), torch.zeros(9, 9, dtype=torch.int32)
    tiles = PrefillTiles(*torch.zeros(4, 1, dtype=torch.int64))
    prefill_attention(qkv, tiles, tables, cache, cache, out[:, : 4 * 128], 128**-0.5, scales=SCALES)


def launch_write() -> None:
    qkv, cache = torch.zeros(64, 6 * 128, dtype=torch.bfloat16), torch.zeros(9, 16, 1, 128, dtype=KEPT_DTYPE)
    column = torch.zeros(64, dtype=torch.int64)
    rope_write(qkv, None, EPS, torch.zeros(64, 128), column, column, cache, cache, scales=SCALES)


@pytest.mark.parametrize(
    ("kernel", "instruction", "launch"),
    [
        ("decode.attend_splits", "cvt.rn.f16x2.e4m3x2", launch_decode),
        ("decode.attend_splits", "cvt.rn.satfinite.e4m3x2.f32", launch_decode),
        ("decode.attend_shares", "cvt.rn.f16x2.e4m3x2", partial(launch_shares, "finish_heads")),
        ("decode.finish_heads", "cvt.rn.satfinite.e4m3x2.f32", partial(launch_shares, "attend_shares")),
        ("decode_stream._stream_shares", "cvt.rn.f16x2.e4m3x2", launch_streams),
        ("prefill._prefill_attention", "cvt.rn.f16x2.e4m3x2", launch_prefill),
        ("rope._rope_write", "cvt.rn.satfinite.e4m3x2.f32", launch_write),
    ],
    ids=["read", "write", "shares", "finish", "streams", "prefill", "rope"],
)
def test_kernels_compile_for_a_hopper_which_converts_by_itself(
    kernel: str, instruction: str, launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_for_hopper(monkeypatch, f"worker_svc.core.kernels.attention.{kernel}", instruction, launch)
