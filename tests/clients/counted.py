"""The server's own count of a request, for the calls of benchmarks."""

import json
from typing import Any
from urllib.request import Request, urlopen


def usage(url: str, body: dict[str, Any]) -> dict[str, int]:
    """The usage of the same chat without a stream, asked at a gateway's `url`."""
    whole = {key: value for key, value in body.items() if key != "stream_options"} | {"stream": False}
    call = Request(f"{url}/chat/completions", json.dumps(whole).encode(), {"content-type": "application/json"})
    with urlopen(call) as reply:
        counted: dict[str, int] = json.load(reply)["usage"]
    return counted
