"""`quant_method: gptq`: numbers of 4 or 8 bits (Frantar et al., 2022), as AutoGPTQ and GPTQModel store them."""

from collections.abc import Mapping
from typing import Any

from worker_svc.core.quantization.fields import dense_parts, group_size, refused, require
from worker_svc.core.quantization.spec import GptqSpec, QuantizationSpec, parts_of_names

METHOD = "gptq"
_LEFT_OUT = "-:"  # of layers that keep their floats; other patterns give some layers other bits


def parse(config: Mapping[str, Any]) -> QuantizationSpec:
    """Read the method's fields, as `parse_quantization`."""
    require(METHOD, "bits", config.get("bits"), 4, 8)
    require(METHOD, "checkpoint_format", config.get("checkpoint_format") or "gptq", "gptq", "gptq_v2")
    require(METHOD, "is_marlin_format", config.get("is_marlin_format") or False, False)
    require(METHOD, "pack_dtype", config.get("pack_dtype") or "int32", "int32")
    has_order = bool(config.get("desc_act", False))
    is_first = config.get("checkpoint_format") != "gptq_v2"
    return QuantizationSpec(
        GptqSpec(config["bits"], group_size(METHOD, config), has_order, zeros_less_one=is_first),
        (
            *dense_parts(METHOD, config.get("modules_to_not_convert"), has_dense_head=_has_dense_head(config)),
            *_left_out(config),
        ),
        only=_modules(config),
        method=METHOD,
        unused=() if has_order else (".g_idx",),
    )


def _has_dense_head(config: Mapping[str, Any]) -> bool:
    return not config.get("lm_head", False)


def _left_out(config: Mapping[str, Any]) -> tuple[str, ...]:
    rules = config.get("dynamic") or {}
    others = [each for each in rules if not each.startswith(_LEFT_OUT)]
    if others:
        raise refused(f"({METHOD}) whose dynamic has other bits for {others[0]}")
    return tuple(f"re:{each.removeprefix(_LEFT_OUT)}" for each in rules)


def _modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The layers of a block that are quantized, where they are listed."""
    listed = config.get("modules_in_block_to_quantize") or ()
    names = [each for group in listed for each in ([group] if isinstance(group, str) else group)]
    return parts_of_names(names)
