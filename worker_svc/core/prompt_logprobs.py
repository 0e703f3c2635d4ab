"""Logprobs of prompts, chunk by chunk: which rows of a batch give some, and what they add up to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contract.domain.plan import U32, Admission, Logprobs, PromptLogprobs
from worker_svc.core.batch import Batch
from worker_svc.core.interface import plan_error
from worker_svc.core.slots import I64


class PromptRecord:
    """The logprobs of one prompt, growing. Begun by who launches, gone on with by who reads results."""

    __slots__ = ("_parts", "num_top", "request_id", "token_ids")

    def __init__(self, admission: Admission, vocab_size: int) -> None:
        """Nothing is computed so far.

        Raises:
            PenstockError: INTERNAL: something is, which would be missing, or nothing was asked for.
        """
        if admission.num_computed_tokens or admission.sampling.num_prompt_logprobs is None:
            raise plan_error(f"slot {admission.slot} is to give logprobs of a prompt that is computed, or did not ask")
        self.request_id = admission.request_id
        self.token_ids: U32 = admission.token_ids[1 : admission.num_prompt_tokens]
        self.num_top = min(admission.sampling.num_prompt_logprobs, vocab_size)
        self._parts: list[Logprobs] = []

    def add(self, part: Logprobs) -> None:
        """The next tokens."""
        self._parts.append(part)

    def whole(self) -> PromptLogprobs:
        """All of it; every token has come."""
        return PromptLogprobs(self.token_ids, Logprobs.joined(self._parts))


@dataclass(frozen=True, slots=True)
class PromptShare:
    """The part of a step that one prompt gets."""

    record: PromptRecord
    start: int  # index in `record.token_ids` of the first
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of a batch whose logits say something of a prompt's next token: one share after the other."""

    shares: Sequence[PromptShare]
    rows: I64  # [n]: among the batch's tokens
    token_ids: I64  # [n]: the tokens that stand after them

    @property
    def num_top(self) -> int:
        """The most alternatives that a share wants."""
        return max(share.record.num_top for share in self.shares)

    def complete(
        self,
        own: npt.NDArray[np.generic],
        ranks: npt.NDArray[np.generic],
        top_ids: npt.NDArray[np.generic],
        top_logprobs: npt.NDArray[np.generic],
    ) -> Mapping[bytes, PromptLogprobs]:
        """Add the values of all rows to their records; the prompts that are complete now, by request.

        Args:
            own: f[n].
            ranks: i[n].
            top_ids: i[n, num_top], the most likely first.
            top_logprobs: f[n, num_top].
        """
        whole, start = {}, 0
        for share in self.shares:
            place, num_top = slice(start, start + share.num_tokens), share.record.num_top
            start += share.num_tokens
            share.record.add(
                Logprobs(
                    sampled=own[place].astype(np.float32),
                    ranks=ranks[place].astype(np.uint32),
                    top_counts=np.full(share.num_tokens, num_top, np.uint32),
                    top_ids=top_ids[place, :num_top].astype(np.uint32).ravel(),
                    top_logprobs=top_logprobs[place, :num_top].astype(np.float32).ravel(),
                )
            )
            if share.is_last:
                whole[share.record.request_id] = share.record.whole()
        return whole


class SlotPrompts:
    """The prompts in slots whose logprobs are not all launched."""

    def __init__(self, vocab_size: int) -> None:
        """There are none."""
        self._vocab_size = vocab_size
        self._records: dict[int, PromptRecord] = {}

    def clear(self) -> None:
        """Empty every slot: a new epoch begins."""
        self._records.clear()

    def release(self, slots: U32) -> None:
        """Empty `slots`; what is launched of them goes on, and is for nobody."""
        for slot in slots.tolist() if self._records else ():
            self._records.pop(slot, None)

    def admit(self, admission: Admission) -> None:
        """A sequence enters its slot.

        Raises:
            PenstockError: INTERNAL: its prompt cannot give what is asked for.
        """
        if admission.prompt_logprobs:
            self._records[admission.slot] = PromptRecord(admission, self._vocab_size)

    def take(self, batch: Batch) -> PromptRows | None:
        """The rows of a batch that give logprobs of prompts; None: there are none. To be called once for each batch."""
        if not self._records:
            return None
        shares, rows, token_ids = [], [], []
        for index, slot in enumerate(batch.slots.tolist()):
            record = self._records.get(slot)
            if record is None:
                continue
            start = int(batch.context_lens[index] - batch.query_lens[index])
            num_tokens = min(int(batch.query_lens[index]), len(record.token_ids) - start)
            is_last = start + num_tokens == len(record.token_ids)
            shares.append(PromptShare(record, start, num_tokens, is_last))
            rows.append(np.arange(num_tokens) + batch.query_starts[index])
            token_ids.append(record.token_ids[start : start + num_tokens].astype(np.int64))
            if is_last:
                del self._records[slot]
        return PromptRows(shares, np.concatenate(rows), np.concatenate(token_ids)) if shares else None
