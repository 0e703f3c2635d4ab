"""`quant_method: awq`: numbers of 4 bits (Lin et al., 2023), as AutoAWQ stores them."""

from collections.abc import Mapping
from typing import Any

from worker_svc.core.quantization.fields import dense_parts, group_size, require
from worker_svc.core.quantization.spec import AwqSpec, QuantizationSpec

METHOD = "awq"


def parse(config: Mapping[str, Any]) -> QuantizationSpec:
    """Read the method's fields, as `parse_quantization`; `w_bit` and `q_group_size` are names of AutoAWQ's own file."""
    require(METHOD, "bits", config.get("bits", config.get("w_bit")), 4)
    require(METHOD, "version", str(config.get("version", "gemm")).lower(), "gemm")
    require(METHOD, "zero_point", config.get("zero_point", True), True)
    name = "q_group_size" if "q_group_size" in config else "group_size"
    ignored = dense_parts(METHOD, config.get("modules_to_not_convert"))
    return QuantizationSpec(AwqSpec(group_size(METHOD, config, name)), ignored, method=METHOD)
