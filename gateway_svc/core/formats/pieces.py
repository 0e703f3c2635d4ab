"""Pieces of an output: what its raw text means, in the order in which it was told."""

from dataclasses import dataclass, replace
from enum import Enum


class Kind(Enum):
    """The kinds of a piece."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  # a call begins; the text is the function's name
    ARGUMENTS = "arguments"  # of the call that began last


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an output that is told at once."""

    kind: Kind
    text: str
    start: int  # characters of the raw text before the part that it was made of
    end: int  # and up to its end
    is_plain: bool = True  # its text stands so in the raw text; else it is told as a whole

    def after(self, place: int) -> "Piece | None":
        """The part of it that was made of raw text after a place up to which all was told; None: nothing."""
        if self.end <= place:
            return None
        if not self.is_plain or self.start >= place:
            return self
        return replace(self, text=self.text[place - self.start :], start=place)
