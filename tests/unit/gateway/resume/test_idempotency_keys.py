"""Requests that are sent again with their idempotency key."""

import httpx
import pytest
from returning_clients import BODY, KEY, begun, hear, streaming
from running_gateway import RunningGateway, eventually
from scripted_pipeline import STOP


def test_a_retried_stream_is_the_same_request(gateway: RunningGateway, second: RunningGateway) -> None:
    first = begun(gateway, "a", headers=KEY)
    (request,) = gateway.pipeline.wait_for()
    request.afterwards.append(lambda: request.say("b"))
    with streaming(second, headers=KEY) as (heard, lines):
        hear(heard, lines)
    assert (heard.request_id, heard.texts) == (first.request_id, ["ab"])
    assert len(gateway.pipeline.incoming) == 1
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


def test_several_prompts_are_the_same_requests_when_they_are_sent_again(
    gateway: RunningGateway, second: RunningGateway
) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row(request.body.text))
    with streaming(gateway, headers=KEY, prompt=["x", "y"]) as (first, lines):
        hear(first, lines, lambda: first.texts == ["x", "y"])
    for request in gateway.pipeline.incoming:
        request.afterwards.append(lambda request=request: request.say("b"))
    with streaming(second, headers=KEY, prompt=["x", "y"]) as (heard, lines):
        hear(heard, lines)
    assert (heard.request_id, heard.texts, heard.is_done) == (first.request_id, ["xb", "yb"], True)
    for request in gateway.pipeline.incoming:
        assert request.retire()
    body = BODY | {"stream": False, "prompt": ["x", "y"]}
    reply = httpx.post(f"{second.url}/v1/completions", json=body, headers=KEY).json()
    assert [choice["text"] for choice in reply["choices"]] == ["xb", "yb"]
    assert len(gateway.pipeline.incoming) == 2


def test_a_retried_plain_reply_is_the_same_before_and_after_its_end(
    gateway: RunningGateway, second: RunningGateway
) -> None:
    gateway.pipeline.script = lambda request: request.retire(request.row("a", finish=STOP)) and None
    body = BODY | {"stream": False, "n": 1}
    replies = [httpx.post(f"{each.url}/v1/completions", json=body, headers=KEY) for each in (gateway, second, second)]
    assert [reply.status_code for reply in replies] == [200] * 3
    assert replies[0].json() == replies[1].json() == replies[2].json()
    assert len(gateway.pipeline.incoming) == 1


def test_another_body_with_the_same_key_is_a_conflict_and_disturbs_nobody(
    gateway: RunningGateway, second: RunningGateway
) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, headers=KEY) as (first, lines):
        hear(first, lines, lambda: first.texts == ["a"])
        for other_body in ({"prompt": "y"}, {"max_tokens": 7}, {"n": 2}, {"prompt": ["x", "x"]}):
            with streaming(second, headers=KEY, **other_body) as (heard, _):
                assert (heard.status, heard.error) == (409, "idempotency_conflict")
        gateway.pipeline.wait_for()[0].say("b")
        hear(first, lines)
    assert (first.texts, first.is_done) == (["ab"], True)


def test_a_request_with_a_key_waits_for_its_client(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, headers=KEY) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["a"])
    eventually(lambda: gateway.service.stats.num_detached == 1)
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


@pytest.mark.parametrize("key", ["", "with space", "x" * 256])
def test_a_key_is_short_and_visible(http: httpx.Client, key: str) -> None:
    reply = http.post("/v1/completions", json=BODY, headers={"idempotency-key": key})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "idempotency-key")


def test_the_same_key_of_a_client_without_a_seed_asks_for_the_same(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.say("a")
    for headers in (KEY, {"idempotency-key": "another"}):
        httpx.post(f"{gateway.url}/v1/completions", json=BODY, headers=headers).raise_for_status()
    one, two = gateway.pipeline.wait_for(2)
    assert one.header.seed != two.header.seed
    assert one.request_id != two.request_id
