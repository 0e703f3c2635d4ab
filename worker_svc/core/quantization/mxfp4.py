"""`quant_method: mxfp4`: experts of 4-bit floats, as OpenAI stores those of gpt-oss."""

from collections.abc import Mapping
from typing import Any

from worker_svc.core.quantization.fields import dense_parts
from worker_svc.core.quantization.spec import Mxfp4Spec, QuantizationSpec, parts_of_names

METHOD = "mxfp4"
_QUANTIZED = ["mlp.experts"]  # all else is stored as floats


def parse(config: Mapping[str, Any]) -> QuantizationSpec:
    """Read the method's fields, as `parse_quantization`."""
    ignored = dense_parts(METHOD, config.get("modules_to_not_convert"))
    return QuantizationSpec(Mxfp4Spec(), ignored, only=parts_of_names(_QUANTIZED), method=METHOD)
