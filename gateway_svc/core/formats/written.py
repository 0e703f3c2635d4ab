"""Calls as a model is made to write them where they must come, or where arguments must be right."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Written:
    """The texts around names and arguments."""

    begin: str  # before a name
    middle: str  # between a name and its arguments, a JSON object
    end: str  # after the arguments
    between: str = ""  # two calls
    first: str = ""  # before all calls
    last: str = ""  # after them
    needs: str = ""  # a mark without which the model does not write so; empty: none
