"""Chats that are spelled in another API's words: the fields that mean the same, and errors in the caller's words."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from contract.domain.errors import PenstockError
from gateway_svc.core.openai import CHAT_BODY, ChatBody


def as_chat(raw: msgspec.Struct, **fields: Any) -> ChatBody:
    """The chat of a body: these fields of chats, and those that it has by the same names."""
    same = {name: getattr(raw, name) for name in raw.__struct_fields__ if name in CHAT_BODY.__struct_fields__}
    return CHAT_BODY(**(same | fields))


def response_format(form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A form of the output as chats have it: what other APIs have beside the type of a schema stands inside."""
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {key: each for key, each in form.items() if key != "type"}}


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that name a field of chats name that of the caller's API, `names` by chats' field."""
    try:
        yield
    except PenstockError as error:
        first = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
        if first not in names:
            raise
        message = re.sub(rf"(?<![\w.]){re.escape(first)}\b", names[first], error.message)
        raise PenstockError(error.code, message, param=_renamed(error.param or "", first, names[first])) from error


def _renamed(param: str, first: str, name: str) -> str:
    """Places in messages are others in the caller's API, so that of one is told by its field alone."""
    return name if first == "messages" else name + param[len(first) :].replace(".function", "")
