"""Beginnings of calls: the name, and where the arguments begin, found in a text that may still be growing."""

import json
import re
from dataclasses import dataclass
from typing import Final

from gateway_svc.core.formats.json_values import BEGINS, value_end
from gateway_svc.core.formats.python_calls import closing, keywords
from gateway_svc.core.formats.table import Body, CallSyntax, KeyedCall, NamedCall, ObjectCall, PythonCall

MAX_HEAD_CHARS = 16 * 1024  # in which a call must show that it is one
NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Head:
    """A call that has begun."""

    name: str
    end: int  # characters of the text that it takes; the arguments follow
    arguments: str | None = None  # all of them, as JSON, if they are among these characters


class Missing:
    """More text is needed to tell."""


MORE: Final = Missing()
Found = Head | Missing | None  # None: it is no call


class _TooShortError(Exception):
    """The text ends before it shows a call."""


class _NoCallError(Exception):
    """The text shows that it is none."""


def find_head(body: Body, text: str, at: int, *, is_first: bool) -> Found:
    """The beginning of a call that is to stand in `text` at `at`; before the first one its body may want more."""
    try:
        if is_first and body.prefix:
            at = _pass(text, skip_space(text, at), body.prefix)
        return _head(body.call, body.end, text, _next(text, at))
    except _TooShortError:
        return MORE
    except _NoCallError:
        return None


def skip_space(text: str, at: int) -> int:
    """The place of the next character that is no white space."""
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _next(text: str, at: int) -> int:
    """The place of the next character that is no white space; there must be one."""
    at = skip_space(text, at)
    if at >= len(text):
        raise _TooShortError
    return at


def _pass(text: str, at: int, *marks: str) -> int:
    """The place after the mark that stands here."""
    for mark in marks:
        if text.startswith(mark, at):
            return at + len(mark)
    raise _TooShortError if any(mark.startswith(text[at:]) for mark in marks) else _NoCallError


def _name(text: str, at: int) -> re.Match[str]:
    found = NAME.match(text, at)
    if found is None:
        raise _NoCallError if at < len(text) else _TooShortError
    if found.end() == len(text):
        raise _TooShortError
    return found


def _value(text: str, at: int) -> int:
    """The end of an object, a list or a string; other values say nothing in a call."""
    if text[at] not in BEGINS:
        raise _NoCallError
    end = value_end(text, at)
    if end is None:
        raise _TooShortError
    return end


def _head(call: CallSyntax, end: str, text: str, at: int) -> Head:
    match call:
        case ObjectCall():
            return _object_head(call, text, at)
        case NamedCall():
            return _named_head(call, text, at)
        case KeyedCall():
            name = _name(text, at)
            at = _next(text, name.end())
            _pass(text, at, call.key[0], end)
            return Head(name[0], at)
        case PythonCall():
            return _python_head(text, at)


def _object_head(call: ObjectCall, text: str, at: int) -> Head:
    name, arguments = "", None
    at = _next(text, _pass(text, at, "{"))
    while True:
        key, at = _key(text, at)
        if key in call.arguments and name and arguments is None and text[at] in BEGINS:
            return Head(name, at)
        end = _value(text, at)
        if key == "name":
            name = _text_of(text[at:end])
        elif key in call.arguments:
            arguments = text[at:end]
        elif key != "type":
            raise _NoCallError
        at = _next(text, end)
        if text[at] == "}" and name and arguments is not None:
            return Head(name, at + 1, arguments)
        at = _next(text, _pass(text, at, ","))


def _key(text: str, at: int) -> tuple[str, int]:
    """The key of a member, and where its value begins."""
    _pass(text, at, '"')
    end = _value(text, at)
    return _text_of(text[at:end]), _next(text, _pass(text, _next(text, end), ":"))


def _text_of(string: str) -> str:
    """The text of a JSON string, which must have one."""
    try:
        found = json.loads(string) if _STRING.fullmatch(string) else ""
    except ValueError:
        found = ""
    if not isinstance(found, str) or not found:
        raise _NoCallError
    return found


def _named_head(call: NamedCall, text: str, at: int) -> Head:
    name = _name(text, _pass(text, at, call.before))
    at, between = name.end(), call.between.rstrip(_SPACE)
    marks = [mark for mark in (call.ignored, between) if mark]
    if marks and _pass(text, at, *marks) and call.ignored and text.startswith(call.ignored, at):
        at = text.find(between, at)
        if at < 0:
            raise _TooShortError
    at = _next(text, at + len(between))
    if text[at] not in BEGINS:
        raise _NoCallError
    return Head(name[0], at)


def _python_head(text: str, at: int) -> Head:
    name = _name(text, at)
    _pass(text, name.end(), "(")
    end = closing(text, name.end())
    if end is None:
        raise _TooShortError
    arguments = keywords(text[name.end() : end])
    if arguments is None:
        raise _NoCallError
    return Head(name[0], end, arguments)
