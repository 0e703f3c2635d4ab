"""Answers that a pretended model gives: what it says to whom is written in a script, the rest is drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a script."""

    match: str  # text that a prompt must have in it; empty: any will do
    token_ids: tuple[int, ...]  # of the answer, its end included


class Script:
    """Lines of which the first that fits counts: an answer is a function of the prompt, wherever it goes on."""

    def __init__(self, lines: Sequence[Line], text_of: Callable[[Sequence[int]], str]) -> None:
        """`text_of` gives the text of a prompt's tokens, special ones included."""
        self._lines = tuple(lines)
        self._text_of = text_of

    def answer(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the answer to a prompt; none: the script has no line for it."""
        text = self._text_of(prompt_ids)
        return next((line.token_ids for line in self._lines if line.match in text), ())


def scripted(answer: Sequence[int], position: int, drawn: int) -> int:
    """The output token at a position: the answer's, its last one for ever after; without an answer what was drawn."""
    return answer[min(position, len(answer) - 1)] if answer else drawn
