"""A client as naive as those that are around: it takes `data: ` off an event and knows no other line."""

import json
from collections.abc import Iterable
from typing import Any


def naive_events(parts: Iterable[bytes]) -> list[dict[str, Any]]:
    """The chunks of an event stream, however its bytes are cut; messages that are comments are passed over.

    What serving benchmarks do: the bytes are split at empty lines, and each message is one line of JSON after `data: `.
    """
    buffer, found, is_done = b"", [], False
    for part in parts:
        buffer += part
        *messages, buffer = buffer.split(b"\n\n")
        for message in messages:
            if message.startswith(b":"):
                continue
            assert not is_done
            data = message.decode().removeprefix("data: ")
            is_done = data == "[DONE]"
            if not is_done:
                found.append(json.loads(data))
    assert is_done
    assert not buffer
    return found
