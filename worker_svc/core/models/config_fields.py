"""Typed access to a checkpoint's `config.json`, which notes what was read: what nobody read must mean nothing."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from contract.domain.errors import ErrorCode, PenstockError, unimplemented
from worker_svc.core.models.neutral_fields import says_nothing
from worker_svc.core.models.rope_fields import read_rope, read_score_factor, read_temperature
from worker_svc.core.models.spec import RopeSpec, TemperatureSpec

SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"
LINEAR = "linear_attention"  # a state instead of keys and values
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

    def number_or_none(self, field: str, default: float | None) -> float | None:
        """A positive number, or none where it says null.

        Raises:
            PenstockError: INTERNAL (the operator's fault): it is none.
        """
        if field in self._fields and self.get(field) is None:
            return None
        return default if field not in self._fields else self.positive(field)

    def count_or_none(self, field: str, default: int) -> int | None:
        """A positive integer, or none where it says null.

        Raises:
            PenstockError: INTERNAL (the operator's fault): it is none.
        """
        is_null = field in self._fields and self.get(field) is None
        return None if is_null else self.count(field, default)

    def flag(self, field: str, *, default: bool = False) -> bool:
        """True or false; `default` if it is missing.

        Raises:
            PenstockError: INTERNAL (the operator's fault): it is neither.
        """
        value = default if (value := self.get(field)) is None else value
        if not isinstance(value, bool):
            raise self.wrong(field, f"must be true or false, got {value!r}")
        return value

    def must_be(self, field: str, what: str, *only: str | int) -> None:
        """Refuse any other value; a missing field is as good as these.

        Raises:
            PenstockError: UNIMPLEMENTED, naming `what` and the field.
        """
        value = self.get(field)
        if value not in (None, *only):
            raise unimplemented(f"{what} ({field}) {value!r}")

    def layer_type(
        self, layer: int, default: Callable[[int], bool] | None = None, *, local: str = SLIDING
    ) -> str | None:
        """The type of a layer's attention, `local` or `full_attention`; None: `layer_types` does not say.

        default: whether a layer's is local, where the configuration does not list it.
        """
        types = self.get("layer_types")
        if types is None:
            return None if default is None else local if default(layer) else FULL
        num_layers = self.count("num_hidden_layers")
        if not isinstance(types, list) or len(types) != num_layers:
            raise self.wrong("layer_types", f"must be a list of a type for each of {num_layers} layers")
        if types[layer] not in (local, FULL):
            raise unimplemented(f"layers of type (layer_types) {types[layer]!r}")
        return str(types[layer])

    def window(self, layer: int, *, is_used: bool = True) -> int | None:
        """The tokens that a layer's queries see: `sliding_window` where it is used and `layer_types` does not say that
        the layer attends to all.
        """
        window, layer_type = self.get("sliding_window"), self.layer_type(layer)
        if layer_type is not None:
            is_used = layer_type == SLIDING
        if not is_used or (window is None and layer_type is None):
            return None
        return self.count("sliding_window")

    def window_of_last_layers(self, layer: int) -> int | None:
        """As Qwen's: with `use_sliding_window`, of the layers from `max_window_layers` on."""
        is_used, first = self.flag("use_sliding_window"), self.get("max_window_layers")
        return self.window(layer, is_used=is_used and layer >= (_FIRST_WINDOW_LAYER if first is None else first))

    @property
    def head_dim(self) -> int:
        """Dimensions of a head.

        Raises:
            PenstockError: INTERNAL (the operator's fault): it is odd, or not said.
        """
        head_dim = self.count("head_dim", self.count("hidden_size") // self.count("num_attention_heads"))
        if head_dim % 2:
            raise self.wrong("head_dim", "is odd, rotary embedding needs pairs")
        return head_dim

    def rope(self, layer_type: str | None = None, *, head_dim: int | None = None, **defaults: Any) -> RopeSpec:
        """The rotation of a layer; see `read_rope`. `head_dim`: where the family knows it otherwise."""
        return read_rope(self, head_dim or self.head_dim, layer_type, **defaults)

    def score_factor(self, rope: RopeSpec) -> float:
        """The factor of scores that goes with a rotation; see `read_score_factor`."""
        return read_score_factor(self, rope)

    def temperature(self) -> TemperatureSpec | None:
        """How queries grow with their position; see `read_temperature`."""
        return read_temperature(self)

    def rope_of_type(self, layer_type: str, *, local_theta: float, theta: float) -> RopeSpec:
        """The rotation of a layer where each type has its own: as transformers 5 writes it, or, before that, one base
        for layers with a window, which are never stretched, and what the configuration says for the others.
        """
        told = self.get("rope_parameters")
        if layer_type == SLIDING and not (isinstance(told, Mapping) and SLIDING in told):
            return RopeSpec(local_theta)
        return self.rope(layer_type, theta=theta)

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
