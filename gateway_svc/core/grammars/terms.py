"""Parts of grammars in Lark's syntax: texts as a model writes them, stretches of text up to marks, JSON."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from contract.domain.chat_facts import Mark
from contract.domain.structured_outputs import JSON_WHITE_SPACE

ANY: Final = r"/(.|\n)*/"
_WHITE_SPACE = {"whitespace_flexible": True, "whitespace_pattern": JSON_WHITE_SPACE}


class Speller:
    """Writes texts as a model writes them: what is a token of its own as that token."""

    def __init__(self, marks: Mapping[str, Mark]) -> None:
        self._marks = marks
        longest_first = sorted(marks, key=len, reverse=True)
        self._parts = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if marks else r"((?!))")

    def spell(self, text: str) -> str:
        """The terms of a text; empty for none."""
        return " ".join(self._term(part) for part in self._parts.split(text) if part)

    def is_token(self, text: str) -> bool:
        """Return whether a text is one token."""
        return text in self._marks

    def up_to(self, name: str, mark: str, *others: str) -> tuple[str, str]:
        """The terms of a text up to the first time that a mark comes, with it, and the rule that they need.

        Args:
            name: of the rule, in lower case.
            mark: a text that is not empty.
            others: further marks that the text does not have, where marks are tokens.
        """
        if self.is_token(mark):
            return f"{name.upper()} {self.spell(mark)}", f"{name.upper()}: {without(mark, *others)}"
        return name, f"{name}[lazy]: /(.|\\n)*{_escaped(mark)}/"

    def _term(self, part: str) -> str:
        mark = self._marks.get(part)
        return literal(part) if mark is None else f"<[{mark.token_id}]>"


def literal(text: str) -> str:
    """The term of a text, letter by letter."""
    return json.dumps(text)


def without(*marks: str) -> str:
    """The terms, of a terminal, of any text in which none of the marks stands."""
    return " & ".join((ANY, *(f"~/(.|\\n)*{_escaped(each)}(.|\\n)*/" for each in marks)))


def one_of(texts: Iterable[str]) -> str:
    """The expression, of a terminal, of one of some texts."""
    return f"/({'|'.join(map(_escaped, texts))})/"


def json_value(schema: Mapping[str, Any]) -> str:
    """The term of a JSON value by its schema."""
    return f"%json {json.dumps({'x-guidance': _WHITE_SPACE} | dict(schema))}"


def options(name: str, count: int) -> str:
    """One of several numbered rules."""
    return " | ".join(f"{name}_{index}" for index in range(count))


def terms(*several: str) -> str:
    """Terms one after the other; empty ones are left out."""
    return " ".join(filter(None, several))


def _escaped(text: str) -> str:
    """A text in an expression between slashes, on one line."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n").replace("\\\r", r"\r")
