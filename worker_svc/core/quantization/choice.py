"""The format that a `quantization_config` describes, or an option asks for."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from contract.domain.errors import invalid
from worker_svc.core.quantization import awq, compressed_tensors, fp8, gptq, modelopt, mxfp4
from worker_svc.core.quantization.fields import dense_parts, other_kv_scheme, refused
from worker_svc.core.quantization.spec import Fp8OnlineSpec, QuantizationSpec

METHODS: dict[str, Callable[[Mapping[str, Any]], QuantizationSpec]] = {
    module.METHOD: module.parse for module in (awq, compressed_tensors, fp8, gptq, modelopt, mxfp4)
}
_ONLINE = "fp8"


def parse_quantization(config: Mapping[str, Any]) -> QuantizationSpec:
    """The formats that a `quantization_config` describes.

    Raises:
        PenstockError: UNIMPLEMENTED, naming the method or the setting that is not there.
    """
    method = config.get("quant_method", "unnamed")
    if method not in METHODS:
        raise refused(f"({method}; there are: {', '.join(sorted(METHODS))})")
    of_cache = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
    other = other_kv_scheme(of_cache)
    return replace(METHODS[method](config), has_kv_scales=of_cache is not None, other_kv_scheme=other)


def choose_quantization(stored: QuantizationSpec | None, wanted: str | None) -> QuantizationSpec | None:
    """The quantization that is stored, or that is made of a dense checkpoint when it is read.

    wanted: "fp8": of a dense checkpoint 8-bit floats; the method of the checkpoint, or None: as it is stored.

    Raises:
        PenstockError: UNIMPLEMENTED, naming `quantization`: there is no such way; INVALID_ARGUMENT: the checkpoint has
            another.
    """
    if wanted is None or (stored is not None and stored.method == wanted):
        return stored
    if stored is not None:
        raise invalid(
            f"quantization is {wanted!r}, but the checkpoint is quantized already ({stored.method}): leave it out",
            "quantization",
        )
    if wanted != _ONLINE:
        raise refused(f"({wanted}) of a checkpoint that is not stored so (there is: {_ONLINE})")
    return QuantizationSpec(Fp8OnlineSpec(), dense_parts(_ONLINE, None), method=_ONLINE)
