"""Changes of logits beside penalties, as the host knows them by slot: it takes what the rows of a step ask for to the
device. And the changes by torch.
"""

import sys

import numpy as np
import torch
from torch import Tensor

from contract.domain.params import MAX_BAD_WORD_TOKENS
from contract.domain.plan import Admission
from worker_svc.core.kernels.sampling.changes import (
    NO_TOKEN,
    Allowed,
    Changes,
    Entries,
    TokenMasks,
    Words,
    keep_allowed,
)
from worker_svc.core.slots import F32, I64
from worker_svc.core.transfer import upload, upload_floats

_NO_CHANGES = Changes()


class SlotChanges:
    """Indexed by slot."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._min_tokens = np.zeros(max_num_seqs, np.int64)  # stop ids are forbidden below this position
        self._stop_ids: dict[int, I64] = {}
        self._biases: dict[int, tuple[I64, F32]] = {}
        self._allowed: dict[int, I64] = {}
        self._words: dict[int, I64] = {}  # as `Words.token_ids`
        self._num_prompt = np.zeros(max_num_seqs, np.int64)

    def remember(self, admission: Admission) -> bool:
        """A sequence enters its slot; return whether it asks for something at every position."""
        slot, sampling = admission.slot, admission.sampling
        stop_ids = self._known(admission.stop_token_ids)
        self._stop_ids[slot] = stop_ids
        self._min_tokens[slot] = admission.num_prompt_tokens + admission.min_output_tokens if len(stop_ids) else 0
        biases = [(token, value) for token, value in sampling.logit_bias if token < self._vocab_size]
        biases += [(token, -np.inf) for token in self._known(sampling.suppress_token_ids)]
        self._biases.pop(slot, None)
        if biases:
            token_ids, values = zip(*biases, strict=True)
            self._biases[slot] = np.array(token_ids, np.int64), np.array(values, np.float32)
        self._allowed.pop(slot, None)
        if sampling.allowed_token_ids is not None:
            self._allowed[slot] = self._known(sampling.allowed_token_ids)
        self._words.pop(slot, None)
        self._num_prompt[slot] = admission.num_prompt_tokens
        words = [word for word in sampling.bad_word_ids if 0 < len(word) <= MAX_BAD_WORD_TOKENS]
        if words := [word for word in words if max(word) < self._vocab_size]:
            self._words[slot] = np.full((len(words), MAX_BAD_WORD_TOKENS), NO_TOKEN, np.int64)
            for row, word in zip(self._words[slot], words, strict=True):
                row[-len(word) :] = word
        return bool(biases) or slot in self._allowed or slot in self._words

    def _known(self, token_ids: tuple[int, ...]) -> I64:
        """Those that the model has logits of."""
        return np.array([token for token in token_ids if token < self._vocab_size], np.int64)

    def are_early(self, slots: I64, positions: I64) -> np.ndarray:
        """Return whether stop tokens are forbidden at `positions` of `slots`, for each."""
        early: np.ndarray = positions < self._min_tokens[slots]
        return early

    def num_alike(self, slots: I64, positions: I64) -> int:
        """For how many steps in a row, each of which samples the next token of each slot, `changes` are those of the
        first, which samples the tokens at `positions`.
        """
        left = self._min_tokens[slots] - positions
        return int(left[left > 0].min(initial=sys.maxsize))

    def changes(
        self, slots: I64, positions: I64, device: torch.device, histories: Tensor | None = None
    ) -> Changes | None:
        """Changes for the tokens at `positions` of `slots`; with histories i32[slots, tokens] also `Words.past`."""
        changes = Changes(
            self._entries(slots, positions, device),
            self._allowed_tokens(slots, device),
            self._forbidden_words(slots, positions, device, histories),
        )
        return changes if changes != _NO_CHANGES else None

    def _entries(self, slots: I64, positions: I64, device: torch.device) -> Entries | None:
        """Biases, tokens that are suppressed, and stop tokens where it is too early for them."""
        is_early = self.are_early(slots, positions)
        found = []
        if self._biases or is_early.any():
            for row, (slot, early) in enumerate(zip(slots.tolist(), is_early.tolist(), strict=True)):
                if slot in self._biases:
                    found.append((row, *self._biases[slot]))
                if early:
                    stop_ids = self._stop_ids[slot]
                    found.append((row, stop_ids, np.full(len(stop_ids), -np.inf, np.float32)))
        if not found:
            return None
        rows = np.repeat([row for row, _, _ in found], [len(token_ids) for _, token_ids, _ in found])
        token_ids, values = (np.concatenate([each[column] for each in found]) for column in (1, 2))
        rows_on_device, ids_on_device = upload(device, rows, token_ids)
        return Entries(rows_on_device, ids_on_device, upload_floats(device, values))

    def _allowed_tokens(self, slots: I64, device: torch.device) -> Allowed | None:
        limited = [row for row, slot in enumerate(slots.tolist()) if slot in self._allowed] if self._allowed else []
        if not limited:
            return None
        token_ids = [self._allowed[slot] for slot in slots[limited].tolist()]
        rows = np.repeat(limited, [len(each) for each in token_ids])
        return Allowed(*upload(device, np.array(limited), rows, np.concatenate(token_ids)))

    def _forbidden_words(
        self, slots: I64, positions: I64, device: torch.device, histories: Tensor | None
    ) -> Words | None:
        held = [row for row, slot in enumerate(slots.tolist()) if slot in self._words] if self._words else []
        if not held:
            return None
        words = [self._words[slot] for slot in slots[held].tolist()]
        rows, all_words = np.repeat(held, [len(each) for each in words]), np.concatenate(words)
        rows_on_device, flat = upload(device, rows, all_words.reshape(-1))
        token_ids = flat.view(-1, MAX_BAD_WORD_TOKENS)
        if histories is None:
            return Words(rows_on_device, token_ids)
        slots_of_words, ends, starts = upload(device, slots[rows], positions[rows], self._num_prompt[slots[rows]])
        places = ends.unsqueeze(1) + torch.arange(1 - MAX_BAD_WORD_TOKENS, 0, device=device)
        past = histories[slots_of_words.unsqueeze(1), places.clamp(min=0)].long()
        return Words(rows_on_device, token_ids, past.masked_fill(places < starts.unsqueeze(1), NO_TOKEN))


def change(logits: Tensor, changes: Changes) -> None:
    """Change logits f32[rows, vocab_size] in place."""
    if (entries := changes.entries) is not None:
        # `index_put_` that accumulates waits for the device in some versions of torch, to look at the indices.
        places = entries.rows * logits.shape[1] + entries.token_ids
        logits.view(-1).scatter_add_(0, places, entries.values)
    if changes.allowed is not None:
        keep_allowed(logits, changes.allowed)
    if changes.words is not None:
        forbid_words(logits, changes.words)
    if changes.masks is not None:
        keep_masked(logits, changes.masks)


def keep_masked(logits: Tensor, masks: TokenMasks) -> None:
    """Forbid all tokens whose bits are not set, in place."""
    bits = (masks.words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    is_allowed = bits.view(len(masks.rows), -1)[:, : logits.shape[1]].bool()
    logits[masks.rows] = logits[masks.rows].masked_fill(~is_allowed, -torch.inf)


def forbid_words(logits: Tensor, words: Words) -> None:
    """Forbid the last token of each word whose others stand at the end of `words.past`, in place."""
    assert words.past is not None
    before, last = words.token_ids[:, :-1], words.token_ids[:, -1]
    ends = ((before == words.past) | (before == NO_TOKEN)).all(dim=1)
    penalties = torch.zeros_like(last, dtype=logits.dtype).masked_fill(ends, -torch.inf)
    logits.view(-1).scatter_add_(0, words.rows * logits.shape[1] + last, penalties)
