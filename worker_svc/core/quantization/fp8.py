"""`quant_method: fp8`: 8-bit floats with a scale for a tensor (AutoFP8) or for blocks (DeepSeek-V3, Qwen3)."""

from collections.abc import Mapping
from typing import Any

from worker_svc.core.quantization.fields import INPUT_SCALES, KV_SCALES, dense_parts, refused, require
from worker_svc.core.quantization.spec import Fp8BlockSpec, Fp8TensorSpec, QuantizationSpec

METHOD = "fp8"


def parse(config: Mapping[str, Any]) -> QuantizationSpec:
    """Read the method's fields, as `parse_quantization`."""
    require(METHOD, "fmt", config.get("fmt", "e4m3"), "e4m3", "float8_e4m3fn")
    require(METHOD, "activation_scheme", config.get("activation_scheme", "dynamic"), "dynamic", "static")
    block = config.get("weight_block_size")
    listed = config.get("modules_to_not_convert") or config.get("ignored_layers")
    return QuantizationSpec(
        block_format(METHOD, block) if block is not None else Fp8TensorSpec(rounds_inputs=True, scale=_scale(config)),
        dense_parts(METHOD, listed),
        method=METHOD,
        unused=(*INPUT_SCALES, *KV_SCALES),
    )


def _scale(config: Mapping[str, Any]) -> str:
    """The name of scales: transformers' configurations have the field even without blocks, AutoFP8's do not."""
    return "weight_scale_inv" if "weight_block_size" in config else "weight_scale"


def block_format(method: str, block: Any, scale: str = "weight_scale_inv") -> Fp8BlockSpec:
    """The format with blocks of [outputs, inputs].

    Raises:
        PenstockError: UNIMPLEMENTED: these are no two sizes.
    """
    if not isinstance(block, list) or len(block) != 2 or not all(type(each) is int and each > 0 for each in block):
        raise refused(f"({method}) with blocks of {block!r}")
    return Fp8BlockSpec(block[0], block[1], scale)
