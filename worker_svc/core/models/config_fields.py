"""Typed access to a checkpoint's `config.json`, which notes what was read: what nobody read must mean nothing."""

import math
from collections.abc import Mapping
from typing import Any

from contract.domain.errors import ErrorCode, PenstockError, unimplemented
from worker_svc.core.models.neutral_fields import says_nothing
from worker_svc.core.models.spec import RopeSpec

_ROPE_TYPES = ("default", "linear", "llama3")
_SLIDING = "sliding_attention"
_FIRST_WINDOW_LAYER = 28  # where Qwen's configurations leave `max_window_layers` out


class ConfigFields:
    """The fields of one file; errors name file and field."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self._fields = fields
        self._source = source
        self._read: set[str] = set()

    def get(self, field: str) -> Any:
        """The value as it stands there; None if there is none."""
        self._read.add(field)
        return self._fields.get(field)

    def wrong(self, field: str, what: str) -> PenstockError:
        """The error that a field makes no sense."""
        return PenstockError(ErrorCode.INTERNAL, f"{self._source}: {field} {what}", param=field)

    def count(self, field: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            PenstockError: INTERNAL (the operator's fault): it is none, or missing without a default.
        """
        value = default if (value := self.get(field)) is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(field, f"must be a positive integer, got {value!r}")
        return value

    def positive(self, field: str, default: float | None = None) -> float:
        """A positive number.

        Raises:
            PenstockError: INTERNAL (the operator's fault): it is none, or missing without a default.
        """
        return self._positive(field, self.get(field), default)

    def flag(self, field: str) -> bool:
        """True or false; false if it is missing.

        Raises:
            PenstockError: INTERNAL (the operator's fault): it is neither.
        """
        value = self.get(field) or False
        if not isinstance(value, bool):
            raise self.wrong(field, f"must be true or false, got {value!r}")
        return value

    def must_be(self, field: str, only: str, what: str) -> None:
        """Refuse any other value; a missing field is `only`.

        Raises:
            PenstockError: UNIMPLEMENTED, naming `what` and the field.
        """
        value = self.get(field)
        if value not in (None, only):
            raise unimplemented(f"{what} ({field}) {value!r}")

    def window(self, layer: int, *, is_used: bool = True) -> int | None:
        """The tokens that a layer's queries see: `sliding_window` where it is used and `layer_types` does not say that
        the layer attends to all.
        """
        window, types = self.get("sliding_window"), self.get("layer_types")
        if types is not None:
            num_layers = self.count("num_hidden_layers")
            if not isinstance(types, list) or len(types) != num_layers:
                raise self.wrong("layer_types", f"must be a list of a type for each of {num_layers} layers")
            if types[layer] not in (_SLIDING, "full_attention"):
                raise unimplemented(f"layers of type (layer_types) {types[layer]!r}")
            is_used = types[layer] == _SLIDING
        if not is_used or (window is None and types is None):
            return None
        return self.count("sliding_window")

    def window_of_last_layers(self, layer: int) -> int | None:
        """As Qwen's: with `use_sliding_window`, of the layers from `max_window_layers` on."""
        is_used, first = self.flag("use_sliding_window"), self.get("max_window_layers")
        return self.window(layer, is_used=is_used and layer >= (_FIRST_WINDOW_LAYER if first is None else first))

    def rope(self) -> RopeSpec:
        """`rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (before), which wins over it.

        Raises:
            PenstockError: UNIMPLEMENTED, naming the kind; INTERNAL (the operator's fault), naming the field.
        """
        scaling, new = self.get("rope_scaling"), self.get("rope_parameters")
        field = "rope_scaling" if scaling else "rope_parameters"
        parameters = scaling or new or {}
        if not isinstance(parameters, Mapping):
            raise self.wrong(field, f"must be an object, got {parameters!r}")
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type not in _ROPE_TYPES:
            raise unimplemented(f"rope type {rope_type!r} (there are: {', '.join(_ROPE_TYPES)})")
        partial = parameters.get("partial_rotary_factor", self.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise unimplemented(f"partial rotary embedding (partial_rotary_factor {partial})")

        def number(name: str, default: float | None = None) -> float:
            return self._positive(name, parameters.get(name), default)

        theta = number("rope_theta", self.positive("rope_theta", 10000.0))
        if rope_type == "default":
            return RopeSpec(theta)
        factor = number("factor")
        if rope_type == "linear":
            return RopeSpec(theta, rope_type, factor)
        low, high, original = (
            number(name) for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        if high <= low:
            raise self.wrong("high_freq_factor", f"must exceed low_freq_factor ({low:g}), got {high:g}")
        return RopeSpec(theta, rope_type, factor, low, high, int(original))

    def refuse_unread(self) -> None:
        """Refuse the first field that nobody read and that may say something of the model.

        Raises:
            PenstockError: UNIMPLEMENTED, naming it.
        """
        for field in sorted(self._fields.keys() - self._read):
            if not says_nothing(field, self._fields[field]):
                raise unimplemented(
                    f"{field} ({self._source} has {self._fields[field]!r}, which this family does not read: if the "
                    "model computes the same without it, remove it there)"
                )

    def _positive(self, field: str, value: Any, default: float | None) -> float:
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self.wrong(field, f"must be a positive number, got {value!r}")
        return float(value)
