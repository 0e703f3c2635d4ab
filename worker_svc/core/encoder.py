"""The interface of encoders: whole prompts to hidden states; and prompts of several lengths as matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from worker_svc.core.slots import I64
from worker_svc.core.whole_prompts import WholePrompt

# Prompts that stand in one matrix differ by no more than this number of tokens, or a share of the longest.
_SLACK, _SLACK_SHARE = 16, 4


class Encoder(Protocol):
    """A model each of whose tokens sees all of its prompt, as far as its layers let it."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows."""

    @property
    def pad_token_id(self) -> int:
        """The token that fills matrices after prompts."""

    def forward(self, prompts: "Padded") -> Tensor:
        """Hidden states [prompts, longest, hidden_size]; those of what fills the matrix mean nothing. Of a model that
        scores pairs the first of each prompt is the score before its activation, and hidden_size 1.
        """

    def normalized(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] -> f32[rows, hidden_size], as transformers' last hidden state, or scores."""


class Padded(NamedTuple):
    """Prompts on a device, one under the other."""

    token_ids: Tensor  # i64[prompts, longest]
    mask: Tensor  # bool[prompts, longest]: tokens of a prompt
    types: Tensor  # i64[prompts, longest]: 1 of tokens of a pair's second text, else 0


@dataclass(frozen=True, slots=True)
class PaddedPrompts:
    """Some prompts of a batch, one under the other."""

    places: I64  # [prompts]: which of the batch's they are
    lengths: I64  # [prompts]
    token_ids: I64  # [prompts * longest], filled up
    firsts: I64  # [prompts]: tokens before those of a pair's second text; their number, where there is none

    def on(self, token_ids: Tensor, lengths: Tensor, firsts: Tensor) -> Padded:
        """The argument of `Encoder.forward`, of these columns on a device."""
        columns = torch.arange(len(token_ids) // len(lengths), device=lengths.device)
        mask = columns < lengths.unsqueeze(1)
        return Padded(token_ids.view(len(lengths), -1), mask, (mask & (columns >= firsts.unsqueeze(1))).long())

    def rows(self, place: int, tokens: I64) -> I64:
        """The rows of hidden states, one prompt's after the other's, of tokens i64[n] of the prompt at `place` here."""
        return place * (len(self.token_ids) // len(self.lengths)) + tokens


def pad(prompts: Sequence[WholePrompt], pad_token_id: int) -> list[PaddedPrompts]:
    """Prompts as few matrices, in each of which they are about as long as each other: those of very different lengths
    would be filled with what is computed for nothing.
    """
    lengths = np.array([len(prompt.token_ids) for prompt in prompts], np.int64)
    groups: list[list[int]] = []
    for place in np.argsort(-lengths, kind="stable").tolist():
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or longest - lengths[place] > max(_SLACK, longest // _SLACK_SHARE):
            groups.append([])
        groups[-1].append(place)
    return [_padded(prompts, lengths, np.array(group), pad_token_id) for group in groups]


def _padded(prompts: Sequence[WholePrompt], lengths: I64, places: I64, pad_token_id: int) -> PaddedPrompts:
    token_ids = np.full((len(places), lengths[places[0]]), pad_token_id, np.int64)
    for row, place in zip(token_ids, places.tolist(), strict=True):
        row[: lengths[place]] = prompts[place].token_ids
    firsts = np.array([prompts[place].num_first or lengths[place] for place in places.tolist()], np.int64)
    return PaddedPrompts(places, lengths[places], token_ids.ravel(), firsts)


def pad_all(prompts: Sequence[WholePrompt], pad_token_id: int) -> PaddedPrompts:
    """All prompts as one matrix, however different their lengths are."""
    lengths = np.array([len(prompt.token_ids) for prompt in prompts], np.int64)
    return _padded(prompts, lengths, np.argsort(-lengths, kind="stable"), pad_token_id)
