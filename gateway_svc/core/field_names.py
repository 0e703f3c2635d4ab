"""The names that callers have for fields, and errors that are told in them.

Within the gateway a call has one name for each thing, that of completions and chats. Who called by other names is told
of these: each API and call says them here, and they are kept with the reply's form, for an error may come at any time
and through any gateway.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from contract.domain.errors import PenstockError

_PLACE = re.compile(r"\[\d+\]")
_PLACES = r"(?:\.\w+|\[\d+\])*"  # that stand within a field


@dataclass(frozen=True, slots=True)
class FieldName:
    """The name that a caller has for a field."""

    inner: str  # that of requests: a path, with `[]` for a place in a list
    written: str  # the caller's, with as many of `[]`
    is_whole: bool = False  # what stands within is told as the whole, for the caller has other places there
    since: int = 0  # the first of a call's prompts to which it applies

    @property
    def pattern(self) -> str:
        """A regular expression of it in a text. What may be a plain word is a name where a text begins with it, or
        goes on with a place in it.
        """
        path = re.escape(self.inner).replace(r"\[\]", r"\[\d+\]")
        within = _PLACES if self.is_whole else ""
        if self.inner.isalpha():
            return rf"(?:^{path}\b|(?<![\w.]){path}(?=[\[.]\w)){within}"
        return rf"(?<![\w.]){path}(?!\w){within}"

    def told(self, found: str) -> str:
        """The caller's words for what the pattern has found."""
        places = iter(() if self.is_whole else _PLACE.findall(found))
        return re.sub(r"\[\]", lambda _: next(places, ""), self.written)


FieldNames: TypeAlias = tuple[FieldName, ...]


def in_callers_words(error: PenstockError, names: FieldNames, prompt: int = 0) -> PenstockError:
    """An error that names fields as the caller has written them; `prompt`: the index of the prompt that it is about."""
    of_prompt = {each.inner: each for each in sorted(names, key=lambda each: each.since) if each.since <= prompt}
    if not of_prompt:
        return error
    longest_first = sorted(of_prompt.values(), key=lambda each: -len(each.inner))
    message, param = _renamed(error.message, longest_first), error.param
    if param is not None:
        param = _renamed(param, longest_first)
    if (message, param) == (error.message, error.param):
        return error
    told = PenstockError(error.code, message, param=param, retry_after_s=error.retry_after_s)
    told.__cause__ = error
    return told


@contextmanager
def in_words_of(names: FieldNames) -> Iterator[None]:
    """Errors that are raised here name fields as the caller has written them."""
    try:
        yield
    except PenstockError as error:
        told = in_callers_words(error, names)
        if told is error:
            raise
        raise told from error


def beyond(names: FieldNames, outer: FieldNames) -> FieldNames:
    """The names of a call in the words of an API that has other names for those in which `names` tell it."""
    further = {each.inner: each.written for each in outer}
    told = tuple(replace(each, written=further.get(each.written, each.written)) for each in names)
    known = {each.inner for each in names}
    return told + tuple(each for each in outer if each.inner not in known)


def _renamed(text: str, names: list[FieldName]) -> str:
    pattern = "|".join(f"({each.pattern})" for each in names)
    return re.sub(pattern, lambda found: names[(found.lastindex or 1) - 1].told(found[0]), text)
