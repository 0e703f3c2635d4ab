"""The reference: plain torch, runs on any device, softmax in fp32 or better. Sequences are read through the block
table; those that advance by one token go together, padded to the longest of their group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.core.attention.interface import AttentionKind, HeadNorms, LatentLayer
from worker_svc.core.attention.torch_latents import make_heads, make_values
from worker_svc.core.batch import Batch
from worker_svc.core.kernels.linear.unscaled import Unscaled
from worker_svc.core.kv_cache import KVCache, movable
from worker_svc.core.kv_scales import KEPT_DTYPE, narrow, widen
from worker_svc.core.layers.rotary import RotaryEmbedding, rotate
from worker_svc.core.models.spec import TemperatureSpec
from worker_svc.core.slots import I64
from worker_svc.core.states.slot_states import SlotStates
from worker_svc.core.states.torch_states import TorchStates
from worker_svc.core.transfer import upload

_GROUP_TOKENS = 1 << 17  # context tokens, padding included, that one group of decodes may gather at once


class _Reach(NamedTuple):
    """The way of some layers to what their tokens see."""

    tables: int  # index of the kind whose block tables lead there
    window: int | None  # as in `AttentionKind`, as the next
    chunk: int | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """The part of a group's contexts that some layers see; no block before it is read."""

    blocks: Tensor  # i64[num_seqs * blocks]: where their KV stands, padded with any block
    mask: Tensor  # bool[num_seqs, 1, queries_per_kv_head * query_len, blocks * block_size]: what each query sees
    unseen: Tensor  # i64[kv slots]: those of num_seqs * blocks * block_size that no query of their sequence may see


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of equal query length that attend in one call."""

    num_seqs: int
    query_len: int
    tokens: Tensor  # i64[num_seqs * query_len]: their rows in the flat columns
    seen: Mapping[_Reach, _Seen]


class TorchAttention:
    """Backend over one KV cache, for `num_heads` query heads."""

    def __init__(
        self, cache: KVCache, num_heads: int, kinds: Sequence[AttentionKind], states: SlotStates | None = None
    ) -> None:
        """`kinds`: by layer of the cache; `states`: of layers that have none."""
        self._states = states
        self._cache = cache
        self._kinds = kinds
        self._num_heads = num_heads
        self._reaches = [
            _Reach(tables, kind.window, kind.chunk) for tables, kind in zip(cache.kinds, kinds, strict=True)
        ]

    def prepare(
        self, batch: Batch, positions: Tensor, slot_mappings: Sequence[Tensor], block_tables: Sequence[Tensor]
    ) -> "TorchStepAttention":
        """Implement `AttentionBackend.prepare`."""
        groups = [self._group(batch, rows, block_tables) for rows in _group_rows(batch)]
        angles = {rotary: rotary.angles(positions) for rotary in {kind.rotary for kind in self._kinds}}
        layers = list(zip(self._kinds, self._reaches, strict=True))
        return TorchStepAttention(
            self._cache,
            self._num_heads,
            layers,
            angles,
            positions=positions,
            slot_mappings=slot_mappings,
            groups=groups,
            states=None if self._states is None else TorchStates(self._states, batch),
        )

    def _group(self, batch: Batch, rows: I64, block_tables: Sequence[Tensor]) -> _Group:
        query_len = int(batch.query_lens[rows[0]])
        tokens = (batch.query_starts[rows][:, None] + np.arange(query_len)).ravel()
        contexts = batch.context_lens[rows]
        slots, first, tokens_on_device = upload(block_tables[0].device, batch.slots[rows], contexts - query_len, tokens)
        return _Group(
            num_seqs=len(rows),
            query_len=query_len,
            tokens=tokens_on_device,
            seen={
                reach: self._seen(reach, query_len, contexts, slots, first, block_tables[reach.tables])
                for reach in set(self._reaches)
            },
        )

    def _seen(  # noqa: PLR0917
        self, reach: _Reach, query_len: int, contexts: I64, slots: Tensor, first: Tensor, table: Tensor
    ) -> _Seen:
        """`contexts` i64[num_seqs], and on the device `slots` and `first`, the positions of their first queries."""
        block_size, device, window = self._cache.shape.block_size, table.device, reach.window
        oldest = np.zeros_like(contexts) if window is None else np.maximum(0, contexts - query_len - window + 1)
        if reach.chunk is not None:
            oldest = np.maximum(oldest, (contexts - query_len) // reach.chunk * reach.chunk)
        begins = oldest // block_size  # blocks that no query sees
        num_blocks = int((-(-contexts // block_size) - begins).max())
        keys = (begins * block_size)[:, None] + np.arange(num_blocks * block_size)
        unseen = np.flatnonzero((keys >= contexts[:, None]) | (keys < oldest[:, None]))
        begins_on_device, unseen_on_device = upload(device, begins, unseen)
        places = begins_on_device.unsqueeze(1) + torch.arange(num_blocks, device=device)
        blocks = table[slots.unsqueeze(1), places.clamp_(max=table.shape[1] - 1)]
        offsets = torch.arange(num_blocks * block_size, device=device)
        positions = begins_on_device.unsqueeze(1) * block_size + offsets
        queries = first.unsqueeze(1) + torch.arange(query_len, device=device)
        mask = _mask(queries, positions, window, reach.chunk)
        queries_per_kv_head = self._num_heads // self._cache.shape.num_kv_heads
        return _Seen(blocks.flatten(), mask.repeat(1, queries_per_kv_head, 1).unsqueeze(1), unseen_on_device)


def _mask(queries: Tensor, keys: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """The keys at positions i64[seqs, keys] that queries at positions i64[seqs, queries] see: bool[seqs, queries,
    keys]."""
    last, keys = queries.unsqueeze(-1), keys.unsqueeze(1)
    mask = keys <= last
    if window is not None:
        mask &= keys > last - window
    return mask if chunk is None else mask & (keys >= last // chunk * chunk)


def _group_rows(batch: Batch) -> list[I64]:
    """Decodes by similar context length, within a bound on what they gather; every prefill alone."""
    decodes = np.flatnonzero(batch.query_lens == 1)
    decodes = decodes[np.argsort(batch.context_lens[decodes], kind="stable")]
    groups: list[I64] = list(np.flatnonzero(batch.query_lens > 1)[:, None])
    start = 0
    while start < len(decodes):
        # Sorted, so the last of a group is its longest: the group may grow while length * size stays in bounds.
        padded = batch.context_lens[decodes[start:]] * np.arange(1, len(decodes) - start + 1)
        size = max(1, int(np.searchsorted(padded, _GROUP_TOKENS, side="right")))
        groups.append(decodes[start : start + size])
        start += size
    return groups


class TorchStepAttention:
    """Implement `StepAttention`."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        layers: Sequence[tuple[AttentionKind, _Reach]],
        angles: Mapping[RotaryEmbedding, tuple[Tensor, Tensor]],
        *,
        positions: Tensor,
        slot_mappings: Sequence[Tensor],
        groups: list[_Group],
        states: TorchStates | None,
    ) -> None:
        self.positions = positions
        self.states = states
        self._cache = cache
        self._layers = layers
        self._angles = angles
        self._slot_mappings = slot_mappings
        self._groups = groups
        self._num_kv_heads = cache.shape.num_kv_heads
        self._queries_per_head = num_heads // cache.shape.num_kv_heads

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        head_norms: HeadNorms | None,
        unscaled: Unscaled | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Implement `StepAttention.attend`."""
        if unscaled is not None:
            qkv = (qkv * unscaled.scales()).to(qkv.dtype)
        (kind, reach), kept = self._layers[layer], self._cache.layer(layer)
        scales = self._cache.scales(layer)
        num_heads = self._num_kv_heads * self._queries_per_head
        heads = qkv.view(len(qkv), -1, self._cache.shape.head_dim)
        query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + self._num_kv_heads]
        if head_norms is not None:
            query, key = head_norms.query.normalize(query), head_norms.key.normalize(key)
        angles = self._angles[kind.rotary]
        query, key = rotate(query, *angles), rotate(key, *angles)
        if kind.temperature is not None:
            query = (query * _tempered(kind.temperature, self.positions)).to(query.dtype)
        slot_mapping = self._slot_mappings[reach.tables]
        _write(kept[0], slot_mapping, scales[0], key)
        if not self._cache.shape.shares_values:
            _write(kept[1], slot_mapping, scales[1], heads[:, num_heads + self._num_kv_heads :])
        out = torch.empty_like(query)
        for group in self._groups:
            attended = self._attend_group(kind, group, group.seen[reach], query, kept, scales, sinks=sinks)
            out.index_copy_(0, group.tokens, attended)
        return out.flatten(1)

    def attend_latents(self, layer: int, queries: Tensor, down: Tensor, weights: LatentLayer) -> Tensor:
        """Implement `StepAttention.attend_latents`: one head that is key and value of all."""
        return make_values(self.attend(layer, make_heads(queries, down, weights), None), weights)

    def _attend_group(  # noqa: PLR0917
        self,
        kind: AttentionKind,
        group: _Group,
        seen: _Seen,
        query: Tensor,
        kept: tuple[Tensor, Tensor],
        scales: tuple[float, float],
        *,
        sinks: Tensor | None,
    ) -> Tensor:
        head_dim = query.shape[-1]
        seqs, query_len, per_head = group.num_seqs, group.query_len, self._queries_per_head
        # The query heads that share a key-value head stand as further queries of it: keys need no repeat.
        folded = (
            query.index_select(0, group.tokens)
            .view(seqs, query_len, self._num_kv_heads, per_head, head_dim)
            .permute(0, 2, 3, 1, 4)
            .reshape(seqs, self._num_kv_heads, per_head * query_len, head_dim)
        )

        # Whole blocks are gathered: far fewer and longer pieces than single KV slots. After a context is what others
        # have left there, and a mask does not hide all of it: 0 times NaN is NaN.
        def gather(cached: Tensor, scale: float) -> Tensor:
            read = movable(cached).index_select(0, seen.blocks).flatten(0, 1)
            if cached.dtype == KEPT_DTYPE:
                read = widen(read.view(KEPT_DTYPE), scale, query.dtype)
            read.index_fill_(0, seen.unseen, 0.0)
            return read.view(seqs, -1, self._num_kv_heads, head_dim).transpose(1, 2)

        gathered_keys = gather(kept[0], scales[0])
        gathered_values = gathered_keys if self._cache.shape.shares_values else gather(kept[1], scales[1])
        if sinks is not None:
            sinks = sinks.view(self._num_kv_heads, per_head, 1).expand(-1, -1, query_len).reshape(1, *folded.shape[1:3])
        attended = _attend(kind, folded, gathered_keys, gathered_values, seen.mask, sinks=sinks)
        return (
            attended.reshape(seqs, self._num_kv_heads, per_head, query_len, head_dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(seqs * query_len, -1, head_dim)
        )


def _tempered(temperature: TemperatureSpec, positions: Tensor) -> Tensor:
    """The factors f32[tokens, 1, 1] of queries at positions i64[tokens]."""
    steps = (positions + temperature.first) // temperature.floor_scale
    return (1.0 + temperature.attn_scale * steps.float().log1p()).view(-1, 1, 1)


def _write(cached: Tensor, slot_mapping: Tensor, scale: float, new: Tensor) -> None:
    new = narrow(new, scale) if cached.dtype == KEPT_DTYPE else new
    movable(cached).flatten(0, 1).index_copy_(0, slot_mapping, movable(new))


def _attend(
    kind: AttentionKind, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, sinks: Tensor | None
) -> Tensor:
    """softmax(q k^T) v of what the mask lets each query see; sinks [1, heads, queries]."""
    if kind.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=kind.scale)
    scores = query.float() @ keys.float().transpose(-1, -2) * kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().unsqueeze(-1).expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(query.dtype)
