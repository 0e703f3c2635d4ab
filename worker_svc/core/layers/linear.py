"""Linear layers: which stored rows, which part of them, how they are stored."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from worker_svc.core.formats.interface import Reading
from worker_svc.core.layers.fusion import Normed, Product
from worker_svc.core.layers.placement import Placement, StoredPart
from worker_svc.core.models.spec import StoredRows


@dataclass(frozen=True, slots=True)
class Projection:
    """A projection in a product: the rows that a checkpoint has of it, and those outputs that this rank has."""

    stored: StoredRows
    size: int  # outputs in all
    mine: slice


class Linear:
    """Outputs of `projections`, one after the other, of the inputs `columns` (all: None) out of `num_inputs`.

    Where inputs are split over the ranks, an output is the sum over them.
    """

    def __init__(
        self,
        placement: Placement,
        projections: Sequence[Projection],
        num_inputs: int,
        columns: slice | None = None,
        *,
        has_bias: bool = False,
    ) -> None:
        inputs = columns or slice(0, num_inputs)
        self.group = placement.group
        self.operations = placement.operations
        self.is_partial = columns is not None and placement.group.world_size > 1
        self.sizes = [each.mine.stop - each.mine.start for each in projections]
        outputs = sum(self.sizes)
        readings = _readings(placement, projections)
        format_ = readings[0].multiplied
        tensors = {
            piece.suffix: placement.empty(
                *piece.shape(outputs, inputs.stop - inputs.start), dtype=piece.dtype or placement.dtype
            )
            for piece in format_.pieces
        }
        self.packed = format_.pack(tensors)
        self.bias = placement.empty(outputs) if has_bias else None
        start = 0
        for each, size, reading in zip(projections, self.sizes, readings, strict=True):
            here, rows = slice(start, start + size), each.stored
            stored = slice(rows.first + each.mine.start, rows.first + each.mine.stop)
            of = rows.of or each.size
            index = {piece.suffix: piece.index(here, slice(0, inputs.stop - inputs.start)) for piece in format_.pieces}
            destinations = {suffix: tensors[suffix][place] for suffix, place in index.items()}
            placement.want_part(reading, StoredPart(rows.name, (of, num_inputs), stored, inputs), destinations)
            if self.bias is not None:
                placement.want(f"{rows.name}.bias", self.bias[here], (of,), stored)
            start += size

    def __call__(self, x: Tensor | Normed) -> Product:
        """x [tokens, inputs] -> [tokens, outputs], computed by whoever reads it."""
        return Product(self, x)

    def multiply(self, x: Tensor) -> Tensor:
        """x [tokens, this rank's inputs] -> [tokens, outputs], whole on every rank: by torch."""
        if not self.is_partial:
            return self.packed.multiply(x, self.bias)
        total = self.group.all_reduce(self.packed.multiply(x, None))
        return total if self.bias is None else total + self.bias

    def reorder_outputs(self, order: Tensor) -> None:
        """Let outputs come in another order, i64[outputs], once, when the weights are there."""
        self.packed.reorder_outputs(order)
        if self.bias is not None:
            self.bias.copy_(self.bias[order])

    def scale_outputs(self, factor: float) -> None:
        """Multiply what comes out by `factor`, once, when the weights are there."""
        if factor != 1.0:
            self.packed.scale_outputs(factor)
            if self.bias is not None:
                self.bias.mul_(factor)


def _readings(placement: Placement, projections: Sequence[Projection]) -> list[Reading]:
    """Those of one product: where they would be multiplied in different ways, as floats."""
    names = [each.stored.name for each in projections]
    readings = [placement.reading_of(name) for name in names]
    if all(type(each.multiplied) is type(readings[0].multiplied) for each in readings):
        return readings
    return [placement.reading_of(name, widens=True) for name in names]
