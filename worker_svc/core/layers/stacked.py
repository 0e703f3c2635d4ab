"""Linear layers of experts: as many weights of one shape as there are experts, of which a row meets some."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from worker_svc.core.layers.linear import Projection
from worker_svc.core.layers.placement import Placement, StoredPart
from worker_svc.core.models.spec import ExpertsSpec
from worker_svc.core.quantization.fields import refused
from worker_svc.core.quantization.spec import Mxfp4Spec


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
        want = _WANTS[spec.layout]
        for each, size in zip(projections, sizes, strict=True):
            here, rows = slice(start, start + size), each.stored
            first, last = (rows.first + rows.every * place for place in (each.mine.start, each.mine.stop))
            bias = None if self.bias is None else self.bias[:, here]
            stored = _Stored(rows.name, rows.of or each.size, slice(first, last, rows.every), num_inputs, inputs)
            want(placement, stored, self.weight[:, here], bias)
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


@dataclass(frozen=True, slots=True)
class _Stored:
    """A projection of each expert in a checkpoint, and the part of it that is wanted."""

    name: str
    num_outputs: int
    outputs: slice
    num_inputs: int
    inputs: slice


def _want_single(placement: Placement, stored: _Stored, weight: Tensor, bias: Tensor | None) -> None:
    shape = stored.num_outputs, stored.num_inputs
    for expert in range(len(weight)):
        name = stored.name.format(expert=expert)
        if _has_blocks(placement, name):
            raise refused(f"(mxfp4) of experts that are stored one by one ({name})")
        placement.want_weight(StoredPart(name, shape, stored.outputs, stored.inputs), weight[expert])
        if bias is not None:
            placement.want(f"{name}.bias", bias[expert], shape[:1], stored.outputs)


def _want_stacked(placement: Placement, stored: _Stored, weight: Tensor, bias: Tensor | None) -> None:
    count, outputs, inputs = len(weight), stored.num_outputs, stored.num_inputs
    index = slice(None), stored.outputs, stored.inputs
    _refuse_quantized(placement, stored.name)
    placement.want(f"{stored.name}.weight", weight, (count, outputs, inputs), *index)
    if bias is not None:
        placement.want(f"{stored.name}.bias", bias, (count, outputs), *index[:2])


def _want_transposed(placement: Placement, stored: _Stored, weight: Tensor, bias: Tensor | None) -> None:
    count, outputs, inputs = len(weight), stored.num_outputs, stored.num_inputs
    index = slice(None), stored.inputs, stored.outputs
    if _has_blocks(placement, stored.name):
        for expert in range(count):
            part = StoredPart(stored.name, (outputs, inputs), stored.outputs, stored.inputs, (expert, count))
            placement.want_weight(part, weight[expert])
    else:
        _refuse_quantized(placement, stored.name)
        placement.want(stored.name, weight.transpose(1, 2), (count, inputs, outputs), *index)
    if bias is not None:
        placement.want(f"{stored.name}_bias", bias, (count, outputs), slice(None), stored.outputs)


def _has_blocks(placement: Placement, name: str) -> bool:
    """Return whether experts are quantized as gpt-oss's."""
    quantization = placement.quantization
    if quantization is None or not quantization.covers(name):
        return False
    return isinstance(quantization.format, Mxfp4Spec) and quantization.format.has_blocks


def _refuse_quantized(placement: Placement, name: str) -> None:
    if placement.reading_of(name, widens=True).convert is not None:
        raise refused(f"of experts that one tensor holds ({name})")


_WANTS = {"single": _want_single, "stacked": _want_stacked, "transposed": _want_transposed}
