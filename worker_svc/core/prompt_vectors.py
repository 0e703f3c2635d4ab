"""Vectors of prompts, chunk by chunk: which rows of a batch count for them, and what these add up to."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from contract.domain.plan import U32, Admission
from contract.domain.pooling import Pooling, PoolingKind
from worker_svc.core.batch import Batch
from worker_svc.core.interface import plan_error
from worker_svc.core.slots import F32, I64


class PooledPrompt:
    """The prompt of one sequence, growing. Begun by who launches, gone on with by who reads results."""

    __slots__ = ("num_tokens", "pooling", "request_id", "total")

    def __init__(self, admission: Admission, pooling: Pooling) -> None:
        """Nothing of it is computed in this slot so far.

        Raises:
            PenstockError: INTERNAL: tokens whose hidden states count are computed already.
        """
        if pooling.needs_whole_prompt and admission.num_computed_tokens:
            raise plan_error(f"slot {admission.slot} is to pool a prompt of which a part is computed")
        self.request_id = admission.request_id
        self.pooling = pooling
        self.num_tokens = admission.num_prompt_tokens
        self.total: F32 | None = None  # f32[hidden_size], of the hidden states that count

    def rows(self, start: int, end: int) -> tuple[int, int]:
        """The tokens from `start` to `end` that count; as many as none, if none do."""
        match self.pooling.kind:
            case PoolingKind.MEAN:
                return start, end
            case PoolingKind.CLS | PoolingKind.SCORE:
                return start, min(end, max(start, 1))
        return (max(start, self.num_tokens - 1), end) if end == self.num_tokens else (start, start)


@dataclass(frozen=True, slots=True)
class VectorShare:
    """The part of a step that one prompt gets."""

    prompt: PooledPrompt
    num_rows: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class VectorRows:
    """The rows of a batch whose hidden states count for vectors: one share after the other."""

    shares: Sequence[VectorShare]
    rows: I64  # [n]: among the batch's tokens
    finished_slots: U32  # [slots]: those whose prompts are complete with this step

    @property
    def owners(self) -> I64:
        """i64[n]: the share of each row."""
        return np.repeat(np.arange(len(self.shares)), [share.num_rows for share in self.shares])

    def complete(self, sums: F32) -> Mapping[bytes, F32]:
        """Add f32[shares, hidden_size], the sum of each share's rows; the vectors of prompts that are complete now."""
        done: dict[Pooling, list[PooledPrompt]] = defaultdict(list)
        for share, added in zip(self.shares, sums, strict=True):
            prompt = share.prompt
            prompt.total = added if prompt.total is None else prompt.total + added
            if share.is_last:
                done[prompt.pooling].append(prompt)
        return {
            prompt.request_id: vector
            for pooling, prompts in done.items()
            for prompt, vector in zip(prompts, _vectors(pooling, prompts), strict=True)
        }


def _vectors(pooling: Pooling, prompts: Sequence[PooledPrompt]) -> F32:
    """f32[prompts, dimensions] of complete prompts that are pooled alike."""
    totals = np.stack([prompt.total for prompt in prompts if prompt.total is not None])
    if pooling.kind is PoolingKind.MEAN:
        totals /= np.array([[prompt.num_tokens] for prompt in prompts], np.float32)
    vectors = totals[:, : pooling.dimensions or None]
    if pooling.normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return vectors


class SlotVectors:
    """The prompts in slots that are pooled and not all launched."""

    def __init__(self) -> None:
        """There are none."""
        self._prompts: dict[int, PooledPrompt] = {}

    def clear(self) -> None:
        """Empty every slot: a new epoch begins."""
        self._prompts.clear()

    def release(self, slots: U32) -> None:
        """Empty `slots`; what is launched of them goes on, and is for nobody."""
        for slot in slots.tolist() if self._prompts else ():
            self._prompts.pop(slot, None)

    def admit(self, admission: Admission) -> None:
        """A sequence enters its slot.

        Raises:
            PenstockError: INTERNAL: its prompt cannot be pooled.
        """
        if admission.pooling is not None:
            self._prompts[admission.slot] = PooledPrompt(admission, admission.pooling)

    def take(self, batch: Batch) -> VectorRows | None:
        """The rows of a batch that count for vectors; None: nothing is pooled. To be called once for each batch."""
        if not self._prompts:
            return None
        shares, rows, finished = [], [], []
        ends, lens, starts = batch.context_lens.tolist(), batch.query_lens.tolist(), batch.query_starts.tolist()
        for index, slot in enumerate(batch.slots.tolist()):
            if (prompt := self._prompts.get(slot)) is None:
                continue
            before, end = ends[index] - lens[index], ends[index]
            first, last = prompt.rows(before, end)
            is_last = end == prompt.num_tokens
            if is_last:
                finished.append(slot)
                del self._prompts[slot]
            if first < last or is_last:
                shares.append(VectorShare(prompt, last - first, is_last))
                rows.append(np.arange(first - before, last - before) + starts[index])
        if not shares:
            return None
        return VectorRows(shares, np.concatenate(rows), np.array(finished, np.uint32))
