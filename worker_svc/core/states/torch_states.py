"""The reference: plain torch, runs on any device, in fp32. Sequences that advance by one token go together, chunks of
each by itself, cut into pieces in which tokens are computed at once (Yang et al., "Parallelizing Linear Transformers
with the Delta Rule", 2024).
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.core.batch import Batch
from worker_svc.core.kernels.delta.weights import DeltaWeights
from worker_svc.core.states.slot_states import SlotStates
from worker_svc.core.transfer import upload

_PIECE = 64  # tokens
_NORM_EPS = 1e-6  # of queries and keys, whatever that of norms


class _Group(NamedTuple):
    """Sequences that advance by as many tokens."""

    slots: Tensor  # i64[seqs]
    rows: Tensor  # i64[seqs, tokens] among the step's
    positions: Tensor  # i64[seqs, tokens]


class TorchStates:
    """States of one step's batch. Implement `StepStates`."""

    def __init__(self, states: SlotStates, batch: Batch) -> None:
        self._states = states
        decodes, longer = np.flatnonzero(batch.query_lens == 1), np.flatnonzero(batch.query_lens > 1)
        groups = [decodes] if len(decodes) else []
        self._groups = [self._group(batch, seqs) for seqs in (*groups, *longer[:, None])]

    def _group(self, batch: Batch, seqs: np.ndarray) -> _Group:
        length = int(batch.query_lens[seqs[0]])
        rows = batch.query_starts[seqs][:, None] + np.arange(length)
        positions = batch.context_lens[seqs][:, None] - length + np.arange(length)
        device = self._states.matrices.device
        slots, flat_rows, flat_positions = upload(device, batch.slots[seqs], rows.ravel(), positions.ravel())
        return _Group(slots, flat_rows.view(rows.shape), flat_positions.view(rows.shape))

    def recur(self, layer: int, projected: Tensor, weights: DeltaWeights) -> Tensor:
        """Implement `StepStates.recur`."""
        shape = self._states.shape
        out = projected.new_empty(len(projected), shape.num_value_heads * shape.value_dim)
        for group in self._groups:
            mine = projected[group.rows]
            read = self._read(layer, group, mine, weights)
            out[group.rows] = read.to(out.dtype)
        return out

    def _read(self, layer: int, group: _Group, projected: Tensor, weights: DeltaWeights) -> Tensor:
        """projected [seqs, tokens, outputs] -> f32[seqs, tokens, value_heads * value_dim]."""
        shape, matrices = self._states.shape, self._states.matrices[layer]
        mixed = self._convolved(layer, group, projected[..., : shape.num_channels], weights.conv)
        betas, decays = projected[..., -2 * shape.num_value_heads :].float().chunk(2, dim=-1)
        decays = weights.decay_rate * F.softplus(decays + weights.decay_bias)
        num_keys = shape.num_key_heads * shape.key_dim
        sizes = [num_keys, num_keys, shape.num_channels - 2 * num_keys]
        query, key, value = torch.split(mixed, sizes, dim=-1)
        query, key = (_unit(_heads(each, shape.key_dim)) for each in (query, key))
        values_each = shape.num_value_heads // shape.num_key_heads
        query, key = (each.repeat_interleave(values_each, dim=2).transpose(1, 2) for each in (query, key))
        value = _heads(value, shape.value_dim).transpose(1, 2)
        betas, decays = betas.sigmoid().transpose(1, 2), decays.transpose(1, 2)
        begins = (group.positions[:, 0] > 0).view(-1, 1, 1, 1)
        matrix = torch.where(begins, matrices[group.slots], 0.0)
        read = []
        for start in range(0, value.shape[2], _PIECE):
            piece = (each[:, :, start : start + _PIECE] for each in (query, key, value, betas, decays))
            of_piece, matrix = _recur(matrix, *piece)
            read.append(of_piece)
        matrices[group.slots] = matrix
        found = torch.cat(read, dim=2).transpose(1, 2).flatten(2)
        return found.mul_(shape.key_dim**-0.5)

    def _convolved(self, layer: int, group: _Group, new: Tensor, conv: Tensor) -> Tensor:
        """silu of the causal convolution of new [seqs, tokens, channels], f32; keeps what further tokens see of it."""
        seen, width = self._states.seen[layer], conv.shape[1]
        before = group.positions[:, :1] + torch.arange(1 - width, 0, device=new.device)
        kept = seen[group.slots.unsqueeze(1), before % width]
        kept = torch.where((before >= 0).unsqueeze(-1), kept, 0.0)
        together = torch.cat((kept, new), dim=1).float()
        convolved = F.conv1d(together.transpose(1, 2), conv.float().unsqueeze(1), groups=len(conv)).transpose(1, 2)
        last = group.positions[:, -width:]
        seen[group.slots.unsqueeze(1), last % width] = new[:, -width:]
        # As others round it, between products.
        rounded: Tensor = F.silu(convolved.to(new.dtype)).float()
        return rounded


def _heads(x: Tensor, dim: int) -> Tensor:
    heads: Tensor = x.reshape(*x.shape[:-1], x.shape[-1] // dim, dim)
    return heads


def _unit(x: Tensor) -> Tensor:
    """x [..., key_dim] of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def _recur(  # noqa: PLR0917
    matrix: Tensor, query: Tensor, key: Tensor, value: Tensor, betas: Tensor, decays: Tensor
) -> tuple[Tensor, Tensor]:
    """One piece of tokens: matrix [seqs, heads, key_dim, value_dim], query and key [seqs, heads, tokens, key_dim],
    value [seqs, heads, tokens, value_dim], betas and logarithms of decays [seqs, heads, tokens] -> what is read, like
    value, and the next matrix. All f32.

    With D the decay from the piece's begin to a token, what a token corrects is beta * (v - D S^T k - what tokens of
    the piece before it have corrected of that): a triangular system in all corrections.
    """
    since_begin = decays.cumsum(-1)
    between = since_begin.unsqueeze(-1) - since_begin.unsqueeze(-2)  # [..., token, earlier token]
    is_earlier = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).tril()
    between = between.masked_fill(~is_earlier, float("-inf")).exp()
    from_begin = since_begin.exp().unsqueeze(-1)
    strengths = betas.unsqueeze(-1)
    among = (key @ key.transpose(-1, -2)) * between * strengths
    wanted = (value - from_begin * (key @ matrix)) * strengths
    corrections = torch.linalg.solve_triangular(among, wanted, upper=False, unitriangular=True)
    read = from_begin * (query @ matrix) + ((query @ key.transpose(-1, -2)) * between) @ corrections
    to_end = (since_begin[..., -1:] - since_begin).exp().unsqueeze(-1)
    matrix = from_begin[..., -1:, :] * matrix + (key * to_end).transpose(-1, -2) @ corrections
    return read, matrix
