"""The words in which a format is written down: where calls begin and end, and how one is spelled."""

from dataclasses import dataclass
from typing import TypeAlias

from gateway_svc.core.formats.channels import Channels
from gateway_svc.core.formats.written import Written


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """`{"name": "f", "arguments": {…}}`, with members in any order and no others before the arguments."""

    arguments: tuple[str, ...] = ("arguments", "parameters")  # names that this member goes by


@dataclass(frozen=True, slots=True)
class NamedCall:
    """`f[ARGS]{…}`: the name, something between, and a JSON value."""

    between: str  # white space at its end may be missing
    before: str = ""  # the name
    ignored: str = ""  # begins what may stand after the name up to `between`: an id that the model gives the call


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """The name, then keys and values each between marks of their own; values are texts or JSON."""

    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")


@dataclass(frozen=True, slots=True)
class PythonCall:
    """`f(a=1, b="x")`: a call in Python whose arguments are literals with names."""


CallSyntax: TypeAlias = ObjectCall | NamedCall | KeyedCall | PythonCall


@dataclass(frozen=True, slots=True)
class Body:
    """Calls as they stand after the mark that opens them; white space between the parts counts for nothing."""

    call: CallSyntax
    prefix: str = ""  # before the first
    closes: str = ""  # each call
    separator: str = ""  # between two; empty: there is only one
    end: str = ""  # after the last


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format in which a family of models calls functions."""

    name: str
    opens: tuple[str, ...]  # marks after which calls stand
    bodies: tuple[Body, ...]  # the ways in which they may be spelled there, tried in this order
    written: tuple[Written, ...]  # the ways in which a model may be made to write them
    is_bare: bool = False  # calls may also begin an output, without a mark
    silent: tuple[str, ...] = ()  # marks around calls that say nothing more
    channels: Channels | None = None  # in which calls are messages; None: they stand in the text

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that may be tokens of their own."""
        if self.channels is not None:
            return self.channels.marks
        calls = [body.call for body in self.bodies]
        inner = [mark for call in calls if isinstance(call, NamedCall) for mark in (call.between, call.ignored)]
        inner += [mark for call in calls if isinstance(call, KeyedCall) for mark in (*call.key, *call.value)]
        return (*self.opens, *self.silent, *(body.end for body in self.bodies), *inner)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The format in which a family of models thinks before it answers."""

    name: str
    opens: str
    closes: str
    channels: Channels | None = None  # in which thoughts are messages; None: there is one, at the beginning

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that may be tokens of their own."""
        return (self.opens, self.closes) if self.channels is None else self.channels.marks


def channels_of(*formats: ToolFormat | ReasoningFormat | None) -> Channels | None:
    """The marks of the messages that an output in these formats is made of; None: it is one text."""
    return next((each.channels for each in formats if each is not None and each.channels is not None), None)
