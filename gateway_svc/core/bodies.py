"""JSON bodies, read in steps: their fields, their values, and of a chat its messages."""

import re
from typing import Any, TypeVar

import msgspec

from contract.domain.errors import invalid

_AT = re.compile(r"at `\$\.([^`]+)`")  # how msgspec says where a value is wrong
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_message = msgspec.json.Decoder(dict[str, Any])

B = TypeVar("B")


def body_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a body, and those of its stream options.

    Raises:
        PenstockError: INVALID_ARGUMENT: it is no JSON object.
    """
    try:
        fields = _fields.decode(body)
        options = bytes(fields.get("stream_options", b""))
        nested = _fields.decode(options) if options.startswith(b"{") else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body must be a JSON object: {error}") from error
    return fields | {f"stream_options.{name}": raw for name, raw in nested.items()}


def decode_body(decoder: "msgspec.json.Decoder[B]", body: bytes) -> B:
    """The values of a body.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that has another type than it must.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT.search(text)
        raise invalid(text, found[1] if found else None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error


def decode_messages(raw: list[msgspec.Raw], name: str = "messages") -> list[dict[str, Any]]:
    """A chat's messages, in the field of this name, each read by itself: all in one would let no thread run meanwhile.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the one that is no object.
    """
    found = []
    for index, each in enumerate(raw):
        try:
            found.append(_message.decode(each))
        except msgspec.ValidationError as error:
            where = f"{name}[{index}]"
            raise invalid(f"{where}: {error}", where) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise invalid(f"the body is not JSON: {error}") from error
        except RecursionError as error:
            raise invalid("the body is nested too deeply") from error
    return found


def check_priority(given: int | None) -> int:
    """The priority of a body; None: it says none.

    Raises:
        PenstockError: INVALID_ARGUMENT: it has more than 32 bits.
    """
    priority = given or 0
    if not -(2**31) <= priority < 2**31:
        raise invalid(f"priority must be a 32-bit integer, got {priority}", "priority")
    return priority
