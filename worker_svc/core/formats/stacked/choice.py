"""The choice of a form in which the weights of experts are multiplied."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from worker_svc.core.formats.choice import find_int4, find_reading
from worker_svc.core.formats.fp8_block import Fp8BlockFormat
from worker_svc.core.formats.fp8_channel import Fp8ChannelFormat, kernels_have_fp8
from worker_svc.core.formats.fp8_online import Fp8OnlineFormat
from worker_svc.core.formats.fp8_tensor import Fp8TensorFormat
from worker_svc.core.formats.interface import Reading
from worker_svc.core.formats.mxfp4 import Mxfp4Format
from worker_svc.core.formats.stacked.floats import StackedFloatsFormat
from worker_svc.core.formats.stacked.fp4 import StackedFp4Format
from worker_svc.core.formats.stacked.fp8 import StackedFp8Format
from worker_svc.core.formats.stacked.int4 import StackedInt4Format, has_groups, pack_int4
from worker_svc.core.formats.stacked.interface import StackedFormat
from worker_svc.core.quantization.spec import (
    AwqSpec,
    Fp8BlockSpec,
    Fp8ChannelSpec,
    Fp8OnlineSpec,
    Fp8TensorSpec,
    GptqSpec,
    IntSpec,
    Mxfp4Spec,
    QuantizationSpec,
)

Forms: TypeAlias = frozenset[type[StackedFormat]]

FLOATS_ALONE: Forms = frozenset((StackedFloatsFormat,))
_GROUPS = tuple(1 << each for each in range(5, 11))  # of inputs with one scale, as kernels take them


def kernel_forms(device: torch.device) -> Forms:
    """Those that kernels multiply there, or in Triton's interpreter."""
    forms = FLOATS_ALONE | {StackedFp4Format, StackedInt4Format}
    return forms | {StackedFp8Format} if kernels_have_fp8(device) else forms


def find_stacked_reading(quantization: QuantizationSpec | None, name: str, forms: Forms) -> Reading[StackedFormat]:
    """The way to read the layer called `name` in the checkpoint, one expert's of many, which is multiplied in one of
    `forms`: as floats, if its own is none of them.
    """
    if quantization is not None and quantization.covers(name):
        kept = _KEPT.get(type(quantization.format), _none)(quantization.format)
        if kept is not None and type(kept.multiplied) in forms:
            return kept
    reading = find_reading(quantization, name, widens=True)
    return Reading(reading.pieces, StackedFloatsFormat(), reading.convert, reading.needs_whole_rows)


def _none(_spec: object) -> None:
    return None


def _channel(spec: Fp8ChannelSpec) -> Reading[StackedFormat]:
    return Reading(Fp8ChannelFormat(spec).pieces, StackedFp8Format())


def _converted(stored: Fp8TensorFormat | Fp8OnlineFormat) -> Reading[StackedFormat]:
    return Reading(stored.pieces, StackedFp8Format(), stored.convert, stored.needs_whole_rows)


def _blocks(spec: Fp8BlockSpec) -> Reading[StackedFormat] | None:
    if spec.inputs not in _GROUPS:
        return None
    stored = Fp8BlockFormat(spec)
    return Reading(stored.pieces, StackedFp8Format(spec.inputs), stored.of_outputs)


def _fours(spec: Mxfp4Spec) -> Reading[StackedFormat]:
    stored = Mxfp4Format(spec)
    return Reading(stored.pieces, StackedFp4Format(), stored.repack)


def _integers(spec: AwqSpec | GptqSpec | IntSpec) -> Reading[StackedFormat] | None:
    stored = find_int4(spec)
    if stored is None or not has_groups(stored.group):
        return None
    return Reading(stored.pieces, StackedInt4Format(stored.group), partial(pack_int4, stored))


_KEPT: dict[type, Callable[[Any], Reading[StackedFormat] | None]] = {
    Fp8ChannelSpec: _channel,
    Fp8TensorSpec: lambda spec: _converted(Fp8TensorFormat(spec)),
    Fp8OnlineSpec: lambda spec: _converted(Fp8OnlineFormat(spec)),
    Fp8BlockSpec: _blocks,
    Mxfp4Spec: _fours,
    AwqSpec: _integers,
    GptqSpec: _integers,
    IntSpec: _integers,
}
