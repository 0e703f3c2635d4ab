"""`quant_method: modelopt`: floats of 8 bits with a scale for a tensor, or of 4 (NVFP4), as NVIDIA's ModelOpt stores
them.
"""

from collections.abc import Mapping
from typing import Any

from worker_svc.core.quantization.fields import INPUT_SCALES, KV_SCALES, dense_parts, require
from worker_svc.core.quantization.spec import FormatSpec, Fp8TensorSpec, Nvfp4Spec, QuantizationSpec

METHOD = "modelopt"
_FORMATS: dict[str, FormatSpec] = {
    "FP8": Fp8TensorSpec(rounds_inputs=True),
    "NVFP4": Nvfp4Spec("weight", "weight_scale_2", divides=False),
}


def parse(config: Mapping[str, Any]) -> QuantizationSpec:
    """Read the method's fields, as `parse_quantization`."""
    algorithm = str(config.get("quant_algo"))
    require(METHOD, "quant_algo", algorithm, *_FORMATS)
    require(METHOD, "group_size", config.get("group_size"), None, 16)
    listed = config.get("ignore") or config.get("exclude_modules")
    return QuantizationSpec(
        _FORMATS[algorithm],
        dense_parts(METHOD, listed, has_dense_head=False),
        method=METHOD,
        unused=(*INPUT_SCALES, *KV_SCALES),
    )
