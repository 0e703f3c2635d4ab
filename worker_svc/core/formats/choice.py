"""The choice of a format for each linear layer of a checkpoint."""

from collections.abc import Callable

from worker_svc.core.formats.dense import DenseFormat
from worker_svc.core.formats.fp8_channel import Fp8ChannelFormat
from worker_svc.core.formats.interface import Format
from worker_svc.core.models.quantization import Fp8ChannelSpec, QuantizationSpec

_FORMATS: dict[type, Callable[[Fp8ChannelSpec], Format]] = {Fp8ChannelSpec: Fp8ChannelFormat}


def find_format(quantization: QuantizationSpec | None, name: str) -> Format:
    """The format of the layer called `name` in the checkpoint."""
    if quantization is None or not quantization.covers(name):
        return DenseFormat()
    return _FORMATS[type(quantization.format)](quantization.format)
