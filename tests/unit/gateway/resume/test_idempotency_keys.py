"""Requests that are sent again with their idempotency key."""

from collections.abc import Sequence

import httpx
import pytest
from returning_clients import BODY, KEY, Launch, begun, events, hear, silent, streaming
from running_gateway import RunningGateway, eventually
from scripted_pipeline import STOP

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.request import Request
from gateway_svc.core.auth import KeyLimits
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.outbox import Submitted
from servicekit.bus.calls import Bounds


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
    reply = httpx.post(f"{second.url}/v1/completions", json=body, headers=KEY, timeout=300).json()
    assert [choice["text"] for choice in reply["choices"]] == ["xb", "yb"]
    assert len(gateway.pipeline.incoming) == 2


def test_a_retried_plain_reply_is_the_same_before_and_after_its_end(
    gateway: RunningGateway, second: RunningGateway
) -> None:
    gateway.pipeline.script = lambda request: request.retire(request.row("a", finish=STOP)) and None
    body = BODY | {"stream": False, "n": 1}
    replies = [
        httpx.post(f"{each.url}/v1/completions", json=body, headers=KEY, timeout=300)
        for each in (gateway, second, second)
    ]
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


@pytest.mark.parametrize("prompts", [["x"], ["x", "y"]], ids=["nothing was taken", "one of two was taken"])
def test_a_refused_call_can_be_sent_again(launch: Launch, prompts: list[str]) -> None:
    gateway = launch(max_waiting_requests=len(prompts))
    gateway.pipeline.script = silent
    with gateway.post(BODY):
        gateway.pipeline.wait_for()
        with streaming(gateway, headers=KEY, prompt=prompts) as (refused, _):
            assert (refused.status, refused.error) == (429, "overloaded")
        for request in gateway.pipeline.wait_for(len(prompts))[1:]:  # it was taken before the other was refused
            request.afterwards.append(lambda request=request: request.say("a"))
        gateway.pipeline.script = lambda request: request.say("a")
        gateway.service.pools.all[0].delivery.outbox._bounds_of_nobody = Bounds()
        with streaming(gateway, headers=KEY, prompt=prompts) as (heard, lines):
            hear(heard, lines)
    assert (heard.status, heard.texts, heard.is_done) == (200, ["a"] * len(prompts), True)
    assert len(gateway.pipeline.incoming) == 1 + len(prompts)


@pytest.mark.parametrize("was_taken", [False, True])
def test_a_call_whose_submit_was_not_answered_can_be_sent_again(
    gateway: RunningGateway, second: RunningGateway, was_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = gateway.service.pools.all[0].delivery.outbox
    submit = outbox.submit
    gateway.pipeline.script = silent

    async def unanswered(
        requests: Sequence[Request], form: ReplyForm, came_ms: int, limits: KeyLimits | None
    ) -> Submitted:
        if was_taken:
            await submit(requests, form, came_ms, limits)
        monkeypatch.undo()
        raise PenstockError(ErrorCode.UNAVAILABLE, "no answer came")

    monkeypatch.setattr(outbox, "submit", unanswered)
    with streaming(gateway, headers=KEY) as (refused, _):
        assert (refused.status, refused.error) == (503, "unavailable")
    gateway.pipeline.script = lambda request: request.say("a", "b")
    for request in gateway.pipeline.wait_for() if was_taken else ():
        request.afterwards.append(lambda request=request: request.say("a", "b"))
    with streaming(second, headers=KEY) as (heard, lines):
        hear(heard, lines)
    assert (heard.status, heard.texts, heard.is_done) == (200, ["ab"], True)
    assert len(gateway.pipeline.incoming) == 1


def test_who_is_served_already_comes_back_to_a_full_gateway(launch: Launch) -> None:
    gateway = launch(max_streams=1)
    first = begun(gateway, "a", headers=KEY)
    (request,) = gateway.pipeline.wait_for()
    request.afterwards.append(lambda: request.send(request.row("b")))
    with streaming(gateway, headers=KEY) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["ab"])
        request.afterwards.append(lambda: request.say("c"))
        with events(gateway, first) as (again, rest):
            hear(again, rest)
    assert (again.texts, again.is_done) == (["bc"], True)


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
        httpx.post(f"{gateway.url}/v1/completions", json=BODY, headers=headers, timeout=300).raise_for_status()
    one, two = gateway.pipeline.wait_for(2)
    assert one.header.seed != two.header.seed
    assert one.request_id != two.request_id
