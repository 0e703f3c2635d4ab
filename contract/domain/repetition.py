"""Outputs that repeat themselves, under vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from contract.domain.errors import invalid

MAX_PATTERN_SIZE = 1024
MAX_COUNT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetectionParams:
    """The repetition that ends an output: a pattern of tokens at its end, so many times in a row.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that is out of bounds.
    """

    max_pattern_size: int = 0  # tokens; 0: no pattern ends it
    min_pattern_size: int = 0  # tokens; 0: as 1
    min_count: int = 0  # times that the pattern stands there; at least 2 where there may be one

    def __post_init__(self) -> None:
        for each in fields(self):
            most = MAX_COUNT if each.name == "min_count" else MAX_PATTERN_SIZE
            value = getattr(self, each.name)
            if type(value) is not int or not 0 <= value <= most:
                raise _wrong(f"{each.name} must be an integer in [0, {most}], got {value!r:.40}", each.name)
        if self.min_pattern_size > self.max_pattern_size:
            raise _wrong("min_pattern_size exceeds max_pattern_size", "min_pattern_size")
        if self.max_pattern_size and self.min_count < 2:
            raise _wrong(f"min_count must be at least 2, got {self.min_count}", "min_count")


@dataclass(frozen=True, slots=True)
class Repetition:
    """The kind of the parameter `repetition_detection`."""

    json = dict[str, Any]
    bounds = f"patterns of up to {MAX_PATTERN_SIZE} tokens, 2 to {MAX_COUNT} times"

    def check(self, name: str, value: Any) -> None:
        """Implement `Kind.check`."""
        if value is not None and not isinstance(value, RepetitionDetectionParams):
            raise invalid(f"{name} must be RepetitionDetectionParams, got {value!r:.80}", name)

    def read(self, value: RepetitionDetectionParams | None) -> RepetitionDetectionParams | None:
        """Implement `Kind.read`."""
        return value if value is not None and value.max_pattern_size else None


def read_repetition(value: Mapping[str, Any]) -> RepetitionDetectionParams:
    """The repetition that a JSON object says. A field that is null says nothing.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field.
    """
    known = [each.name for each in fields(RepetitionDetectionParams)]
    if unknown := [name for name in value if name not in known]:
        raise _wrong(f"it has no field {unknown[0]!r:.66}: it knows {', '.join(known)}")
    return RepetitionDetectionParams(**{name: each for name, each in value.items() if each is not None})


def _wrong(message: str, name: str = "") -> Exception:
    where = "repetition_detection"
    return invalid(f"{where}: {message}", f"{where}.{name}" if name else where)
