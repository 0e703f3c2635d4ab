"""Latent attention by own kernels: sequences that advance by one token meet latents; chunks of prompts do, too, or have
their contexts brought to all heads, as their step says.
"""

from dataclasses import dataclass

from torch import Tensor

from worker_svc.core.attention.chunk_work import LatentWork
from worker_svc.core.attention.interface import AttentionKind, LatentLayer
from worker_svc.core.kernels.attention.decode import DecodeRows
from worker_svc.core.kernels.attention.latent import LatentDims, LatentKernels
from worker_svc.core.kernels.attention.latent_expanded import attend_expanded, expand
from worker_svc.core.kernels.attention.latent_heads import make_heads, make_values
from worker_svc.core.kernels.attention.latent_shape import LatentShape


@dataclass(frozen=True, slots=True)
class LatentChunks:
    """The tokens of a step that come in chunks, and where all of its tokens go."""

    work: LatentWork
    positions: Tensor  # i64[tokens] of the step, as the next
    slot_mapping: Tensor


@dataclass(frozen=True, slots=True)
class LatentStep:
    """A step's tokens, and where the latents of its sequences are."""

    rows: DecodeRows
    chunks: LatentChunks | None  # None: all advance by one token
    tables: Tensor
    cached: Tensor


class TritonLatents:
    """Of layers that attend alike, for `num_heads` query heads and at most `max_num_seqs` sequences a step."""

    def __init__(
        self, kind: AttentionKind, shape: LatentShape, num_heads: int, max_num_seqs: int, item_bytes: int
    ) -> None:
        """item_bytes: of a number in the cache."""
        assert kind == AttentionKind(kind.rotary, kind.scale, latent=shape), "latents are seen as they are"
        self._shape, self._rotary, self._scale = shape, kind.rotary.table, kind.scale
        dims = LatentDims(shape.rank, shape.rotated)
        self._kernels = LatentKernels(max_num_seqs, num_heads, dims, self._rotary, self._scale, item_bytes)

    def attend(self, queries: Tensor, down: Tensor, weights: LatentLayer, step: LatentStep) -> Tensor:
        """See `StepAttention.attend_latents`; all latents are written before any is read."""
        shape, kernels, up = self._shape, self._kernels, weights.up
        rows, chunks, tables, cached = step.rows, step.chunks, step.tables, step.cached
        expanded = chunks.work.expanded if chunks is not None else None
        num_absorbed = expanded.num_absorbed if expanded is not None else None
        norm = weights.norm.weight, weights.norm.eps
        heads = make_heads(queries, down, norm, up, shape, num_absorbed)
        out = queries.new_empty(len(queries), len(up) * shape.values)
        attended = heads.new_empty(len(heads), len(up) * cached.shape[-1])
        if chunks is None:
            kernels.write_decodes(heads, rows, tables, cached)
        else:
            kernels.write_tokens(heads, chunks.positions, chunks.slot_mapping, cached)
            kernels.prefill(heads, chunks.work.absorbed, tables, cached, attended)
        if expanded is not None:
            contexts = expand(cached, up, expanded.contexts, tables, shape, expanded.room)
            attend_expanded(queries, contexts, expanded.queries, self._rotary, self._scale, shape, out)
        if len(rows):
            kernels.decode(heads, rows, tables, cached, attended)
        make_values(attended, up, shape, out, num_absorbed)
        return out
