"""Decode attention of a batch against double precision."""

from functools import partial

import torch
from kernel_inputs import DEVICE, DTYPE, assert_near, attend, cells_of, norm_rotate, paged, randn, rotary_table

from worker_svc.core.kernels.attention.decode import DecodeAttention, DecodeRows
from worker_svc.core.kernels.linear.unscaled import Unscaled

EPS = 1e-5


def check_decode(
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
