"""Linear layers: which stored rows, which part of them, how they are stored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker_svc.core.formats.interface import Format, Reading
from worker_svc.core.layers.fusion import Gated, Normed, Product
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

    Where inputs are split over the ranks, an output is the sum over them. Projections whose heads stand together in one
    tensor are read as they are stored, and come one after the other once the layer is prepared.
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
        self._order = _order(projections)
        outputs, projections = sum(self.sizes), _together(projections)
        readings = _readings(placement, projections, inputs, num_inputs)
        format_ = readings[0].multiplied
        tensors = {
            piece.suffix: placement.empty(
                *piece.shape(outputs, inputs.stop - inputs.start), dtype=piece.dtype or placement.dtype
            )
            for piece in format_.pieces
        }
        self.packed = format_.pack(tensors, inputs.stop - inputs.start)
        self._device = placement.device
        self.bias = placement.empty(outputs) if has_bias else None
        start = 0
        for each, reading in zip(projections, readings, strict=True):
            size, rows = each.mine.stop - each.mine.start, each.stored
            here = slice(start, start + size)
            stored = slice(rows.first + each.mine.start, rows.first + each.mine.stop)
            of = rows.of or each.size
            index = {piece.suffix: piece.index(here, slice(0, inputs.stop - inputs.start)) for piece in format_.pieces}
            destinations = {suffix: tensors[suffix][place] for suffix, place in index.items()}
            placement.want_part(reading, StoredPart(rows.name, (of, num_inputs), stored, inputs), destinations)
            if self.bias is not None:
                placement.want(f"{rows.name}.bias", self.bias[here], (of,), stored)
            start += size

    def __call__(self, x: Tensor | Normed | Gated) -> Product:
        """x [tokens, inputs] -> [tokens, outputs], computed by whoever reads it."""
        return Product(self, x)

    def multiply(self, x: Tensor) -> Tensor:
        """x [tokens, this rank's inputs] -> [tokens, outputs], whole on every rank: by torch."""
        return self.total(self.packed.multiply(x, None)) if self.is_partial else self.packed.multiply(x, self.bias)

    def total(self, part: Tensor) -> Tensor:
        """Products of this rank's inputs alone, without the bias -> their sum over the ranks, with it."""
        total = self.group.all_reduce(part)
        return total if self.bias is None else total + self.bias

    def prepare(self) -> None:
        """Let projections come one after the other, once, when the weights are there."""
        if self._order is not None:
            self.reorder_outputs(torch.tensor(self._order, device=self._device))

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


def _together(projections: Sequence[Projection]) -> list[Projection]:
    """Projections as they are read: those whose heads stand together in a tensor as one, where the first of them is."""
    read: dict[object, Projection] = {}
    for number, each in enumerate(projections):
        stored, heads = each.stored, _heads(each)
        if heads is None:
            read[number] = each
        elif stored.name not in read:
            mine = slice(heads.start * stored.every, heads.stop * stored.every)
            size = each.size // stored.run * stored.every
            read[stored.name] = replace(each, stored=StoredRows(stored.name, of=stored.of), size=size, mine=mine)
    return list(read.values())


def _order(projections: Sequence[Projection]) -> list[int] | None:
    """The place of each output among those that are read; None: all stand where they belong."""
    if all(_heads(each) is None for each in projections):
        return None
    starts: dict[object, int] = {}
    order: list[int] = []
    start = 0
    for number, each in enumerate(projections):
        stored, heads = each.stored, _heads(each)
        size = each.mine.stop - each.mine.start
        place: object = number if heads is None else stored.name
        if place not in starts:
            starts[place] = start
            start += size if heads is None else (heads.stop - heads.start) * stored.every
        if heads is None:
            order += range(starts[place], starts[place] + size)
        else:
            firsts = range(stored.first, stored.first + (heads.stop - heads.start) * stored.every, stored.every)
            order += [starts[place] + first + row for first in firsts for row in range(stored.run)]
    assert sorted(order) == list(range(start)), "all that stands together in a tensor is part of one product"
    return order


def _heads(projection: Projection) -> slice | None:
    """This rank's heads of a projection that shares their rows with others; None: its rows follow each other."""
    run, mine = projection.stored.run, projection.mine
    return None if projection.stored.every == 1 else slice(mine.start // run, mine.stop // run)


def _readings(
    placement: Placement, projections: Sequence[Projection], inputs: slice, num_inputs: int
) -> list[Reading[Format]]:
    """Those of one product: as floats where nothing multiplies them otherwise, where they would be multiplied in
    different ways, or where ranks share a group.
    """
    names = [each.stored.name for each in projections]
    readings = [placement.reading_of(name) for name in names]
    are_alike = all(type(each.multiplied) is type(readings[0].multiplied) for each in readings)
    outputs, num_mine = sum(each.mine.stop - each.mine.start for each in projections), inputs.stop - inputs.start
    is_multiplied = placement.operations.multiplies(readings[0].multiplied, outputs, num_mine, placement.dtype)
    if are_alike and is_multiplied and all(each.can_cut(inputs, num_inputs) for each in readings):
        return readings
    return [placement.reading_of(name, widens=True) for name in names]
