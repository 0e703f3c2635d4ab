"""Attention of many contexts as a Hopper streams it: which, by what, and against double precision."""

from functools import partial

import pytest
import torch
from decode_checks import check_decode
from hopper import compile_for_hopper
from kernel_inputs import DEVICE

from worker_svc.core.kernels.attention import decode as module
from worker_svc.core.kernels.attention import decode_stream
from worker_svc.core.kernels.attention.decode_stream import stream_shares, stream_warps
from worker_svc.core.kernels.attention.tuning import Shares, find_shares

needs_hopper = pytest.mark.skipif(not stream_warps(DEVICE, 16, 32, 8, 128, 2), reason="needs a Hopper GPU")


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
    many = partial(check_decode, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128, dtype=dtype)
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
        check_decode([0, 1, 15, 16, 17, 70, 300], num_heads=heads, num_kv_heads=kv_heads, head_dim=128, rounds=3)


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


def test_streams_have_tiles_of_as_many_tokens_as_have_room() -> None:
    assert find_shares(64, 8, 256, 132, 8) == Shares(132, 16, 3, 8, 4)
    assert find_shares(64, 4, 256, 132, 4) == Shares(264, 16, 3, 4, 4)
    assert find_shares(64, 4, 256, 132, 8) == Shares(132, 32, 3, 8, 2)
    assert find_shares(64, 2, 256, 132, 4) == Shares(264, 32, 3, 4, 2)
    assert find_shares(64, 2, 256, 132, 8) == Shares(132, 32, 3, 8, 2)
    assert find_shares(64, 1, 256, 132, 4) == Shares(264, 32, 3, 4, 2)
    assert find_shares(32, 2, 256, 132, 4) is None, "few contexts"
