"""The parts of an output that a structural tag describes, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from contract.domain.errors import PenstockError, invalid

_MOST_MESSAGE: Final = 400  # characters of an error


@dataclass(frozen=True, slots=True)
class Text:
    """This text."""

    text: str
    has_blank: bool = False  # white space may stand before it


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON value by its schema, with what white space it may have."""

    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that an expression describes, in Lark's syntax."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text that a grammar describes, in Lark's syntax."""

    rules: str


@dataclass(frozen=True, slots=True)
class Free:
    """Any text up to what follows."""

    where: str  # in the structural tag
    excluded: tuple[str, ...] = ()  # texts that it does not have


@dataclass(frozen=True, slots=True)
class Either:
    """One of several."""

    where: str
    options: tuple["Parts", ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """The same again."""

    where: str
    parts: "Parts"
    times: str  # `?`, `*` or `+`


@dataclass(frozen=True, slots=True)
class Tag:
    """A text that a trigger begins, and what stands after it."""

    trigger: str
    parts: "Parts"  # all of it, the trigger included


@dataclass(frozen=True, slots=True)
class Triggered:
    """Any text up to what follows, in which tags stand: after a trigger, one of those that begin with it."""

    where: str
    tags: tuple[Tag, ...]
    at_least_one: bool  # the first one stands at the beginning
    stop_after_first: bool
    excluded: tuple[str, ...] = ()  # texts that the text between tags does not have


Part: TypeAlias = Text | Json | Regex | Grammar | Free | Either | Repeated | Triggered
Parts: TypeAlias = Sequence[Part]


def ends_free(parts: Parts) -> bool:
    """Return whether something else must say where they end."""
    match parts[-1] if parts else None:
        case Free() | Triggered():
            return True
        case Either(options=options):
            return any(map(ends_free, options))
        case _:
            return False


def wrong_tag(where: str, error: object) -> PenstockError:
    """The error of a structural tag with something that cannot be followed at this place."""
    said = " ".join(str(error).split())[:_MOST_MESSAGE]
    return invalid(f"structured_outputs.structural_tag: {where}: {said}", "structured_outputs")
