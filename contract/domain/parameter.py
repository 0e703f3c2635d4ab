"""The parts of a line of the table of parameters: `SamplingParams` is the table, its declarations are the lines.

Checks, parts, wire format, JSON bodies, defaults of models, columns of workers and docs/api.md follow from it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any, Protocol, get_args

from contract.domain.errors import invalid

U32_END = 2**32
I64_END = 2**63


class Part(Enum):
    """The reader of a parameter, and the message of a request in which it stands."""

    REQUEST = "request"  # several
    SAMPLING = "sampling"  # the worker
    STOPPING = "stopping"  # the scheduler
    TEXT = "text"  # the detokenizer


class Column(Enum):
    """A table of the worker, indexed by slot, in which a parameter has a column."""

    FLOATS = "floats"
    INTEGERS = "integers"


class Kind(Protocol):
    """Type and bounds of a parameter."""

    @property
    def json(self) -> Any:
        """The type that it has in a JSON body."""

    @property
    def bounds(self) -> str:
        """The values that it may have, in words; empty: what its type says."""

    def check(self, name: str, value: Any) -> None:
        """Look at a caller's value.

        Raises:
            PenstockError: INVALID_ARGUMENT naming the parameter, if it is none of these.
        """

    def read(self, value: Any) -> Any:
        """A checked value, or None, as those get it who read it."""


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number."""

    low: float
    high: float
    open_low: bool = False  # `low` itself is none
    json = float

    @property
    def bounds(self) -> str:
        """Implement `Kind.bounds`."""
        return f"above {self.low:g}, up to {self.high:g}" if self.open_low else f"{self.low:g} to {self.high:g}"

    def check(self, name: str, value: Any) -> None:
        """Implement `Kind.check`."""
        if isinstance(value, bool) or not isinstance(value, Real):
            raise invalid(f"{name} must be a number, got {value!r:.80}", name)
        value = float(value)
        outside = value <= self.low if self.open_low else value < self.low
        if not math.isfinite(value) or outside or value > self.high:
            bounds = f"{'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"
            raise invalid(f"{name} must be in {bounds}, got {value!r}", name)

    def read(self, value: Any) -> Any:
        """Implement `Kind.read`."""
        return value


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number."""

    low: int
    high: int
    floor: int | None = None  # what is less means this
    json = int

    @property
    def bounds(self) -> str:
        """Implement `Kind.bounds`."""
        return "" if self.high >= U32_END - 1 else f"{self.low} to {self.high}"

    def check(self, name: str, value: Any) -> None:
        """Implement `Kind.check`."""
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise invalid(f"{name} must be an integer in [{self.low}, {self.high}], got {value!r}", name)

    def read(self, value: Any) -> Any:
        """Implement `Kind.read`."""
        return value if value is None or self.floor is None else max(value, self.floor)


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    json = bool
    bounds = ""

    def check(self, name: str, value: Any) -> None:
        """Implement `Kind.check`."""
        if not isinstance(value, bool):
            raise invalid(f"{name} must be true or false, got {value!r:.80}", name)

    def read(self, value: Any) -> Any:
        """Implement `Kind.read`."""
        return value


_TOKEN_ID = Integer(0, U32_END - 1)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of ids of the model's tokens."""

    most: int
    too_many: str = "{name} may name at most {most} tokens"
    is_set: bool = False  # neither order nor number of an id counts
    may_be_empty: bool = True  # where not, None is something else: no list
    json = list[int]

    @property
    def bounds(self) -> str:
        """Implement `Kind.bounds`."""
        return f"up to {self.most} ids"

    def check(self, name: str, value: Any) -> None:
        """Implement `Kind.check`."""
        token_ids = _list(name, value)
        if not (self.may_be_empty or len(token_ids)):
            raise invalid(f"{name} must not be empty", name)
        if len(token_ids) > self.most:
            raise invalid(f"{self.too_many.format(name=name, most=self.most)}, got {len(token_ids)}", name)
        for token_id in token_ids:
            _TOKEN_ID.check(name, token_id)

    def read(self, value: Any) -> Any:
        """Implement `Kind.read`."""
        if value is None and not self.may_be_empty:
            return None
        return tuple(sorted(set(value or ())) if self.is_set else value or ())


