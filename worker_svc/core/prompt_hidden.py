"""Sums of the normalised hidden states of prompts, by torch, piece by piece: in fp32 they would not fit at once."""

from typing import Protocol

import torch
from torch import Tensor

_CELLS = 2**24  # that are in fp32 at once: 64 MiB


class Normalizing(Protocol):
    """The part of a model that ends its hidden states."""

    def normalized(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] -> f32[rows, hidden_size], as transformers' last hidden state."""


def sum_hidden(model: Normalizing, hidden: Tensor, owners: Tensor, num_owners: int) -> Tensor:
    """f32[num_owners, hidden_size]: sums of normalised hidden states [n, hidden_size], each of one of `owners` i64[n].

    By a product of matrices, which adds in the same order each time, and whatever the numbers of rows are.
    """
    num_rows, size = max(1, _CELLS // hidden.shape[1]), hidden.shape[1]
    sums = torch.zeros(num_owners, size, device=hidden.device)
    places = torch.arange(num_owners, device=hidden.device).unsqueeze(1)
    for at in range(0, len(hidden), num_rows):
        belongs = (places == owners[at : at + num_rows]).float()
        sums.addmm_(belongs, model.normalized(hidden[at : at + num_rows]))
    return sums
