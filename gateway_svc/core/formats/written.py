"""Calls as a model is made to write them where they must come, or where arguments must be right."""

from dataclasses import dataclass
from enum import Enum


class Arguments(Enum):
    """The ways in which the arguments of a call are written."""

    JSON = "json"  # an object
    KEYED = "keyed"  # keys and values each between marks of their own, as `KeyedCall` has them
    PYTHON = "python"  # keywords of a call in Python


@dataclass(frozen=True, slots=True)
class Written:
    """The texts around names and arguments."""

    begin: str  # before a name
    middle: str  # between a name and its arguments
    end: str  # after the arguments
    between: str = ""  # two calls
    first: str = ""  # before all calls
    last: str = ""  # after them
    needs: str = ""  # a mark without which the model does not write so; empty: none
    arguments: Arguments = Arguments.JSON
