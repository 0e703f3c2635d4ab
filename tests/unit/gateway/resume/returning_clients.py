"""Clients that lose their connection and come back."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from running_gateway import RunningGateway
from scripted_pipeline import Incoming

Launch = Callable[..., RunningGateway]
BODY = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 4096}
RESUMABLE = {"x-penstock-resumable": "true"}
KEY = {"idempotency-key": "order-66"}


def silent(request: Incoming) -> None:
    """What is said is said by the test."""


@dataclass
class Heard:
    """What came of a stream."""

    status: int = 0
    request_id: str = ""
    texts: list[str] = field(default_factory=list)  # by choice
    last_event_id: str = ""
    finishes: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    error: str = ""
    num_events: int = 0
    is_done: bool = False

    def take(self, line: str) -> None:
        name, _, value = line.partition(": ")
        if name == "id":
            self.last_event_id = value
        if name != "data":
            return
        self.num_events += 1
        if value == "[DONE]":
            self.is_done = True
            return
        chunk = json.loads(value)
        self.error = chunk.get("error", {}).get("code", "") or self.error
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", []):
            index = choice["index"]
            self.texts += [""] * (index + 1 - len(self.texts))
            delta = choice.get("delta", choice)
            self.texts[index] += delta.get("content", delta.get("text")) or ""
            if choice["finish_reason"]:
                self.finishes[index] = choice["finish_reason"]


@contextmanager
def streaming(
    gateway: RunningGateway, path: str = "/v1/completions", *, headers: dict[str, str] | None = None, **fields: Any
) -> Iterator[tuple[Heard, Iterator[str]]]:
    """A stream that is read line by line as far as the test likes: `hear`; then its connection ends."""
    given = {"headers": headers or {}}
    method = "GET" if path.endswith("/events") else "POST"
    if method == "POST":
        given["json"] = {**BODY, **fields}
    with httpx.Client(base_url=gateway.url, timeout=300) as http, http.stream(method, path, **given) as reply:
        heard = Heard(reply.status_code, reply.headers.get("x-penstock-request-id", ""))
        if reply.status_code != 200:
            heard.error = json.loads(reply.read())["error"]["code"]
        yield heard, reply.iter_lines()


def hear(heard: Heard, lines: Iterator[str], until: Callable[[], bool] = lambda: False) -> Heard:
    if not until():
        for line in lines:
            heard.take(line)
            if until():
                break
    return heard


def begun(gateway: RunningGateway, *texts: str, headers: dict[str, str] | None = None, **fields: Any) -> Heard:
    """A stream whose connection broke when it had these texts."""
    index = len(gateway.pipeline.incoming)
    gateway.pipeline.script = lambda request: [request.send(request.row(text)) for text in texts] and None
    with streaming(gateway, headers=RESUMABLE | (headers or {}), **fields) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["".join(texts)])
    gateway.pipeline.script = silent
    assert gateway.pipeline.incoming[index].request_id.hex() == heard.request_id
    return heard


def events(gateway: RunningGateway, first: Heard, *, headers: dict[str, str] | None = None) -> Any:
    """The rest of a stream, through a gateway, behind its last event."""
    given = {"last-event-id": first.last_event_id} if first.last_event_id else {}
    return streaming(gateway, f"/v1/requests/{first.request_id}/events", headers=given | (headers or {}))
