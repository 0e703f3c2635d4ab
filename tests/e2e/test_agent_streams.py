"""Streams of the APIs of agents, through the death of their gateway."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served import Served, is_ready, is_running, wait_until

SAID = "compare them"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": SAID,
        "tools": [{"type": "function", "name": "look", "parameters": PARAMETERS}],
        "include": ["message.output_text.logprobs"],
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": SAID}],
        "max_tokens": 2000,
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
    },
}


def blocks(reply: httpx.Response) -> Iterator[str]:
    """The events of a stream."""
    assert reply.status_code == 200, reply.read()
    block: list[str] = []
    for line in reply.iter_lines():
        if line:
            block.append(line)
        elif block:
            yield "\n".join(block)
            block = []


def summed(heard: list[str]) -> list[dict[str, Any]]:
    """What events say, with growth of one part as one."""
    found: list[dict[str, Any]] = []
    for block in heard:
        fields = json.loads(block.rpartition("data: ")[2])
        delta = fields.get("delta")
        if found and fields["type"].endswith(".delta") and found[-1]["type"] == fields["type"]:
            before = found.pop()
            fields["delta"] = before["delta"] + delta
            if "logprobs" in fields:
                fields["logprobs"] = before["logprobs"] + fields["logprobs"]
        elif found and isinstance(delta, dict) and found[-1].get("delta", {}).keys() == delta.keys():
            before = found.pop()["delta"]
            fields["delta"] = {key: each if key == "type" else before[key] + each for key, each in delta.items()}
        found.append(fields)
    return found


@pytest.mark.parametrize("path", BODIES)
def test_a_gateway_that_dies_takes_no_event_along(agents: Served, path: str) -> None:
    first_url, second_url = agents.http_urls
    wait_until(lambda: is_ready(first_url), "ready")
    body = {"model": "simulated", "stream": True, **BODIES[path]}
    headers = {"idempotency-key": f"once{path}"}
    pid, heard = agents.pids()["gateway-0"], list[str]()
    with httpx.stream("POST", first_url + path, json=body, headers=headers, timeout=300) as reply:
        request_id = reply.headers["x-penstock-request-id"]
        for block in blocks(reply):
            heard.append(block)
            if len(heard) == 60:
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: not is_running(pid), "dead")
                break
    events, last = f"{second_url}/v1/requests/{request_id}/events", heard[-1].split("\n")[0].removeprefix("id: ")
    with httpx.stream("GET", events, headers={"last-event-id": last}, timeout=300) as reply:
        heard += blocks(reply)
    with httpx.stream("GET", events, timeout=300) as reply:
        assert summed(list(blocks(reply))) == summed(heard)
    with httpx.stream("POST", second_url + path, json=body, headers=headers, timeout=300) as reply:
        assert summed(list(blocks(reply))) == summed(heard)
    kept = httpx.get(f"{second_url}/v1/requests/{request_id}", timeout=300).json()
    plain = httpx.post(second_url + path, json=body | {"stream": False}, headers=headers, timeout=300).json()
    assert kept["reply"] == plain
    told = [json.loads(each.rpartition("data: ")[2]) for each in heard]
    begun = told[0].get("response") or told[0]["message"]
    assert begun["id"] == plain["id"]
    assert told[-1].get("response", plain) == plain
