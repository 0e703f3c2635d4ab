"""The rotation that a `config.json` describes, as transformers 5 writes it (`rope_parameters`) and as it did before."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

from contract.domain.errors import PenstockError, unimplemented
from worker_svc.core.models.spec import RopeSpec, TemperatureSpec

SCALING_BETA = "llama_4_scaling_beta"
_OTHER_NAMES = {"su": "longrope", "mrope": "default"}  # the last rotates by several positions, which a text has in one
# Of all kinds; some checkpoints carry those of another kind than theirs.
_KNOWN = frozenset(
    [
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"),
        *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor"),
        *("mrope_section", "mrope_interleaved"),  # of positions in images: a text's are one number
    ]
)


class Fields(Protocol):
    """The fields of a `config.json`; see `ConfigFields`."""

    def get(self, field: str) -> Any:
        """The value as it stands there."""

    def count(self, field: str, default: int | None = None) -> int:
        """A positive integer."""

    def positive(self, field: str, default: float | None = None) -> float:
        """A positive number."""

    def wrong(self, field: str, what: str) -> PenstockError:
        """The error that a field makes no sense."""


class _Parameters:
    """The parameters of one kind of rotation."""

    def __init__(self, fields: Fields, field: str, values: Mapping[str, Any]) -> None:
        self.fields = fields
        self.field = field
        self._values = values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; missing without a default it is an error."""
        value = default if (value := self._values.get(name)) is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self.fields.wrong(name, f"must be a positive number, got {value!r}")
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of so many positive numbers."""
        values = self._values.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise self.fields.wrong(name, f"must be a list of {count} numbers, one for each pair of dimensions")
        if not all(isinstance(each, int | float) and each > 0 for each in values):
            raise self.fields.wrong(name, "must be positive numbers")
        return tuple(map(float, values))


def read_rope(fields: Fields, head_dim: int, layer_type: str | None, **defaults: Any) -> RopeSpec:
    """The rotation of a layer, of a type where each has its own; `rope_scaling` wins over `rope_parameters`.

    Args:
        fields: of the model.
        head_dim: dimensions of a head.
        layer_type: such as `sliding_attention`.
        defaults: `theta` and `partial_rotary_factor` where the configuration says nothing; `is_paired`; `also`, names
            of parameters that are read elsewhere.

    Raises:
        PenstockError: UNIMPLEMENTED, naming the kind; INTERNAL (the operator's fault), naming the field.
    """
    parameters = _parameters(fields, layer_type, *defaults.get("also", ()))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = _OTHER_NAMES.get(kind, kind)
    if kind not in _READERS:
        raise unimplemented(f"rope type {kind!r} (there are: {', '.join(_READERS)})")
    share = _share(parameters, defaults.get("partial_rotary_factor"))
    theta = parameters.number("rope_theta", fields.positive("rope_theta", defaults.get("theta", 10000.0)))
    # The share of a proportional one is of a whole head's pairs.
    dims = None if kind == "proportional" else _dims(parameters, head_dim, share)
    more = _READERS[kind](parameters, dims or head_dim, share)
    return RopeSpec(theta, rope_type=kind, dims=dims, is_paired=defaults.get("is_paired", False), **more)


def read_score_factor(fields: Fields, rope: RopeSpec) -> float:
    """The factor of scores that goes with a stretched rotation, where a family has one (`mscale_all_dim`).

    Raises:
        PenstockError: INTERNAL (the operator's fault), naming the field.
    """
    parameters = _parameters(fields, None)
    if rope.rope_type == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    return _magnitude(rope.factor, parameters.number("mscale_all_dim")) ** 2


def read_temperature(fields: Fields) -> TemperatureSpec | None:
    """How queries grow with their position, as a rotation's parameters say (`SCALING_BETA`); None: with 0 not at all.

    Raises:
        PenstockError: INTERNAL (the operator's fault), naming the field.
    """
    parameters = _parameters(fields, None, SCALING_BETA)
    if parameters.get(SCALING_BETA) == 0:
        return None
    scale = int(parameters.number("original_max_position_embeddings"))
    return TemperatureSpec(scale, parameters.number(SCALING_BETA), first=0)


def _parameters(fields: Fields, layer_type: str | None, *also: str) -> _Parameters:
    """Those of the layers of a type, where each has its own."""
    scaling, new = fields.get("rope_scaling"), fields.get("rope_parameters")
    field = "rope_scaling" if scaling else "rope_parameters"
    told = scaling or new or {}
    if isinstance(told, Mapping) and layer_type is not None and layer_type in told:
        told = told[layer_type] or {}
    if not isinstance(told, Mapping):
        raise fields.wrong(field, f"must be an object, got {told!r}")
    for name, value in told.items():
        if name not in _KNOWN and name not in also and value is not None:
            raise unimplemented(f"rotary embedding with {name} ({field})")
    return _Parameters(fields, field, told)


def _share(parameters: _Parameters, default: float | None) -> float:
    """The part of a head that turns."""
    own, told = parameters.fields.get("partial_rotary_factor"), parameters.get("partial_rotary_factor")
    share = default if (share := own if told is None else told) is None else share
    if share is None:
        return 1.0
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise parameters.fields.wrong("partial_rotary_factor", f"must be a share of a head, got {share!r}")
    return share


def _dims(parameters: _Parameters, head_dim: int, share: float) -> int | None:
    """Dimensions of a head that turn; None: all."""
    if share == 1:
        return None
    dims = int(head_dim * share)
    if dims < 2 or dims % 2:
        raise parameters.fields.wrong(
            "partial_rotary_factor", f"leaves {dims} dimensions, rotary embedding needs pairs"
        )
    return dims


def _default(_parameters: _Parameters, _dims: int, _share: float) -> dict[str, Any]:
    return {}


def _linear(parameters: _Parameters, _dims: int, _share: float) -> dict[str, Any]:
    return {"factor": parameters.number("factor")}


def _proportional(parameters: _Parameters, dims: int, share: float) -> dict[str, Any]:
    return {"factor": parameters.number("factor", 1.0), "turning_pairs": int(share * dims // 2)}


def _dynamic(parameters: _Parameters, _dims: int, _share: float) -> dict[str, Any]:
    positions = parameters.fields.count("max_position_embeddings")
    return {"factor": parameters.number("factor"), "original_max_position_embeddings": positions}


def _llama3(parameters: _Parameters, _dims: int, _share: float) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original = map(parameters.number, names)
    if high < low:
        raise parameters.fields.wrong("high_freq_factor", f"must be at least low_freq_factor ({low:g}), got {high:g}")
    return {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(original),
    }


def _yarn(parameters: _Parameters, _dims: int, _share: float) -> dict[str, Any]:
    """Peng et al., "YaRN" (2023)."""
    positions = parameters.fields.count("max_position_embeddings")
    original = int(parameters.number("original_max_position_embeddings", positions))
    factor = parameters.number("factor", positions / original)
    scale, of_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    attention_factor = _magnitude(factor)
    if scale and of_all:
        attention_factor = _magnitude(factor, scale) / _magnitude(factor, of_all)
    truncates = parameters.get("truncate")
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": parameters.number("attention_factor", attention_factor),
        "beta_fast": parameters.number("beta_fast", 32.0),
        "beta_slow": parameters.number("beta_slow", 1.0),
        "truncates": truncates is None or bool(truncates),
    }


def _magnitude(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(parameters: _Parameters, dims: int, _share: float) -> dict[str, Any]:
    """Ding et al., "LongRoPE" (2024)."""
    positions = parameters.fields.count("max_position_embeddings")
    stated = parameters.fields.get("original_max_position_embeddings")  # Phi-3 has it beside its rope
    original = int(parameters.number("original_max_position_embeddings", stated))
    factor = parameters.number("factor", positions / original)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": parameters.number("attention_factor", attention_factor),
        "short_factors": parameters.numbers("short_factor", dims // 2),
        "long_factors": parameters.numbers("long_factor", dims // 2),
    }


_READERS = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
