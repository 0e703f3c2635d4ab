"""Streams as clients read them that know nothing of server-sent events but `data: `."""

from typing import Any

import httpx
import pytest
from naive_client import naive_events
from running_gateway import RunningGateway

COMPLETION = ("/v1/completions", {"prompt": "x"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT], ids=["completion", "chat"])
def test_an_event_is_one_line_of_json_after_data(gateway: RunningGateway, path: str, body: dict[str, Any]) -> None:
    asked = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, **body}
    with httpx.stream("POST", gateway.url + path, json=asked, timeout=60) as reply:
        *chunks, last = naive_events(reply.iter_raw(7))
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [each.get("text") or each.get("delta", {}).get("content") or "" for each in choices]
    assert "".join(texts) == "Hello world"
    assert choices[-1]["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == 2