@dataclass(frozen=True, slots=True)
class Biases:
    """A number for each of some tokens, by their ids."""

    most: int
    of_each: Number
    json = dict[str, float]  # OpenAI's form: ids as strings

    @property
    def bounds(self) -> str:
        """Implement `Kind.bounds`."""
        return f"{self.of_each.bounds}, for up to {self.most} ids"

    def check(self, name: str, value: Any) -> None:
        """Implement `Kind.check`."""
        biases: object = value or {}
        if not isinstance(biases, Mapping):
            raise invalid(f"{name} must map token ids to numbers, got {biases!r:.80}", name)
        if len(biases) > self.most:
            raise invalid(f"{name} may name at most {self.most} tokens, got {len(biases)}", name)
        for token_id, bias in biases.items():
            _TOKEN_ID.check(name, token_id)
            self.of_each.check(name, bias)

    def read(self, value: Any) -> Any:
        """Implement `Kind.read`."""
        return tuple(sorted((value or {}).items()))


@dataclass(frozen=True, slots=True)
class Strings:
    """A list of texts, none of them empty; where `may_be_one`, a text stands for a list of it alone."""

    most: int
    most_chars: int
    noun: str
    may_be_one: bool = False

    @property
    def json(self) -> Any:
        """Implement `Kind.json`."""
        return str | list[str] if self.may_be_one else list[str]

    @property
    def bounds(self) -> str:
        """Implement `Kind.bounds`."""
        return f"{'one or ' if self.may_be_one else ''}up to {self.most} of up to {self.most_chars} characters"

    def check(self, name: str, value: Any) -> None:
        """Implement `Kind.check`."""
        texts = (value,) if self.may_be_one and isinstance(value, str) else _list(name, value)
        if len(texts) > self.most:
            raise invalid(f"at most {self.most} {self.noun}s, got {len(texts)}", name)
        for text in texts:
            if not isinstance(text, str) or not text or len(text) > self.most_chars:
                raise invalid(f"a {self.noun} must have 1 to {self.most_chars} characters, got {text!r:.80}", name)

    def read(self, value: Any) -> Any:
        """Implement `Kind.read`."""
        return (value,) if isinstance(value, str) else tuple(value or ())


@dataclass(frozen=True, slots=True)
class Word:
    """One of some words."""

    words: tuple[str, ...]
    json = str

    @property
    def bounds(self) -> str:
        """Implement `Kind.bounds`."""
        return " or ".join(f"`{word}`" for word in self.words)

    def check(self, name: str, value: Any) -> None:
        """Implement `Kind.check`."""
        if value not in self.words:
            raise invalid(f"{name} must be {' or '.join(self.words)}, got {value!r:.80}", name)

    def read(self, value: Any) -> Any:
        """Implement `Kind.read`."""
        return value


@dataclass(frozen=True, slots=True)
class FlagOrWord:
    """True, false or a word."""

    word: str
    json = bool | str
    bounds = ""

    def check(self, name: str, value: Any) -> None:
        """Implement `Kind.check`."""
        if not isinstance(value, bool) and value != self.word:
            raise invalid(f"{name} must be true, false or {self.word!r}, got {value!r:.80}", name)

    def read(self, value: Any) -> Any:
        """Implement `Kind.read`."""
        return value


@dataclass(frozen=True, slots=True)
class Filled:
    """A model's generation_config.json may say what holds where a request says nothing."""

    key: str = ""  # of that file; empty: the parameter's name


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter has another name in its part, and in that part's message."""

    name: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A line of the table."""

    name: str
    default: Any
    may_be_none: bool
    kind: Kind
    part: Part
    meaning: str
    field: str  # the name in its part and that part's message
    filled: str | None  # the key of generation_config.json that says another default
    column: Column | None

    @classmethod
    def declared(cls, name: str, declaration: Any, default: Any) -> "Parameter":
        """Of an attribute `name: Annotated[type, kind, part, …, meaning] = default`, whose column, `Filled` and `Field`
        may be left out.
        """
        kind, part, *others, meaning = declaration.__metadata__
        said = {type(each): each for each in others}
        filled, field = said.get(Filled), said.get(Field)
        return cls(
            name,
            default,
            may_be_none=type(None) in get_args(declaration.__origin__),
            kind=kind,
            part=part,
            meaning=meaning,
            field=field.name if field else name,
            filled=(filled.key or name) if filled else None,
            column=said.get(Column),
        )

    def check(self, value: Any) -> None:
        """Look at a caller's value.

        Raises:
            PenstockError: INVALID_ARGUMENT naming the parameter.
        """
        if value is not None or not self.may_be_none:
            self.kind.check(self.name, value)


def _list(name: str, value: object) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise invalid(f"{name} must be a list, got {value!r:.80}", name)
    return value
