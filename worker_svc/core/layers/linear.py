"""Linear layers: split by columns (each rank has some outputs) or by rows (each rank has some inputs)."""

import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)
from torch import Tensor

from worker_svc.core.layers.placement import Placement


class ColumnParallelLinear:
    """Several projections of one input in one product; `outputs` are (checkpoint name, stored size, this rank's rows).

    The output is [tokens, sum of this rank's rows], in the order of `outputs`.
    """

    def __init__(
        self, placement: Placement, in_features: int, outputs: list[tuple[str, int, slice]], *, bias: bool
    ) -> None:
        self.sizes = [rows.stop - rows.start for _, _, rows in outputs]
        self.weight = placement.empty(sum(self.sizes), in_features)
        self.bias = placement.empty(sum(self.sizes)) if bias else None
        start = 0
        for (name, stored, rows), size in zip(outputs, self.sizes, strict=True):
            end = start + size
            placement.want(f"{name}.weight", self.weight[start:end], (stored, in_features), rows)
            if self.bias is not None:
                placement.want(f"{name}.bias", self.bias[start:end], (stored,), rows)
            start = end

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in_features] -> [tokens, this rank's outputs]."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear:
    """A projection whose input is split over the ranks; the output is summed over them, whole on each."""

    def __init__(
        self, placement: Placement, name: str, in_features: int, columns: slice, out_features: int, *, bias: bool
    ) -> None:
        self._group = placement.group
        self.is_whole = placement.group.world_size == 1
        self.weight = placement.empty(out_features, columns.stop - columns.start)
        self.bias = placement.empty(out_features) if bias else None
        placement.want(f"{name}.weight", self.weight, (out_features, in_features), slice(None), columns)
        if self.bias is not None:
            placement.want(f"{name}.bias", self.bias, (out_features,))

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, this rank's columns] -> [tokens, out_features], whole on every rank."""
        if self.is_whole:
            return F.linear(x, self.weight, self.bias)
        total = self._group.all_reduce(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias
