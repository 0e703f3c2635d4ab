"""The parameters of the sequences in slots, as the host knows it: a step launches only the work that some row
needs.
"""

import numpy as np
import torch
from torch import Tensor

from contract.domain.plan import Admission
from worker_svc.core.changes import SlotChanges
from worker_svc.core.kernels.state.tables import (
    FLOATS,
    FREQUENCY,
    INTEGERS,
    MIN_P,
    NUM_FLOATS,
    NUM_INTEGERS,
    NUM_PROMPT,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from worker_svc.core.sampler import ChosenIds, Draw, Extras, Penalties, SamplerInput, Truncation
from worker_svc.core.slots import I64
from worker_svc.core.transfer import upload, upload_floats

_NO_LOGPROBS = -1


class SlotSampling:
    """Indexed by slot.

    floats    f32[max_num_seqs, NUM_FLOATS]  a column for each of `FLOATS`
    integers  i64[max_num_seqs, NUM_INTEGERS]  a column for each of `INTEGERS`, seed (two's complement), prompt tokens
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.floats = np.zeros((max_num_seqs, NUM_FLOATS), np.float32)
        self.integers = np.zeros((max_num_seqs, NUM_INTEGERS), np.int64)
        self._num_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, np.int64)
        self._chosen: dict[int, I64] = {}  # by slot: the tokens that it wants instead of the most likely
        self._has_penalties = np.zeros(max_num_seqs, np.bool_)
        self._has_cuts = np.zeros(max_num_seqs, np.bool_)  # it draws by top-k, top-p or min-p
        self._is_plain = np.ones(max_num_seqs, np.bool_)  # it asks for none of that, and no changes
        self._changes = SlotChanges(max_num_seqs, vocab_size)

    def remember(self, admission: Admission) -> None:
        """A sequence enters its slot."""
        slot, sampling = admission.slot, admission.sampling
        self.floats[slot] = [getattr(sampling, name) for name in FLOATS]
        seed = admission.seed if admission.seed < 2**63 else admission.seed - 2**64
        self.integers[slot] = (*(getattr(sampling, name) for name in INTEGERS), seed, admission.num_prompt_tokens)
        self.integers[slot, TOP_K] = min(sampling.top_k, self._vocab_size)
        wanted = _NO_LOGPROBS if sampling.num_logprobs is None else min(sampling.num_logprobs, self._vocab_size)
        self._chosen.pop(slot, None)
        if wanted != _NO_LOGPROBS and sampling.logprob_token_ids:
            self._chosen[slot], wanted = np.array(sampling.logprob_token_ids, np.int64), 0
        self._num_logprobs[slot] = wanted
        self._has_penalties[slot] = has_penalties = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        )
        is_cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._has_cuts[slot] = has_cuts = is_cut and sampling.temperature > 0
        has_masks = bool(sampling.grammar) or sampling.thinking_token_budget is not None
        has_changes = self._changes.remember(admission) or has_masks
        self._is_plain[slot] = wanted == _NO_LOGPROBS and not (has_penalties or has_changes or has_cuts)

    def num_logprobs(self, slots: I64) -> I64:
        """The number of alternatives each slot wants beside its token's logprob; -1: not even that."""
        return self._num_logprobs[slots]

    def chosen(self, slots: I64) -> dict[int, I64]:
        """By row: the tokens i64[n] whose logprobs it wants instead of the most likely ones'."""
        rows = enumerate(slots.tolist()) if self._chosen else ()
        return {row: self._chosen[slot] for row, slot in rows if slot in self._chosen}

    def extras(self, slots: I64, positions: I64, device: torch.device) -> Extras | None:
        """All that the tokens at `positions` of `slots` need besides temperatures; None: nothing."""
        if (self._is_plain[slots] & ~self._changes.are_early(slots, positions)).all():
            return None
        return Extras(
            has_cuts=bool(self._has_cuts[slots].any()),
            has_penalties=bool(self._has_penalties[slots].any()),
            changes=self._changes.changes(slots, positions, device),
            logprob_rows=self._logprob_rows(slots, device),
            num_top_logprobs=self._num_top_logprobs(slots),
            chosen=self._chosen_ids(slots, device),
        )

    def num_alike(self, slots: I64, positions: I64) -> int:
        """For how many steps in a row, each of which samples the next token of each slot, `extras` are those of the
        first, which samples the tokens at `positions`.
        """
        return self._changes.num_alike(slots, positions)

    def sampler_input(self, slots: I64, positions: I64, histories: Tensor) -> SamplerInput:
        """All that the tokens at `positions` of `slots` need; histories i32[slots, tokens] are on the device."""
        device = histories.device
        return SamplerInput(
            draw=self._draw(slots, positions, device),
            penalties=self._penalties(slots, positions, histories),
            changes=self._changes.changes(slots, positions, device, histories),
            logprob_rows=self._logprob_rows(slots, device),
            num_top_logprobs=self._num_top_logprobs(slots),
            chosen=self._chosen_ids(slots, device),
        )

    def _draw(self, slots: I64, positions: I64, device: torch.device) -> Draw | None:
        drawn = np.flatnonzero(self.floats[slots, TEMPERATURE] > 0)
        if not len(drawn):
            return None
        floats, integers = self.floats[slots[drawn]], self.integers[slots[drawn]]
        truncated = np.flatnonzero((integers[:, TOP_K] > 0) | (floats[:, TOP_P] < 1))
        top_k = integers[truncated, TOP_K]
        rows, seeds, positions_of_rows, truncated_rows, top_k_of_rows = upload(
            device, drawn, integers[:, SEED], positions[drawn], truncated, top_k
        )
        truncation = None
        if len(truncated):
            truncation = Truncation(
                rows=truncated_rows,
                top_k=top_k_of_rows,
                top_p=upload_floats(device, floats[truncated, TOP_P]),
                longest=int(top_k.max()) if top_k.all() else None,
            )
        min_p = upload_floats(device, floats[:, MIN_P]) if floats[:, MIN_P].any() else None
        return Draw(rows, upload_floats(device, floats[:, TEMPERATURE]), seeds, positions_of_rows, truncation, min_p)

    def _penalties(self, slots: I64, positions: I64, histories: Tensor) -> Penalties | None:
        punished = np.flatnonzero(self._has_penalties[slots])
        if not len(punished):
            return None
        device, slots, lengths = histories.device, slots[punished], positions[punished]
        rows, slots_on_device, lengths_on_device, num_prompt = upload(
            device, punished, slots, lengths, self.integers[slots, NUM_PROMPT]
        )
        repetition, presence, frequency = (
            upload_floats(device, self.floats[slots, column]) for column in (REPETITION, PRESENCE, FREQUENCY)
        )
        return Penalties(
            rows=rows,
            history=histories[slots_on_device, : int(lengths.max())].long(),
            lengths=lengths_on_device,
            num_prompt_tokens=num_prompt,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )

    def _logprob_rows(self, slots: I64, device: torch.device) -> Tensor | None:
        rows = np.flatnonzero(self._num_logprobs[slots] != _NO_LOGPROBS)
        return upload(device, rows)[0] if len(rows) else None

    def _chosen_ids(self, slots: I64, device: torch.device) -> ChosenIds | None:
        chosen = self.chosen(slots)
        if not chosen:
            return None
        most = max(map(len, chosen.values()))
        padded = np.stack([np.pad(each, (0, most - len(each))) for each in chosen.values()])
        rows, token_ids = upload(device, np.array(list(chosen), np.int64), padded.ravel())
        return ChosenIds(rows, token_ids.view(len(chosen), most))

    def _num_top_logprobs(self, slots: I64) -> int:
        return max(0, int(self._num_logprobs[slots].max(initial=0)))
