"""`quant_method: modelopt`: 8-bit floats with a scale for a tensor, as NVIDIA's ModelOpt stores them."""

from collections.abc import Mapping
from typing import Any

from worker_svc.core.quantization.fields import INPUT_SCALES, KV_SCALES, dense_parts, require
from worker_svc.core.quantization.spec import Fp8TensorSpec, QuantizationSpec

METHOD = "modelopt"


def parse(config: Mapping[str, Any]) -> QuantizationSpec:
    """Read the method's fields, as `parse_quantization`."""
    require(METHOD, "quant_algo", config.get("quant_algo"), "FP8")
    listed = config.get("ignore") or config.get("exclude_modules")
    kv_cache = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
    return QuantizationSpec(
        Fp8TensorSpec(rounds_inputs=True),
        dense_parts(METHOD, listed, has_dense_head=False),
        method=METHOD,
        unused=(*INPUT_SCALES, *KV_SCALES),
        has_kv_scales=kv_cache is not None,
    )
