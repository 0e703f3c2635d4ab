"""Linear layers of experts: as many weights of one shape as there are experts, of which a row meets some."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from worker_svc.core.formats.interface import Reading, Tensors
from worker_svc.core.formats.stacked.choice import FLOATS_ALONE
from worker_svc.core.formats.stacked.floats import StackedFloatsFormat
from worker_svc.core.formats.stacked.interface import StackedFormat
from worker_svc.core.layers.linear import Projection
from worker_svc.core.layers.placement import Placement, StoredPart
from worker_svc.core.models.spec import ExpertsSpec, StoredRows
from worker_svc.core.quantization.fields import refused
from worker_svc.core.quantization.spec import Mxfp4Spec, QuantizationSpec


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
        num_mine = inputs.stop - inputs.start
        sizes = [each.mine.stop - each.mine.start for each in projections]
        readings = _readings(placement, spec, [each.stored for each in projections])
        form = next(iter(readings.values())).multiplied
        assert inputs.start % form.unit == 0, "ranks part inputs between those that are held together"
        tensors = {
            piece.suffix: placement.empty(
                count, *piece.shape(sum(sizes), num_mine), dtype=piece.dtype or placement.dtype
            )
            for piece in form.pieces
        }
        self.weight = form.stack(tensors, num_mine)
        self.bias = placement.empty(count, sum(sizes)) if spec.each.has_bias else None
        self._adds_bias = columns is None or placement.group.rank == 0
        start = 0
        want = _WANTS[spec.layout]
        for each, size in zip(projections, sizes, strict=True):
            here, rows = slice(start, start + size), each.stored
            first, last = (rows.first + rows.every * place for place in (each.mine.start, each.mine.stop))
            bias = None if self.bias is None else self.bias[:, here]
            stored = _Stored(rows.name, rows.of or each.size, slice(first, last, rows.every), num_inputs, inputs)
            of_rows = {
                piece.suffix: tensors[piece.suffix][(slice(None), *piece.index(here, slice(0, num_mine)))]
                for piece in form.pieces
            }
            want(placement, stored, readings, of_rows, bias)
            start += size

    def prepare(self) -> None:
        """Let one rank alone add the bias, where inputs are split over them; once, when the weights are there."""
        if self.bias is not None and not self._adds_bias:
            self.bias.zero_()

    def scale_outputs(self, factor: float) -> None:
        """Multiply what comes out by `factor`, once, when the weights are there."""
        if factor != 1.0:
            self.weight.scale_outputs(factor)
            if self.bias is not None:
                self.bias.mul_(factor)


def inputs_together(placement: Placement, spec: ExpertsSpec, stored: StoredRows) -> int:
    """The inputs of such experts that are held together: ranks part them between such groups."""
    return next(iter(_readings(placement, spec, [stored]).values())).multiplied.unit


_Readings = Mapping[str, Reading[StackedFormat]]  # by the name of a layer: of one expert, or of all in one tensor


def _readings(placement: Placement, spec: ExpertsSpec, stored: Sequence[StoredRows]) -> _Readings:
    """Those of all layers, which are multiplied in one form: floats, where another cannot be cut for all ranks."""
    count = spec.count if spec.layout == "single" else 1
    names = [rows.name.format(expert=expert) for rows in stored for expert in range(count)]
    readings = placement.stacked_readings_of(names)
    form, size = readings[0].multiplied, spec.each.size
    if size % form.outputs_together or -(-size // form.unit) < placement.group.world_size:
        readings = placement.stacked_readings_of(names, FLOATS_ALONE)
    return dict(zip(names, readings, strict=True))


@dataclass(frozen=True, slots=True)
class _Stored:
    """A projection of each expert in a checkpoint, and the part of it that is wanted."""

    name: str
    num_outputs: int
    outputs: slice
    num_inputs: int
    inputs: slice


def _want_single(
    placement: Placement, stored: _Stored, readings: _Readings, weights: Tensors, bias: Tensor | None
) -> None:
    shape = stored.num_outputs, stored.num_inputs
    for expert in range(len(next(iter(weights.values())))):
        name = stored.name.format(expert=expert)
        if _has_blocks(placement.quantization, name):
            raise refused(f"(mxfp4) of experts that are stored one by one ({name})")
        part = StoredPart(name, shape, stored.outputs, stored.inputs)
        placement.want_part(readings[name], part, {suffix: tensor[expert] for suffix, tensor in weights.items()})
        if bias is not None:
            placement.want(f"{name}.bias", bias[expert], shape[:1], stored.outputs)


def _want_stacked(
    placement: Placement, stored: _Stored, readings: _Readings, weights: Tensors, bias: Tensor | None
) -> None:
    weight, index = _floats(readings[stored.name], stored, weights), (slice(None), stored.outputs, stored.inputs)
    placement.want(f"{stored.name}.weight", weight, (len(weight), stored.num_outputs, stored.num_inputs), *index)
    if bias is not None:
        placement.want(f"{stored.name}.bias", bias, (len(weight), stored.num_outputs), *index[:2])


def _want_transposed(
    placement: Placement, stored: _Stored, readings: _Readings, weights: Tensors, bias: Tensor | None
) -> None:
    count, outputs, inputs = len(next(iter(weights.values()))), stored.num_outputs, stored.num_inputs
    if _has_blocks(placement.quantization, stored.name):
        for expert in range(count):
            part = StoredPart(stored.name, (outputs, inputs), stored.outputs, stored.inputs, (expert, count))
            own = {suffix: tensor[expert] for suffix, tensor in weights.items()}
            placement.want_part(readings[stored.name], part, own)
    else:
        weight = _floats(readings[stored.name], stored, weights).transpose(1, 2)
        placement.want(stored.name, weight, (count, inputs, outputs), slice(None), stored.inputs, stored.outputs)
    if bias is not None:
        placement.want(f"{stored.name}_bias", bias, (count, outputs), slice(None), stored.outputs)


def _has_blocks(quantization: QuantizationSpec | None, name: str) -> bool:
    """Return whether experts are quantized as gpt-oss's."""
    if quantization is None or not quantization.covers(name):
        return False
    return isinstance(quantization.format, Mxfp4Spec) and quantization.format.has_blocks


def _floats(reading: Reading[StackedFormat], stored: _Stored, weights: Tensors) -> Tensor:
    """The weights of all experts that one tensor holds."""
    if reading.convert is not None or not isinstance(reading.multiplied, StackedFloatsFormat):
        raise refused(f"of experts that one tensor holds ({stored.name})")
    return weights["weight"]


_WANTS = {"single": _want_single, "stacked": _want_stacked, "transposed": _want_transposed}
