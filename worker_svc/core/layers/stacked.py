"""Linear layers of experts: as many weights of one shape as there are experts, of which a row meets some."""

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from contract.domain.errors import unimplemented
from worker_svc.core.formats.dense import DenseFormat
from worker_svc.core.layers.linear import Projection
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import ExpertsSpec

_Stored: TypeAlias = tuple[str, Tensor, tuple[int, ...], tuple[slice, ...]]  # of an expert: suffix, here, shape, part


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
        for each, size in zip(projections, sizes, strict=True):
            here, rows = slice(start, start + size), each.stored
            require_dense(placement, rows.name)
            stored = slice(rows.first + each.mine.start, rows.first + each.mine.stop)
            of = rows.of or each.size
            parts: list[_Stored] = [("weight", self.weight[:, here], (of, num_inputs), (stored, inputs))]
            if self.bias is not None:
                parts.append(("bias", self.bias[:, here], (of,), (stored,)))
            for suffix, destination, shape, index in parts:
                name = f"{rows.name}.{suffix}"
                if spec.is_stacked:
                    placement.want(name, destination, (count, *shape), slice(None), *index)
                    continue
                for expert in range(count):
                    placement.want(name.format(expert=expert), destination[expert], shape, *index)
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


def require_dense(placement: Placement, name: str) -> None:
    """Refuse a layer of experts that is stored otherwise, by its name.

    Raises:
        PenstockError: UNIMPLEMENTED.
    """
    if not isinstance(placement.format_of(name), DenseFormat):
        raise unimplemented(f"quantization of experts and their routers ({name})")
