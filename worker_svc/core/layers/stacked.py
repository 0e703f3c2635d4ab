"""Linear layers of experts: as many weights of one shape as there are experts, of which a row meets some."""

from collections.abc import Sequence

from torch import Tensor

from contract.domain.errors import unimplemented
from worker_svc.core.formats.dense import DenseFormat
from worker_svc.core.layers.linear import Projection
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import ExpertsSpec


class StackedLinear:
    """As `Linear`, of each expert: a checkpoint has one by one, under names with `{expert}`, or all in one tensor."""

    def __init__(
        self,
        placement: Placement,
        spec: ExpertsSpec,
        projections: Sequence[Projection],
        num_inputs: int,
        columns: slice | None = None,
    ) -> None:
        count, inputs = spec.count, columns or slice(0, num_inputs)
        sizes = [each.mine.stop - each.mine.start for each in projections]
        self.weight = placement.empty(count, sum(sizes), inputs.stop - inputs.start)
        self.bias = placement.empty(count, sum(sizes)) if spec.each.has_bias else None
        self._adds_bias = columns is None or placement.group.rank == 0
        start = 0
        want = _want_stacked if spec.is_stacked else _want_singly
        for each, size in zip(projections, sizes, strict=True):
            here, rows = slice(start, start + size), each.stored
            stored = slice(rows.first + each.mine.start, rows.first + each.mine.stop)
            of = rows.of or each.size
            want(placement, f"{rows.name}.weight", self.weight[:, here], (of, num_inputs), stored, inputs)
            if self.bias is not None:
                want(placement, f"{rows.name}.bias", self.bias[:, here], (of,), stored)
            start += size

    def prepare(self) -> None:
        """Let one rank alone add the bias, where inputs are split over them; once, when the weights are there."""
        if self.bias is not None and not self._adds_bias:
            self.bias.zero_()

    def scale_outputs(self, factor: float) -> None:
        """Multiply what comes out by `factor`, once, when the weights are there."""
        if factor != 1.0:
            self.weight.mul_(factor)
            if self.bias is not None:
                self.bias.mul_(factor)


def want_dense(
    placement: Placement, name: str, destination: Tensor, shape: tuple[int, ...] | None = None, *index: slice
) -> None:
    """Ask for a tensor of a layer that is to be stored as floats; without a shape, for one like `destination`.

    Raises:
        PenstockError: UNIMPLEMENTED, naming the layer: it is not.
    """
    layer = name.rpartition(".")[0]
    if not isinstance(placement.format_of(layer), DenseFormat):
        raise unimplemented(f"quantization of experts and their routers ({layer})")
    placement.want(name, destination, tuple(destination.shape) if shape is None else shape, *index)


def _want_stacked(placement: Placement, name: str, destination: Tensor, shape: tuple[int, ...], *index: slice) -> None:
    """One tensor of all experts, each of `shape`."""
    want_dense(placement, name, destination, (len(destination), *shape), slice(None), *index)


def _want_singly(placement: Placement, name: str, destination: Tensor, shape: tuple[int, ...], *index: slice) -> None:
    """A tensor of each expert."""
    for expert, here in enumerate(destination):
        want_dense(placement, name.format(expert=expert), here, shape, *index)
