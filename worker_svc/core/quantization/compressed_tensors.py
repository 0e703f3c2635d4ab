"""`quant_method: compressed-tensors`: schemes that say of weights and inputs how many bits and scales they have."""

from collections.abc import Mapping
from typing import Any

from worker_svc.core.quantization.fields import INPUT_SCALES, KV_SCALES, group_size, refused, require
from worker_svc.core.quantization.fp8 import block_format
from worker_svc.core.quantization.spec import (
    FormatSpec,
    Fp8ChannelSpec,
    Fp8TensorSpec,
    IntSpec,
    Mxfp4Spec,
    Nvfp4Spec,
    QuantizationSpec,
)

METHOD = "compressed-tensors"
_DENSE = (None, "dense")
_ALL = ("re:.*",)  # layers
# Of floats of 4 bits: inputs that share a scale, and the way the scales are told.
_FP4: dict[str, tuple[int, str, FormatSpec]] = {
    "nvfp4-pack-quantized": (16, "tensor_group", Nvfp4Spec("weight_packed", "weight_global_scale", divides=True)),
    "mxfp4-pack-quantized": (32, "group", Mxfp4Spec(has_blocks=False)),
}
_PACKED, _SINGLE = "pack-quantized", ("int-quantized", "naive-quantized")


def parse(config: Mapping[str, Any]) -> QuantizationSpec:
    """Read the method's fields, as `parse_quantization`."""
    groups = config.get("config_groups") or {}
    if not groups and config.get("kv_cache_scheme") is not None:
        return QuantizationSpec(Fp8TensorSpec(rounds_inputs=False), _ALL, method=METHOD, unused=KV_SCALES)
    if len(groups) != 1:
        raise refused(f"({METHOD}) with {len(groups)} config_groups")
    (group,) = groups.values()
    _require("sparsity_config", (config.get("sparsity_config") or {}).get("format"), *_DENSE)
    _require("targets", group.get("targets"), ["Linear"])
    _require("output_activations", group.get("output_activations"), None)
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    _require("weights.dynamic", weights.get("dynamic", False), False)
    return QuantizationSpec(
        _format(weights, inputs, group.get("format") or config.get("format")),
        tuple(config.get("ignore") or ()),
        method=METHOD,
        unused=(*INPUT_SCALES, ".input_global_scale", ".weight_shape", *KV_SCALES),
    )


def _format(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, stored_as: str | None) -> FormatSpec:
    kind = weights.get("type"), weights.get("num_bits")
    if kind == ("float", 8):
        return _fp8(weights, inputs)
    if kind[0] == "int" and kind[1] in (4, 8) and stored_as in (_PACKED, *_SINGLE):
        return _integers(weights, is_packed=stored_as == _PACKED)
    if kind == ("float", 4) and stored_as in _FP4:
        return _fp4(weights, stored_as)
    raise refused(
        f"({METHOD}) whose weights.type is {kind[0]!r} and weights.num_bits is {kind[1]!r}, stored as {stored_as!r}"
    )


def _fp8(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> FormatSpec:
    _require("weights.symmetric", weights.get("symmetric", True), True)
    _require("weights.actorder", weights.get("actorder"), None)
    strategy = weights.get("strategy")
    _require("weights.strategy", strategy, "channel", "tensor", "block")
    if inputs is not None:
        for name, wanted in {"type": "float", "num_bits": 8, "symmetric": True}.items():
            _require(f"input_activations.{name}", inputs.get(name, wanted), wanted)
        _require("input_activations.strategy", inputs.get("strategy"), "token", "tensor", "group")
    if strategy == "block":
        return block_format(METHOD, weights.get("block_structure"), scale="weight_scale")
    rounds_inputs = inputs is not None
    return Fp8ChannelSpec(rounds_inputs) if strategy == "channel" else Fp8TensorSpec(rounds_inputs)


def _fp4(weights: Mapping[str, Any], stored_as: str) -> FormatSpec:
    """Inputs are not rounded, though the scheme may say so: that is more exact."""
    group, strategy, spec = _FP4[stored_as]
    _require("weights.symmetric", weights.get("symmetric", True), True)
    _require("weights.strategy", weights.get("strategy"), strategy)
    _require("weights.group_size", weights.get("group_size"), group)
    return spec


def _integers(weights: Mapping[str, Any], *, is_packed: bool) -> FormatSpec:
    """Inputs are not rounded, though the scheme may say so: that is more exact."""
    strategy = weights.get("strategy")
    _require("weights.strategy", strategy, "channel", "group", "tensor")
    if not is_packed:
        _require("weights.num_bits", weights.get("num_bits"), 8)
    order = weights.get("actorder")
    _require("weights.actorder", order, None, False, True, "weight", "static", "group", "dynamic")
    return IntSpec(
        bits=weights["num_bits"],
        is_packed=is_packed,
        group=group_size(METHOD, weights) if strategy == "group" else None,
        has_zeros=not weights.get("symmetric", True),
        has_order=order in (True, "group", "dynamic"),
        has_one_scale=strategy == "tensor",
    )


def _require(name: str, value: Any, *wanted: Any) -> None:
    require(METHOD, name, value, *wanted)
