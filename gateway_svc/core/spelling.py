"""Chats that are spelled in another API's words: the fields that mean the same."""

from collections.abc import Mapping
from typing import Any

import msgspec

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
