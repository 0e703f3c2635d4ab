"""Token embedding and language-model head, split over the ranks by vocabulary."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.core.formats.dense import Dense
from worker_svc.core.layers.fusion import Normed, operand
from worker_svc.core.layers.placement import Placement, StoredPart

_ALIGNMENT = 64  # of a rank's rows: products, and kernels that read logits, are several times as slow at odd numbers


def padded_rows(vocab_size: int, world_size: int) -> int:
    """The rows of each rank, tokens' and those that pad them."""
    return -(-vocab_size // (world_size * _ALIGNMENT)) * _ALIGNMENT


class VocabParallelEmbedding:
    """Rows of the vocabulary; every rank has equally many, the last ones padded with zeros; only the first
    `vocab_size` of all stand for tokens.
    """

    def __init__(
        self, placement: Placement, name: str, vocab_size: int, hidden_size: int, *, is_head: bool = False
    ) -> None:
        self._group = placement.group
        self._operations = placement.operations
        self._vocab_size = vocab_size
        rows = padded_rows(vocab_size, placement.group.world_size)
        self._first = min(placement.group.rank * rows, vocab_size)
        last = min(self._first + rows, vocab_size)
        self.weight = placement.empty(rows, hidden_size)
        self.packed = Dense(self.weight)  # as a head has it
        self.bias: Tensor | None = None
        self.is_partial = False
        self.weight[last - self._first :] = 0
        shape, mine, destination = (
            (vocab_size, hidden_size),
            slice(self._first, last),
            self.weight[: last - self._first],
        )
        if is_head:  # a linear layer, which may be quantized
            placement.want_weight(StoredPart(name, shape, mine, slice(0, hidden_size)), destination)
        else:
            placement.want(f"{name}.weight", destination, shape, mine)

    @property
    def table(self) -> Tensor | None:
        """[vocab_size and what pads it, hidden_size], where there are no other ranks."""
        return self.weight if self._group.world_size == 1 else None

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids i64[tokens] -> [tokens, hidden_size]."""
        if self._group.world_size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self._first
        here = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(torch.where(here, local, 0), self.weight)
        return self._group.all_reduce(rows * here.unsqueeze(-1))

    def multiply(self, x: Tensor) -> Tensor:
        """x [rows, hidden_size] -> this rank's columns of the logits."""
        return self.packed.multiply(x, None)

    def total(self, part: Tensor) -> Tensor:
        """Implement `LinearLayer.total`: inputs are not split over ranks."""
        return part

    def logits(self, x: Tensor | Normed) -> Tensor:
        """x [rows, hidden_size] -> [rows, vocab_size], whole on every rank."""
        columns = self._operations.norm_linear(*operand(x), self)
        return self._group.all_gather_columns(columns)[:, : self._vocab_size]
