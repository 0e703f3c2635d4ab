"""A checkpoint's `quantization_config`: which linear layers are stored in which format."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.domain.errors import unimplemented


@dataclass(frozen=True, slots=True)
class Fp8ChannelSpec:
    """8-bit floats with a scale for each output."""

    rounds_inputs: bool  # to 8 bits too, with a scale for each token


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """One format for all linear layers but some."""

    format: Fp8ChannelSpec
    ignored: tuple[str, ...] = ()  # dense layers: names, or patterns after `re:`

    def covers(self, name: str) -> bool:
        """Return whether the layer called `name` is quantized."""
        return not any(_matches(each, name) for each in self.ignored)


def parse_quantization(config: Mapping[str, Any]) -> QuantizationSpec:
    """The formats that a `quantization_config` describes.

    Raises:
        PenstockError: UNIMPLEMENTED, naming the method or the setting that is not there.
    """
    method = config.get("quant_method", "unnamed")
    if method != "compressed-tensors":
        raise unimplemented(f"quantization ({method})")
    groups = config.get("config_groups") or {}
    if len(groups) != 1:
        raise unimplemented(f"quantization (compressed-tensors) with {len(groups)} config_groups")
    (group,) = groups.values()
    _require("kv_cache_scheme", config.get("kv_cache_scheme"), None)
    _require("sparsity_config", (config.get("sparsity_config") or {}).get("format"), None, "dense")
    _require("targets", group.get("targets"), ["Linear"])
    _require("output_activations", group.get("output_activations"), None)
    _require_fp8("weights", group.get("weights") or {}, "channel", is_dynamic=False)
    if (inputs := group.get("input_activations")) is not None:
        _require_fp8("input_activations", inputs, "token", is_dynamic=True)
    ignored: Sequence[str] = config.get("ignore") or ()
    return QuantizationSpec(Fp8ChannelSpec(rounds_inputs=inputs is not None), tuple(ignored))


def _require_fp8(where: str, scheme: Mapping[str, Any], strategy: str, *, is_dynamic: bool) -> None:
    _require(f"{where}.type", scheme.get("type"), "float")
    _require(f"{where}.num_bits", scheme.get("num_bits"), 8)
    _require(f"{where}.strategy", scheme.get("strategy"), strategy)
    _require(f"{where}.symmetric", scheme.get("symmetric", True), True)
    _require(f"{where}.dynamic", scheme.get("dynamic", False), is_dynamic)
    _require(f"{where}.actorder", scheme.get("actorder"), None)


def _require(field: str, value: Any, *wanted: Any) -> None:
    if value not in wanted:
        raise unimplemented(f"quantization (compressed-tensors) whose {field} is {value!r} and not {wanted[0]!r}")


def _matches(pattern: str, name: str) -> bool:
    return bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else pattern == name
