"""API keys with limits: what a caller beyond one is told, over all gateways of a pool."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_gateway import RunningGateway, eventually
from scripted_pipeline import NUM_PROMPT_TOKENS, STOP, Incoming

from contract.domain.api_keys import hash_api_key
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from gateway_svc.core.auth import KEY_BYTES
from gateway_svc.core.stats import MAX_TENANTS, GatewayStats
from penstock.client import Client
from servicekit.bus.calls import Fetch
from servicekit.bus.keys import Names

Launch = Callable[..., RunningGateway]
KEY, OTHER_KEY, FREE_KEY = "psk_limited", "psk_other", "psk_free"
BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 10}


def silent(request: Incoming) -> None:
    """Text comes from the test alone."""


@pytest.fixture
def keyed(launch: Launch, tmp_path: Path) -> Callable[..., RunningGateway]:
    """A gateway whose first key has these limits."""

    def start(beside: RunningGateway | None = None, **limits: int) -> RunningGateway:
        file = tmp_path / "keys"
        lines = [{"tenant": "one", "name": "ci", **limits}, {"tenant": "one", **limits}, {"tenant": "two"}]
        keys = (KEY, OTHER_KEY, FREE_KEY)
        if beside is None:
            file.write_text(
                "".join(
                    json.dumps({**each, "sha256": hash_api_key(key).hex()}) + "\n"
                    for each, key in zip(lines, keys, strict=True)
                )
            )
        return launch(beside, api_keys_file=file)

    return start


def post(
    gateway: RunningGateway, key: str = KEY, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    given = {"authorization": f"Bearer {key}", **(headers or {})}
    return httpx.post(f"{gateway.url}/v1/completions", json=BODY | fields, headers=given, timeout=300)


def refusal(reply: httpx.Response) -> str:
    """The error for a call beyond a limit."""
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert "x-should-retry" not in reply.headers
    message: str = error["message"]
    return message


def test_a_key_may_call_so_often_in_a_minute_through_all_gateways(keyed: Callable[..., RunningGateway]) -> None:
    gateway = keyed(rpm=2)
    other = keyed(gateway)
    began_s = int(time.time())
    assert [post(each).status_code for each in (gateway, other)] == [200, 200]
    for each in (gateway, other):
        reply = post(each)
        assert "the API key 'ci' has rpm 2 (calls in a minute); send the call again in" in refusal(reply)
        # The first call goes out of the minute at a whole second.
        assert began_s + 60 <= time.time() + int(reply.headers["retry-after"]) <= time.time() + 62
    assert post(gateway, OTHER_KEY).status_code == 200, "another key of the tenant has limits of its own"
    assert [post(gateway, FREE_KEY).status_code for _ in range(3)] == [200] * 3


def test_a_call_of_several_prompts_is_one_call(keyed: Callable[..., RunningGateway]) -> None:
    gateway = keyed(rpm=2)
    assert [post(gateway, prompt=["a", "b", "c"]).status_code for _ in range(3)] == [200, 200, 429]
    assert len(gateway.pipeline.incoming) == 6


def test_what_is_sent_again_with_its_key_counts_once(keyed: Callable[..., RunningGateway]) -> None:
    gateway = keyed(rpm=1, max_running=1)
    gateway.pipeline.script = lambda request: request.retire(request.row("a", finish=STOP)) and None
    again = {"idempotency-key": "order-66"}
    replies = [post(gateway, headers=again) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert "rpm" in refusal(post(gateway))


def test_a_key_may_have_so_many_requests_at_once(keyed: Callable[..., RunningGateway]) -> None:
    gateway = keyed(max_running=1)
    gateway.pipeline.script = silent
    client = gateway.post(BODY, {"authorization": f"Bearer {KEY}"})
    with client:
        (request,) = gateway.pipeline.wait_for()
        reply = post(gateway)
        assert "has max_running 1 (requests at once); send the call again when one of them has ended" in refusal(reply)
        assert reply.headers["retry-after"] == "1"
        assert request.retire(request.row("a", finish=STOP))
        gateway.pipeline.script = lambda each: each.say("fine")
        assert post(gateway).status_code == 200


def test_who_asks_for_more_at_once_than_the_key_may_ever_have_is_told(keyed: Callable[..., RunningGateway]) -> None:
    reply = post(keyed(max_running=2), prompt=["a", "b", "c"])
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_argument", "prompt")
    assert "'ci' may have 2 requests at once" in error["message"]


def test_tokens_count_for_what_was_granted_until_it_is_known_what_was_used(
    keyed: Callable[..., RunningGateway],
) -> None:
    gateway = keyed(tpm=100)
    gateway.pipeline.script = silent
    client = gateway.post(BODY | {"max_tokens": 80}, {"authorization": f"Bearer {KEY}"})
    with client:
        (request,) = gateway.pipeline.wait_for()
        assert "has tpm 100 (tokens of prompts and outputs in a minute)" in refusal(post(gateway, max_tokens=40))
        assert request.retire(request.row("a", finish=STOP), tokens=NUM_PROMPT_TOKENS + 1)
        gateway.pipeline.script = lambda each: each.say("fine")
        assert post(gateway, max_tokens=40).status_code == 200


def test_over_grpc_the_same_is_told(keyed: Callable[..., RunningGateway]) -> None:
    gateway = keyed(rpm=1)
    began_s = time.monotonic()
    with Client(gateway.grpc, api_key=KEY, timeout_s=120) as client:
        client.complete([1], SamplingParams())
        with pytest.raises(PenstockError, match="rpm") as refused:
            client.complete([1], SamplingParams())
    assert refused.value.code is ErrorCode.RATE_LIMIT_EXCEEDED
    assert refused.value.retry_after_s is not None
    assert 59 - (time.monotonic() - began_s) < refused.value.retry_after_s <= 61


def test_a_request_that_a_restarted_server_lost_counts_as_running_again(keyed: Callable[..., RunningGateway]) -> None:
    gateway = keyed(max_running=1)
    other = keyed(gateway)
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    gateway.pipeline.follows = True
    given = {"authorization": f"Bearer {KEY}", "idempotency-key": "order-66"}
    url = f"{gateway.url}/v1/completions"
    with httpx.stream("POST", url, json=BODY | {"stream": True}, headers=given, timeout=300) as first:
        assert any('"text":"a"' in each for each in first.iter_lines())
        (request,) = gateway.pipeline.wait_for()
        url = f"{other.url}/v1/requests/{request.request_id.hex()}/events"
        with httpx.stream("GET", url, headers=given, timeout=300) as second:
            assert any('"text":"a"' in each for each in second.iter_lines())
            keys, key = gateway.bus.keys, hash_api_key(KEY)[:KEY_BYTES]
            gateway.bus.stop()
            running, rate = (keys.key(name, key.hex()) for name in (Names.RUNNING, Names.RATE))
            for lost in (keys.request(request.request_id), running, rate):
                assert gateway.bus.server.store.delete(lost)
            gateway.bus.start()
            eventually(lambda: gateway.pipeline.call(Fetch(request.request_id)) is not None, 300)
            eventually(other.service.is_ready, 300)
            assert "max_running" in refusal(post(other))
    assert gateway.bus.server.store.exists(running)


def test_what_tenants_use_is_counted_by_their_names(keyed: Callable[..., RunningGateway]) -> None:
    gateway = keyed()
    post(gateway).raise_for_status()
    post(gateway, OTHER_KEY).raise_for_status()
    post(gateway, FREE_KEY, n=1).raise_for_status()
    families = text_string_to_metric_families(httpx.get(f"{gateway.url}/metrics", timeout=300).text)
    found = {
        (sample.labels["tenant"], sample.labels["kind"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "penstock_tenant_tokens_total"
    }
    assert found == {
        ("one", "prompt"): 2 * NUM_PROMPT_TOKENS,
        ("one", "output"): 4,
        ("two", "prompt"): NUM_PROMPT_TOKENS,
        ("two", "output"): 2,
    }


def test_beyond_a_thousand_names_tenants_are_counted_together() -> None:
    stats = GatewayStats()
    for number in range(MAX_TENANTS + 5):
        stats.of_tenant(f"tenant-{number}").num_output += 1
    stats.of_tenant("tenant-7").num_output += 1
    assert len(stats.tenants) == MAX_TENANTS + 1
    assert (stats.tenants["other"].num_output, stats.tenants["tenant-7"].num_output) == (5, 2)
