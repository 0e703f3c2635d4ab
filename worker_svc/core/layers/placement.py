"""The device of a model's weights, and the part of each tensor of a checkpoint that a rank holds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from contract.domain.errors import unimplemented
from worker_svc.core.distributed import Group
from worker_svc.core.formats.choice import find_reading
from worker_svc.core.formats.interface import Format, Multiplied, Piece, Reading, Tensors
from worker_svc.core.formats.stacked.choice import FLOATS_ALONE, Forms, find_stacked_reading
from worker_svc.core.formats.stacked.interface import StackedFormat
from worker_svc.core.operations.interface import Operations
from worker_svc.core.operations.torch_operations import TorchOperations
from worker_svc.core.quantization.spec import QuantizationSpec


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """One tensor of a checkpoint: `destination` takes its part `index` (a slice per dimension)."""

    name: str
    destination: Tensor
    shape: tuple[int, ...]  # of the whole tensor, as stored
    index: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a linear layer in a checkpoint."""

    name: str  # without `.weight`
    shape: tuple[int, int]  # all its outputs and inputs
    outputs: slice
    inputs: slice
    stacked: tuple[int, int] | None = None  # this one of so many in each tensor, which is called `{name}_{suffix}`

    def wanted(self, piece: Piece, outputs: slice, inputs: slice, dtype: torch.dtype) -> WantedTensor:
        """The share of such a part in a stored tensor, whose destination is yet to be made."""
        shape, index = piece.shape(*self.shape), piece.index(outputs, inputs)
        sizes = [len(range(size)[part]) for size, part in zip(shape, index, strict=True)]
        destination = torch.empty(sizes, dtype=piece.dtype or dtype, device="meta")
        if self.stacked is None:
            return WantedTensor(f"{self.name}.{piece.suffix}", destination, shape, index)
        place, count = self.stacked
        name, index = f"{self.name}_{piece.suffix}", (slice(place, place + 1), *index)
        return WantedTensor(name, destination.unsqueeze(0), (count, *shape), index)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Weights that are made of stored tensors of another form, as soon as these are read."""

    reading: Reading[Multiplied]
    stored: Mapping[str, WantedTensor]  # by suffix; their destinations are of no device: they are made for a moment
    made: Mapping[str, WantedTensor]  # by suffix
    index: tuple[slice, slice]  # the outputs and inputs that are wanted, of those that the stored tensors give
    is_stacked: bool  # stored tensors have a dimension more, of one place

    @property
    def device(self) -> torch.device:
        """That of the weights."""
        return next(iter(self.made.values())).destination.device

    def is_like(self, other: "Conversion") -> bool:
        """Return whether `other` is the same with tensors as large, of another expert."""
        if self.reading is not other.reading or (self.index, self.is_stacked) != (other.index, other.is_stacked):
            return False
        both = zip(self.stored.values(), other.stored.values(), strict=True)
        return all(one.destination.shape == another.destination.shape for one, another in both)


def convert_together(conversions: Sequence[Conversion], tensors: Tensors) -> None:
    """Make the weights of what was read: tensors by suffix, [conversions, ...], of conversions that are alike."""
    reading, index = conversions[0].reading, conversions[0].index
    assert reading.convert is not None
    if conversions[0].is_stacked:
        tensors = {suffix: tensor.squeeze(1) for suffix, tensor in tensors.items()}
    # Of thousands of experts, one by one, launching small kernels would take most of the time.
    found = torch.vmap(reading.convert)(tensors)
    for piece in reading.multiplied.pieces:
        for conversion, made in zip(conversions, found[piece.suffix], strict=True):
            conversion.made[piece.suffix].destination.copy_(made[piece.index(*index)])


@dataclass(frozen=True)
class Placement:
    """Device, dtype, ranks, formats, and what computes there; collects what layers want of a checkpoint."""

    device: torch.device
    dtype: torch.dtype
    group: Group = field(default_factory=Group)
    operations: Operations = field(default_factory=TorchOperations)
    quantization: QuantizationSpec | None = None
    wanted: list[WantedTensor] = field(default_factory=list)  # a stored tensor may have several
    conversions: list[Conversion] = field(default_factory=list)

    @property
    def weights(self) -> Iterator[WantedTensor]:
        """All that is kept."""
        yield from self.wanted
        for conversion in self.conversions:
            yield from conversion.made.values()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for a weight, in the model's dtype unless another is given."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def reading_of(self, name: str, *, widens: bool = False) -> Reading[Format]:
        """The reading of the part of this name; as `find_reading`, by the checkpoint's quantization."""
        return find_reading(self.quantization, name, widens=widens)

    def stacked_readings_of(self, names: Sequence[str], forms: Forms | None = None) -> list[Reading[StackedFormat]]:
        """Those of the experts of these names, which are multiplied in one form: floats, if that would be several. They
        are as many objects as there are ways to read.

        forms: of which it is one; None: of those that are multiplied here.
        """
        forms = self.operations.expert_forms if forms is None else forms
        covered = [self.quantization is not None and self.quantization.covers(name) for name in names]
        of_each_kind = dict(zip(covered, names, strict=True))

        def find(forms: Forms) -> dict[bool, Reading[StackedFormat]]:
            return {each: find_stacked_reading(self.quantization, name, forms) for each, name in of_each_kind.items()}

        readings = find(forms)
        if len({type(each.multiplied) for each in readings.values()}) > 1:
            readings = find(FLOATS_ALONE)
        return [readings[each] for each in covered]

    def want_part(self, reading: Reading[Multiplied], part: StoredPart, destinations: Tensors) -> None:
        """Ask for a part of a linear layer; `destinations` are tensors of `reading.multiplied` by suffix."""
        if reading.convert is None:
            for piece in reading.pieces:
                index = piece.index(part.outputs, part.inputs)
                self.want(f"{part.name}.{piece.suffix}", destinations[piece.suffix], piece.shape(*part.shape), *index)
            return
        outputs = reading.stored_part("out", part.outputs, part.shape[0])
        inputs = reading.stored_part("in", part.inputs, part.shape[1])
        stored = {piece.suffix: part.wanted(piece, outputs, inputs, self.dtype) for piece in reading.pieces}
        made = {
            suffix: WantedTensor(f"{part.name}.{suffix}", each, tuple(each.shape), (slice(None),) * each.ndim)
            for suffix, each in destinations.items()
        }
        index = _within(part.outputs, outputs), _within(part.inputs, inputs)
        self.conversions.append(Conversion(reading, stored, made, index, is_stacked=part.stacked is not None))

    def want_weight(self, part: StoredPart, destination: Tensor) -> None:
        """Ask for a part of the weight of a linear layer as floats [outputs, inputs], however it is stored."""
        self.want_part(self.reading_of(part.name, widens=True), part, {"weight": destination})

    def want(self, name: str, destination: Tensor, shape: tuple[int, ...], *index: slice) -> None:
        """Ask for `name`, of `shape` in the checkpoint; dimensions without a slice are taken whole."""
        self.wanted.append(WantedTensor(name, destination, shape, index + (slice(None),) * (len(shape) - len(index))))

    def part(self, size: int, what: str) -> slice:
        """This rank's part of `size` equal units (heads).

        Raises:
            PenstockError: UNIMPLEMENTED, `size` does not divide by the number of ranks.
        """
        if size % self.group.world_size:
            raise unimplemented(
                f"{what} ({size}) over {self.group.world_size} tensor-parallel ranks, which do not divide it,"
            )
        return self.columns(size)

    def columns(self, size: int, unit: int = 1) -> slice:
        """This rank's part of `size` numbers, cut between groups of `unit`; the first ranks may have a group more."""
        world_size, rank = self.group.world_size, self.group.rank
        each, more = divmod(-(-size // unit), world_size)
        first, last = (min(size, (each * number + min(number, more)) * unit) for number in (rank, rank + 1))
        return slice(first, last)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """This rank's key-value heads; ranks share one where there are more ranks than heads."""
        world_size, rank = self.group.world_size, self.group.rank
        if num_kv_heads >= world_size:
            return self.part(num_kv_heads, "num_key_value_heads")
        if world_size % num_kv_heads:
            raise unimplemented(f"{num_kv_heads} key-value heads over {world_size} tensor-parallel ranks")
        head = rank * num_kv_heads // world_size
        return slice(head, head + 1)


def _within(wanted: slice, read: slice) -> slice:
    """The wanted places, counted from the first that is read."""
    if read is wanted:
        return slice(0, len(range(wanted.start, wanted.stop, wanted.step or 1)))
    return slice(wanted.start - read.start, wanted.stop - read.start)
