"""The choice of a format for each linear layer of a checkpoint."""

from collections.abc import Callable
from typing import Any

from worker_svc.core.formats.awq import AwqFormat
from worker_svc.core.formats.dense import DenseFormat
from worker_svc.core.formats.fp8_block import Fp8BlockFormat
from worker_svc.core.formats.fp8_channel import Fp8ChannelFormat
from worker_svc.core.formats.fp8_online import Fp8OnlineFormat
from worker_svc.core.formats.fp8_tensor import Fp8TensorFormat
from worker_svc.core.formats.gptq import GptqFormat
from worker_svc.core.formats.integers import IntFormat
from worker_svc.core.formats.interface import ConvertedFormat, Format, Reading, StoredFormat
from worker_svc.core.formats.mxfp4 import Mxfp4Format
from worker_svc.core.formats.nvfp4 import Nvfp4Format
from worker_svc.core.formats.stacked.floats import StackedFloatsFormat
from worker_svc.core.formats.stacked.fp4 import StackedFp4Format
from worker_svc.core.formats.stacked.fp8 import StackedFp8Format
from worker_svc.core.formats.stacked.interface import StackedFormat
from worker_svc.core.quantization.spec import (
    AwqSpec,
    FormatSpec,
    Fp8BlockSpec,
    Fp8ChannelSpec,
    Fp8OnlineSpec,
    Fp8TensorSpec,
    GptqSpec,
    IntSpec,
    Mxfp4Spec,
    Nvfp4Spec,
    QuantizationSpec,
)

_MULTIPLIED: dict[type, Callable[[Any], Format]] = {Fp8ChannelSpec: Fp8ChannelFormat}  # as they are stored
_CONVERTED: dict[type, Callable[[Any], ConvertedFormat]] = {
    Fp8TensorSpec: Fp8TensorFormat,
    Fp8OnlineSpec: Fp8OnlineFormat,
}
_WIDENED: dict[type, Callable[[Any], StoredFormat]] = {
    Fp8BlockSpec: Fp8BlockFormat,
    AwqSpec: AwqFormat,
    GptqSpec: GptqFormat,
    IntSpec: IntFormat,
    Mxfp4Spec: Mxfp4Format,
    Nvfp4Spec: Nvfp4Format,
}

_STEP = 32  # inputs that kernels for experts multiply with one scale, at least


def find_reading(quantization: QuantizationSpec | None, name: str, *, widens: bool = False) -> Reading[Format]:
    """The way to read the layer called `name` in the checkpoint.

    widens: for a product of floats alone, as heads are.
    """
    dense = DenseFormat()
    if quantization is None or not quantization.covers(name):
        return Reading(dense.pieces, dense)
    spec = quantization.format
    if type(spec) in _MULTIPLIED and not widens:
        format_ = _MULTIPLIED[type(spec)](spec)
        return Reading(format_.pieces, format_)
    if type(spec) in _CONVERTED and not widens:
        converted = _CONVERTED[type(spec)](spec)
        return Reading(converted.pieces, converted.multiplied, converted.convert, converted.needs_whole_rows)
    stored = _stored(spec)
    if stored.pieces == dense.pieces:
        return Reading(dense.pieces, dense)
    return Reading(stored.pieces, dense, lambda tensors: {"weight": stored.widen(tensors)})


def find_stacked_reading(
    quantization: QuantizationSpec | None, name: str, *, widens: bool = False, has_fp8: bool = True
) -> Reading[StackedFormat]:
    """The way to read the layer called `name` in the checkpoint, one expert's of many.

    widens: for products of floats alone.
    has_fp8: whether what computes reads 8-bit floats.
    """
    dense = StackedFloatsFormat()
    if quantization is None or not quantization.covers(name):
        return Reading(dense.pieces, dense)
    spec = quantization.format
    if isinstance(spec, Mxfp4Spec) and not widens:
        stored = Mxfp4Format(spec)
        return Reading(stored.pieces, StackedFp4Format(), stored.repack)
    if isinstance(spec, Fp8BlockSpec) and spec.inputs % _STEP == 0 and has_fp8 and not widens:
        blocks = Fp8BlockFormat(spec)
        return Reading(blocks.pieces, StackedFp8Format(spec.inputs), blocks.of_outputs)
    if isinstance(spec, Fp8ChannelSpec) and has_fp8 and not widens:
        return Reading(Fp8ChannelFormat(spec).pieces, StackedFp8Format())
    if type(spec) in _CONVERTED and has_fp8 and not widens:
        converted = _CONVERTED[type(spec)](spec)
        return Reading(converted.pieces, StackedFp8Format(), converted.convert, converted.needs_whole_rows)
    reading = find_reading(quantization, name, widens=True)
    return Reading(reading.pieces, dense, reading.convert, reading.needs_whole_rows)


def _stored(spec: FormatSpec) -> StoredFormat:
    return (_MULTIPLIED | _CONVERTED | _WIDENED)[type(spec)](spec)
