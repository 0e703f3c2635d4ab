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
from worker_svc.core.formats.int4 import IntegersFormat, ToInt4
from worker_svc.core.formats.integers import IntFormat
from worker_svc.core.formats.interface import ConvertedFormat, Format, Reading, StoredFormat
from worker_svc.core.formats.mxfp4 import Mxfp4Format
from worker_svc.core.formats.nvfp4 import Nvfp4Format
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
    Fp8BlockSpec: Fp8BlockFormat,
    Fp8OnlineSpec: Fp8OnlineFormat,
}
_INTEGERS: dict[type, Callable[[Any], IntegersFormat]] = {  # converted if they have 4 bits, in order
    AwqSpec: AwqFormat,
    GptqSpec: GptqFormat,
    IntSpec: IntFormat,
}
_WIDENED: dict[type, Callable[[Any], StoredFormat]] = {
    Mxfp4Spec: Mxfp4Format,
    Nvfp4Spec: Nvfp4Format,
}


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
    converted = None if widens else _find_converted(spec)
    if converted is not None:
        return Reading(converted.pieces, converted.multiplied, converted.convert, converted.needs_whole_rows)
    stored = (_MULTIPLIED | _CONVERTED | _INTEGERS | _WIDENED)[type(spec)](spec)
    if stored.pieces == dense.pieces:
        return Reading(dense.pieces, dense)
    return Reading(stored.pieces, dense, lambda tensors: {"weight": stored.widen(tensors)})


def find_multiplied(quantization: QuantizationSpec) -> Format | None:
    """The form in which its layers are multiplied without being widened; None: they are widened."""
    spec = quantization.format
    if type(spec) in _MULTIPLIED:
        return _MULTIPLIED[type(spec)](spec)
    converted = _find_converted(spec)
    return converted.multiplied if converted is not None else None


def find_int4(spec: FormatSpec) -> IntegersFormat | None:
    """The format of integers of 4 bits, in order; None: they are not such."""
    integers = _INTEGERS[type(spec)](spec) if type(spec) in _INTEGERS else None
    return integers if integers is not None and integers.is_int4 else None


def _find_converted(spec: FormatSpec) -> ConvertedFormat | None:
    if type(spec) in _CONVERTED:
        return _CONVERTED[type(spec)](spec)
    integers = find_int4(spec)
    return None if integers is None else ToInt4(integers)
