"""Weights of experts as integers of 4 bits with a scale and a zero for each group of inputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)
from torch import Tensor

from worker_svc.core.formats.int4 import NUMBERS, SCALES, Int4, IntegersFormat, multiply_scales, pack_integers
from worker_svc.core.formats.interface import OUT, Dim, Piece, Tensors
from worker_svc.core.formats.stacked.together import TILE, TOGETHER, by_output, together
from worker_svc.core.formats.words import BLOCK, WORD, WORDS

_SMALL_GROUPS = (16, 32, 64)  # of inputs, of which a block has several


def has_groups(group: int | None) -> bool:
    """Return whether groups of so many inputs are multiplied; None: all inputs are one."""
    return group is None or group in _SMALL_GROUPS or group % BLOCK == 0


class StackedInt4:
    """Implement `StackedWeight`: of each expert the words of `formats.int4`."""

    def __init__(self, numbers: Tensor, scales: Tensor, inputs: int, group: int | None) -> None:
        self.numbers = numbers  # i32[experts, outputs / TOGETHER, blocks, TOGETHER, WORDS], rounded up
        # f32[experts, blocks or larger groups, outputs, groups of a block or 1], with zeros as in `Int4`.
        self.scales = scales
        self._inputs = inputs
        self.group = group  # inputs that share a scale; None: all

    @property
    def count(self) -> int:
        """Implement `StackedWeight.count`."""
        return self.numbers.shape[0]

    @property
    def outputs(self) -> int:
        """Implement `StackedWeight.outputs`."""
        return self.scales.shape[2]

    @property
    def inputs(self) -> int:
        """Implement `StackedWeight.inputs`."""
        return self._inputs

    def of(self, expert: int) -> Tensor:
        """Implement `StackedWeight.of`."""
        scales = self.scales[expert].transpose(1, 2).flatten(0, 1)
        numbers = by_output(self.numbers[expert], self.outputs)
        return Int4(numbers, scales, self._inputs, self.group).widen(torch.float32)

    def scale_outputs(self, factor: float) -> None:
        """Implement `StackedWeight.scale_outputs`."""
        self.scales.copy_(multiply_scales(self.scales, factor))


@dataclass(frozen=True, slots=True)
class StackedInt4Format:
    """Implement `StackedFormat`; blocks are counted from the first input of a rank."""

    group: int | None  # inputs that share a scale; None: all

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Implement `StackedFormat.pieces`."""
        steps = Dim("none") if self.group is None else Dim("in", max(self.group, BLOCK))
        return (
            Piece(NUMBERS, (*TILE, Dim("none", WORDS)), WORD),
            Piece(SCALES, (steps, OUT, Dim("none", _of_a_step(self.group))), torch.float32),
        )

    @property
    def unit(self) -> int:
        """Implement `StackedFormat.unit`."""
        return self.group or 1

    @property
    def outputs_together(self) -> int:
        """Implement `StackedFormat.outputs_together`."""
        return TOGETHER

    def stack(self, tensors: Tensors, inputs: int) -> StackedInt4:
        """Implement `StackedFormat.stack`."""
        return StackedInt4(tensors[NUMBERS], tensors[SCALES], inputs, self.group)


def pack_int4(stored: IntegersFormat, tensors: Tensors) -> Tensors:
    """The tensors of `StackedInt4Format` of what stores integers of 4 bits."""
    integers, group = stored.read(tensors), stored.group
    packed = pack_integers(integers, integers.numbers.shape[1], group)
    each = _of_a_step(group)
    # Of groups that fill the last block up, scales are nought.
    scales = F.pad(packed.scales, (0, 0, 0, -len(packed.scales) % each))
    return {NUMBERS: together(packed.numbers), SCALES: scales.view(-1, each, packed.outputs).transpose(1, 2)}


def _of_a_step(group: int | None) -> int:
    """Groups of a block, or one."""
    return 1 if group is None else max(1, BLOCK // group)
