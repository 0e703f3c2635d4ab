"""Own kernels for half precision on CUDA: sequences that advance by one token go through the decode kernel, which takes
the norms, the rotation and the cache's write along; longer chunks through the prefill kernel, or through a
FlashAttention package where there is enough to do that its calls, slow on the host, are hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.core.attention.chunk_work import LatentForm, LatentWork, Room, SpanForm, Spans, TileForm, Work, WorkForm
from worker_svc.core.attention.flash_attention import Chunks, PagedAttention
from worker_svc.core.attention.interface import AttentionKind, HeadNorms, LatentLayer
from worker_svc.core.attention.triton_latents import LatentChunks, LatentStep, TritonLatents
from worker_svc.core.batch import Batch
from worker_svc.core.kernels.attention.decode import DecodeAttention, DecodeRows
from worker_svc.core.kernels.attention.prefill import PrefillTiles, prefill_attention
from worker_svc.core.kernels.attention.prefill_stream import can_stream_prefill, stream_prefill
from worker_svc.core.kernels.attention.rope import rope_write
from worker_svc.core.kernels.delta.sequences import Sequences
from worker_svc.core.kernels.linear.norm import scale_rows
from worker_svc.core.kernels.linear.unscaled import MOST_SCALED_ROWS, Unscaled
from worker_svc.core.kv_cache import KVCache
from worker_svc.core.states.slot_states import SlotStates
from worker_svc.core.states.triton_states import ChunkedStates, DecodedStates
from worker_svc.core.transfer import upload

# What FlashAttention-4 was measured on an H200 to win at. Its calls take the host 0.1 ms, in which the prefill kernel
# does the larger of these; many tokens keep the device busy for as long elsewhere, so that the smaller will do.
_FLASH_FLOPS, _FLASH_FLOPS_OF_MANY = 30e9, 10e9
_MANY_TOKENS = 4096
_FLASH_QUERIES = 128  # fewer, over all queries of a key, would be another variant, to be compiled while serving

# Sequences that advance by one token beside chunks are attended to as if there were so many, or as many as slots:
# kernels for numbers between would be compiled while serving.
DECODES_BESIDE_CHUNKS = (16, 64)


class TritonAttention:
    """Backend over one KV cache, for `num_heads` query heads and at most `max_num_seqs` sequences a step."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        kinds: Sequence[AttentionKind],
        max_num_seqs: int,
        states: SlotStates | None = None,
    ) -> None:
        """`kinds`: by layer of the cache; `states`: of layers that have none."""
        self.slot_states = states
        self.cache = cache
        self.kinds = kinds
        self.num_heads = num_heads
        self.flash: PagedAttention | None = None
        # Layers that attend alike see as much, and so are of one kind in the cache.
        self.tables = dict(zip(kinds, cache.kinds, strict=True))
        different = dict.fromkeys(kinds)
        self._max_num_seqs = max_num_seqs
        self.decodes = {kind: self._make_decode(kind, max_num_seqs) for kind in different if kind.latent is None}
        self.latents = {
            kind: TritonLatents(kind, kind.latent, num_heads, max_num_seqs, cache.shape.dtype.itemsize)
            for kind in different
            if kind.latent is not None
        }
        shape = cache.shape
        self.can_stream = shape.scales is None and can_stream_prefill(
            cache.keys.device,
            shape.block_size,
            num_heads // shape.num_kv_heads,
            shape.head_dim,
            shape.dtype.itemsize,
        )
        assert len({kind.latent for kind in kinds}) == 1, "all layers attend to latents of one shape, or none does"

    def _make_decode(self, kind: AttentionKind, max_num_seqs: int) -> DecodeAttention:
        shape = self.cache.shape
        assert kind.window is None or kind.chunk is None, "kernels know one bound of what is seen"
        return DecodeAttention(
            max_num_seqs,
            self.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            kind.rotary.table,
            scale=kind.scale,
            block_size=shape.block_size,
            item_bytes=shape.dtype.itemsize,
            window=kind.window,
            softcap=kind.softcap,
            has_sinks=kind.has_sinks,
            chunk=kind.chunk,
            temperature=_temperature(kind),
            has_scales=shape.scales is not None,
        )

    def form(self, room: Room, *, by_flash: bool) -> WorkForm:
        """Who attends to chunks: a FlashAttention package, or own kernels."""
        if by_flash:
            return SpanForm(room)
        latent = self.kinds[0].latent
        return TileForm(room) if latent is None else LatentForm(latent, room)

    def takes_finished(self, sequences: int) -> bool:
        """See `DecodeAttention.takes_finished`: those of all layers do, or none. Latents are always written ahead."""
        return all(decode.takes_finished(sequences) for decode in self.decodes.values())

    @property
    def takes_flash(self) -> bool:
        """Return whether a FlashAttention package may attend: in all layers, since steps are prepared for it once."""
        return self.cache.shape.scales is None and all(kind.is_plain for kind in self.kinds)

    def use_flash(self, flash: PagedAttention) -> None:
        """From now on a FlashAttention package attends where that gains much; only if `takes_flash`."""
        self._compile(flash)
        self.flash = flash

    def prepare(
        self, batch: Batch, positions: Tensor, slot_mappings: Sequence[Tensor], block_tables: Sequence[Tensor]
    ) -> "TritonStepAttention":
        """Implement `AttentionBackend.prepare`."""
        num_decodes = batch.num_decodes
        query_lens, contexts_of_chunks = batch.query_lens[num_decodes:], batch.context_lens[num_decodes:]
        longest = int(query_lens.max(initial=0)), int(contexts_of_chunks.max(initial=0))
        room = Room(batch.num_tokens - num_decodes, *longest)
        form = self.form(room, by_flash=self._suits_flash(batch, num_decodes))
        slots, contexts, ends, rows, decode_slots, decode_contexts, count, *columns = upload(
            positions.device,
            batch.slots,
            batch.context_lens,
            batch.query_starts[1:],
            np.arange(num_decodes),
            batch.slots[:num_decodes],
            batch.context_lens[:num_decodes],
            np.array([num_decodes]),
            *form.columns(batch, num_decodes),
        )
        if num_decodes == len(batch.slots):
            return self.prepare_decode(DecodeRows(rows, decode_slots, decode_contexts), block_tables)
        return self.prepare_chunks(
            DecodeRows(rows, decode_slots, decode_contexts, self._as_many(num_decodes)),
            count,
            form.work(columns),
            Sequences(slots, contexts, ends),
            positions=positions,
            slot_mappings=slot_mappings,
            block_tables=block_tables,
        )

    def _as_many(self, num_decodes: int) -> int:
        """See `DECODES_BESIDE_CHUNKS`."""
        rooms = (count for count in DECODES_BESIDE_CHUNKS if num_decodes <= count < self._max_num_seqs)
        return next(rooms, self._max_num_seqs) if num_decodes else 0

    def prepare_decode(self, rows: DecodeRows, block_tables: Sequence[Tensor]) -> "TritonStepAttention":
        """The attention of a step in which all sequences advance by one token."""
        states = None
        if self.slot_states is not None:
            states = DecodedStates(self.slot_states, rows.slots, rows.contexts)
        return TritonStepAttention(self, block_tables, rows, chunked=None, states=states)

    def prepare_chunks(
        self,
        decode_rows: DecodeRows,
        num_decodes: Tensor,
        work: Work,
        sequences: Sequences,
        *,
        positions: Tensor,
        slot_mappings: Sequence[Tensor],
        block_tables: Sequence[Tensor],
    ) -> "TritonStepAttention":
        """The attention of a step whose tokens are those of `decode_rows`, `num_decodes` i64[1] of which are the first
        of the flat columns, and all after these, as `work` of `form` says. Further decode rows must stand where
        nobody's tokens do, and only where `takes_finished`. `sequences`: of all tokens, for layers that keep a state.
        """
        # Where that attends, all layers see all tokens: they are of one kind.
        chunks = self._flash_chunks(work, block_tables[0]) if isinstance(work, Spans) else work
        chunked = _Chunked(chunks, positions, slot_mappings, num_decodes)
        states = None if self.slot_states is None else ChunkedStates(self.slot_states, sequences)
        return TritonStepAttention(self, block_tables, decode_rows, chunked, states)

    def gains_by_flash(self, batch: Batch, first: int) -> bool:
        """Return whether a FlashAttention package is there that gains more at the sequences from `first` on than
        what launching the step kernel by kernel, which it may ask for, costs.
        """
        return self._can_flash(batch, first) and self._flops(batch, first) >= _FLASH_FLOPS

    def _suits_flash(self, batch: Batch, first: int) -> bool:
        is_many = batch.num_tokens >= _MANY_TOKENS
        least = _FLASH_FLOPS_OF_MANY if is_many else _FLASH_FLOPS
        return self._can_flash(batch, first) and self._flops(batch, first) >= least

    def _can_flash(self, batch: Batch, first: int) -> bool:
        if self.flash is None or first == len(batch.slots):
            return False
        longest = int(batch.query_lens[first:].max())
        return longest * self.num_heads > _FLASH_QUERIES * self.cache.shape.num_kv_heads

    def _flops(self, batch: Batch, first: int) -> float:
        query_lens, contexts = batch.query_lens[first:], batch.context_lens[first:]
        pairs = int((query_lens * (2 * contexts - query_lens)).sum()) / 2
        return 4 * self.num_heads * self.cache.shape.head_dim * pairs

    def _flash_chunks(self, spans: Spans, block_tables: Tensor) -> Chunks:
        num_blocks = -(-spans.longest_context // self.cache.shape.block_size)
        return Chunks(
            starts=spans.starts.to(torch.int32),
            contexts=spans.contexts.to(torch.int32),
            tables=block_tables[spans.slots, :num_blocks],
            longest_query=spans.longest_query,
            longest_context=spans.longest_context,
        )

    def _compile(self, flash: PagedAttention) -> None:
        """Packages may compile at their first call."""
        keys, values = self.cache.layer(0)
        device, num_tokens = keys.device, 2 * _FLASH_QUERIES
        num_blocks = -(-num_tokens // keys.shape[1])
        starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
        tables = torch.zeros(1, num_blocks, dtype=torch.int32, device=device)
        query = torch.zeros(num_tokens, self.num_heads, keys.shape[-1], dtype=keys.dtype, device=device)
        flash(query, keys, values, Chunks(starts, starts[1:], tables, num_tokens, num_tokens), self.kinds[0].scale)


@dataclass(frozen=True, slots=True)
class _Chunked:
    """The tokens of a step that come in chunks, the last of the flat columns."""

    work: Chunks | PrefillTiles | LatentWork
    positions: Tensor  # i64[tokens] of the step, as the next, of each kind of layers in the cache
    slot_mappings: Sequence[Tensor]
    num_decodes: Tensor  # i64[1]: tokens of the step that stand before them


class TritonStepAttention:
    """Implement `StepAttention`."""

    def __init__(
        self,
        backend: TritonAttention,
        block_tables: Sequence[Tensor],
        decode_rows: DecodeRows,
        chunked: _Chunked | None,
        states: DecodedStates | ChunkedStates | None,
    ) -> None:
        self.states = states
        self._backend = backend
        self._block_tables = block_tables
        self._decode_rows = decode_rows
        self._chunked = chunked
        for kind, decode in backend.decodes.items():
            decode.plan(decode_rows, block_tables[backend.tables[kind]])

    @property
    def positions(self) -> Tensor:
        """Implement `StepAttention.positions`."""
        return self._decode_rows.contexts - 1 if self._chunked is None else self._chunked.positions

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        head_norms: HeadNorms | None,
        unscaled: Unscaled | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Implement `StepAttention.attend`."""
        backend, num_decodes = self._backend, len(self._decode_rows)
        kind = backend.kinds[layer]
        place = backend.tables[kind]
        tables = self._block_tables[place]
        decode = backend.decodes[kind]
        keys, values = backend.cache.layer(layer)
        scales = backend.cache.scales(layer)
        norms, eps = None, 0.0
        if head_norms is not None:
            norms, eps = (head_norms.query.weight, head_norms.key.weight), head_norms.query.eps
        # What is done to the heads of chunks is done to decodes' in the same launch, if these can have it done.
        is_finished = self._chunked is not None and backend.takes_finished(self._decode_rows.kernels_for)
        if (chunked := self._chunked) is not None:
            rope_write(
                qkv,
                norms,
                eps,
                kind.rotary.table,
                chunked.positions,
                chunked.slot_mappings[place],
                keys,
                values,
                unscaled,
                first=0 if is_finished else num_decodes,
                num_scaled=chunked.num_decodes if is_finished else None,
                scale=decode.query_scale * scales[0],
                scales=scales,
            )
        out = self._attend_chunks(layer, tables, qkv, sinks)
        if num_decodes:
            if unscaled is not None and num_decodes <= MOST_SCALED_ROWS and not is_finished:
                # So few come scaled where no chunks are: beside chunks they shall not need another variant.
                scale_rows(qkv[:num_decodes], unscaled)
                unscaled = None
            rows = self._decode_rows
            given = qkv, norms, eps, rows, tables, keys, values, out
            decode.attend(*given, unscaled, sinks, scales=scales, is_finished=is_finished)
        return out

    def attend_latents(self, layer: int, queries: Tensor, down: Tensor, weights: LatentLayer) -> Tensor:
        """Implement `StepAttention.attend_latents`."""
        backend, chunked, chunks = self._backend, self._chunked, None
        kind, (cached, _) = backend.kinds[layer], backend.cache.layer(layer)
        place = backend.tables[kind]
        if chunked is not None:
            assert isinstance(chunked.work, LatentWork), "no package attends to latents"
            chunks = LatentChunks(chunked.work, chunked.positions, chunked.slot_mappings[place])
        step = LatentStep(self._decode_rows, chunks, self._block_tables[place], cached)
        return backend.latents[kind].attend(queries, down, weights, step)

    def _attend_chunks(self, layer: int, tables: Tensor, qkv: Tensor, sinks: Tensor | None) -> Tensor:
        """A place for the heads of all tokens, in which those of chunks are attended."""
        backend, work = self._backend, self._chunked.work if self._chunked is not None else None
        kind, (keys, values) = backend.kinds[layer], backend.cache.layer(layer)
        if isinstance(work, Chunks) and backend.flash is not None:
            query = qkv.view(len(qkv), -1, keys.shape[-1])[:, : backend.num_heads]
            return backend.flash(query, keys, values, work, kind.scale).flatten(1)
        out = torch.empty(len(qkv), backend.num_heads * keys.shape[-1], dtype=qkv.dtype, device=qkv.device)
        if isinstance(work, PrefillTiles) and backend.can_stream and kind.is_plain:
            stream_prefill(qkv, work, tables, keys, values, out, kind.scale)
        elif isinstance(work, PrefillTiles):
            prefill_attention(
                qkv,
                work,
                tables,
                keys,
                values,
                out,
                kind.scale,
                window=kind.window,
                softcap=kind.softcap,
                sinks=sinks,
                chunk=kind.chunk,
                temperature=_temperature(kind),
                scales=backend.cache.scales(layer),
            )
        return out


def _temperature(kind: AttentionKind) -> tuple[int, float, int]:
    """As kernels take it."""
    tempered = kind.temperature
    return (tempered.floor_scale, tempered.attn_scale, tempered.first) if tempered is not None else (0, 0.0, 0)
