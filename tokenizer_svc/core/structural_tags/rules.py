"""Parts of an output as a grammar in Lark's syntax, as llguidance follows it.

A lexeme that is free must say itself where it ends: so it takes what follows it along, which is a text, and ends with
the first of these.
"""

import json
from collections.abc import Iterable

from tokenizer_svc.core.structural_tags.parts import (
    Either,
    Free,
    Grammar,
    Json,
    Part,
    Parts,
    Regex,
    Repeated,
    Tag,
    Text,
    Triggered,
    ends_free,
    wrong_tag,
)

_ANY = r"/(.|\n)*/"
_BLANK = r"/[ \t\r\n]{0,32}/"
_NOTHING = '""'


def rules_of(parts: Parts) -> str:
    """The rules of an output of these parts.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the place where it cannot be said where free text ends.
    """
    rules = _Rules()
    start = rules.terms(parts)
    return "\n".join((f"start: {start}", *rules.lines))


class _Rules:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[str, str] = {}  # by what they say

    def terms(self, parts: Parts) -> str:
        """The terms of parts one after the other."""
        left, found = list(parts), list[str]()
        while left:
            part, following = left.pop(0), left[0] if left else None
            match part:
                case Text(text=text, has_blank=has_blank):
                    found.append(self._blanked(text) if has_blank else _literal(text))
                case Json(schema=schema):
                    found.append(f"%json {json.dumps(schema)}")
                case Grammar(rules=rules):
                    found.append(f"%lark {{\n{rules}\n}}")
                case Regex(pattern=pattern):
                    found.append(self._expression(pattern, _take_text(left)))
                case Repeated(where=where, parts=repeated, times=times):
                    if ends_free(repeated):
                        raise wrong_tag(where, "free text at the end of what may come again needs a text after it")
                    found.append(f"({self.terms(repeated)}){times}")
                case Free() | Triggered() | Either():
                    found.append(self._up_to_text(part, following, left))
        return " ".join(filter(None, found)) or _NOTHING

    def _up_to_text(self, part: Free | Triggered | Either, following: Part | None, left: list[Part]) -> str:
        """The terms of a part that may have no end of its own, with what it takes of those that are `left`."""
        if isinstance(part, Free) and isinstance(following, Either):
            left[0] = Either(following.where, tuple([part, *option] for option in following.options))
            return ""
        if (
            isinstance(part, Free)
            and isinstance(following, Triggered)
            and not (part.excluded or following.at_least_one)
        ):
            return ""  # the tags stand in free text themselves
        if not ends_free([part]):
            assert isinstance(part, Either)
            return self._one_of(self.terms(option) for option in part.options)
        mark = _take_text(left)
        if mark is None and following is not None:
            raise wrong_tag(part.where, "free text must be followed by a text, or by formats that begin with one")
        match part:
            case Free(excluded=excluded):
                return self._free(mark, excluded)
            case Triggered():
                return self._triggered(part, mark)
            case Either():
                end = [] if mark is None else [Text(mark)]
                return self._one_of(self.terms([*option, *end]) for option in part.options)

    def _triggered(self, part: Triggered, mark: str | None) -> str:
        """Tags in a text that ends with a mark; without one it ends with the output."""
        triggers = {tag.trigger for tag in part.tags}
        if mark is not None and any(each in mark or mark in each for each in triggers):
            raise wrong_tag(part.where, f"the text after it, {mark!r:.40}, and a trigger stand in each other")
        end = "" if mark is None else _literal(mark)
        tags = self._one_of(self._after_trigger(tag, part.excluded) for tag in part.tags)
        tail = self._free(mark, part.excluded)
        first = self._one_of(self.terms(tag.parts) for tag in part.tags)
        match part.at_least_one, part.stop_after_first:
            case True, True:
                return f"{first} {end}".rstrip()
            case True, False:
                return f"{first} {tags}* {tail}"
            case False, True:
                return f"({tags} {end} | {tail})"
            case _:
                return f"{tags}* {tail}"

    def _after_trigger(self, tag: Tag, excluded: tuple[str, ...]) -> str:
        """Free text up to a trigger, and the rest of a tag that begins with it."""
        first, *others = tag.parts
        assert isinstance(first, Text)
        rest = first.text.removeprefix(tag.trigger)
        return f"{self._free(tag.trigger, excluded)} {self.terms([*([Text(rest)] if rest else []), *others])}"

    def _free(self, mark: str | None, excluded: tuple[str, ...]) -> str:
        """Free text up to a mark, with it, or to the end of the output."""
        said = " & ".join((_ANY, *(f"~({_ANY} {_literal(each)} {_ANY})" for each in excluded)))
        return self._terminal(said) if mark is None else self._lazy(f"({said}) {_literal(mark)}")

    def _expression(self, pattern: str, mark: str | None) -> str:
        """Text of an expression; what follows ends it the first time that it can."""
        return f"/{pattern}/" if mark is None else self._lazy(f"/{pattern}/ {_literal(mark)}")

    def _blanked(self, text: str) -> str:
        """White space that may be missing and a text, as one lexeme: else the white space could not be told from that
        of what may stand here instead."""
        return self._terminal(f"{_BLANK} {_literal(text)}" if text else _BLANK)

    def _lazy(self, said: str) -> str:
        """A rule for a lexeme that ends the first time that it can."""
        terminal = self._terminal(said)
        return self._named(f"[lazy]: {terminal}", f"up_to_{len(self._names)}")

    def _terminal(self, said: str) -> str:
        return self._named(f": {said}", f"TEXT_{len(self._names)}")

    def _named(self, said: str, name: str) -> str:
        if said not in self._names:
            self._names[said] = name
            self.lines.append(f"{name}{said}")
        return self._names[said]

    @staticmethod
    def _one_of(options: Iterable[str]) -> str:
        return f"({' | '.join(options)})"


def _take_text(left: list[Part]) -> str | None:
    """The text that comes next, which is taken away; None: something else does."""
    if left and isinstance(left[0], Text) and not left[0].has_blank:
        text = left.pop(0)
        assert isinstance(text, Text)
        return text.text
    return None


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
