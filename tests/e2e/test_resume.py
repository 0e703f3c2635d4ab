"""A gateway killed in mid-stream: its clients go on through the other one, and have what they would have had."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import httpx
import pytest
from served import (
    CALM_LEASES,
    ENDLESS_TOKENS,
    LIMIT_S,
    SIMULATED,
    TWO_GATEWAYS,
    Served,
    expected,
    is_ready,
    is_running,
    wait_until,
)

from contract.domain.params import SamplingParams
from penstock.client import Accepted, Client, Delta
from penstock.v1 import inference_pb2, inference_pb2_grpc

NUM_TOKENS = 500
GRACE_S = 3.0
BODY = {
    "model": "simulated",
    "prompt": [1, 7, 9],
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESUMABLE = {"x-penstock-resumable": "true"}
EVENT_IDS = {"x-penstock-event-ids": "true"}
SAMPLES = {"n": 2, "temperature": 1, "seed": 5}
PROMPTS = {"prompt": [[1, 7, 9], [2, 8], [3]]}


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", *TWO_GATEWAYS, "--step-ms=5", *SIMULATED)
    with Served(tmp_path_factory.mktemp("resume"), *flags, CALM_LEASES) as served:
        yield served.wait_ready()


@pytest.fixture(scope="module")
def hasty(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A pipeline that soon gives a request up whose client stays away."""
    flags = (f"--model={long_checkpoint}", "--served-model-name=simulated", "--gateways=2", "--step-ms=5", *SIMULATED)
    graces = (f"--resume-grace-s={GRACE_S}", f"--orphan-grace-s={GRACE_S}")
    with Served(tmp_path_factory.mktemp("hasty"), *flags, *graces, CALM_LEASES) as served:
        yield served.wait_ready()


@pytest.fixture
def victim(served: Served) -> Iterator[Callable[[], None]]:
    with killer(served) as kill:
        yield kill


@contextmanager
def killer(served: Served) -> Iterator[Callable[[], None]]:
    """Kills gateway-0; the launcher has started it again in the end."""
    wait_until(lambda: all(is_ready(url) for url in served.http_urls), "ready")
    pid = served.pids()["gateway-0"]

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "dead")  # or it may see its clients leave

    yield kill
    wait_until(lambda: served.pids()["gateway-0"] != pid, "restarted")


@dataclass
class Heard:
    """What a client has of a stream."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    request_id: str = ""
    last_event_id: str = ""
    is_done: bool = False

    def read(self, reply: httpx.Response, stop: Callable[[], bool] = lambda: False) -> None:
        assert reply.status_code == 200, reply.read()
        self.request_id = reply.headers["x-penstock-request-id"]
        event_id = ""
        for line in reply.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif value == "[DONE]":
                self.is_done = True
            elif name == "data":
                chunk = json.loads(value)
                assert "error" not in chunk, chunk
                self.last_event_id = event_id
                self.usage = chunk["usage"] or self.usage
                for choice in chunk["choices"]:
                    index = choice["index"]
                    self.texts[index] = self.texts.get(index, "") + choice["text"]
                    if choice["finish_reason"]:
                        self.finishes[index] = choice["finish_reason"]
            if stop():
                return


def listen(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Heard:
    """A whole stream."""
    heard = Heard()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=300) as reply:
        heard.read(reply)
    return heard


def begin(url: str, body: dict[str, Any], headers: dict[str, str], kill: Callable[[], None]) -> Heard:
    """A stream that is heard half and then breaks.

    On a busy machine one may come to an end before that: the next one has another key, which `headers` have then.
    """
    while (heard := _begin(url, body, headers, kill)) is None:
        if key := headers.get("idempotency-key"):
            headers["idempotency-key"] = f"{key}-again"
    return heard


def _begin(url: str, body: dict[str, Any], headers: dict[str, str], kill: Callable[[], None]) -> Heard | None:
    heard, is_killed = Heard(), False
    num_prompts = 1 if isinstance(body["prompt"][0], int) else len(body["prompt"])

    def is_broken() -> bool:
        nonlocal is_killed
        if (
            heard.finishes
            or len(heard.texts) < num_prompts * body.get("n", 1)
            or min(map(len, heard.texts.values())) <= 100
        ):
            return False
        is_killed = True
        kill()  # while the stream is held: leaving `read` hangs up, and a gateway that sees it may cancel
        return True

    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=300) as reply:
        heard.read(reply, is_broken)
    assert is_killed or (heard.is_done and len(heard.finishes) == num_prompts * body.get("n", 1))
    return heard if is_killed else None


def assert_same(heard: Heard, undisturbed: Heard) -> None:
    assert heard.texts == undisturbed.texts
    assert heard.finishes == undisturbed.finishes
    assert heard.usage is not None
    assert undisturbed.usage is not None
    for count in ("prompt_tokens", "completion_tokens"):
        assert heard.usage[count] == undisturbed.usage[count]
    assert heard.is_done


@pytest.mark.parametrize(
    "fields",
    [{}, SAMPLES, PROMPTS, PROMPTS | SAMPLES],
    ids=["greedy", "samples", "prompts", "samples of prompts"],
)
def test_an_event_stream_goes_on_through_the_other_gateway(
    served: Served, victim: Callable[[], None], fields: dict[str, Any]
) -> None:
    first_url, second_url = served.http_urls
    body = BODY | fields
    undisturbed = listen(second_url, body)
    heard = begin(first_url, body, RESUMABLE, victim)
    url = f"{second_url}/v1/requests/{heard.request_id}/events"
    with httpx.stream("GET", url, headers={"last-event-id": heard.last_event_id}, timeout=300) as reply:
        heard.read(reply)
    assert_same(heard, undisturbed)
    found = httpx.get(f"{second_url}/v1/requests/{heard.request_id}", timeout=300).json()
    assert found["state"] == "ended"
    assert {each["index"]: each["text"] for each in found["reply"]["choices"]} == undisturbed.texts
    texts = dict.fromkeys(undisturbed.texts, "")
    with grpc.insecure_channel(served.grpc_addresses[1]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for event in stub.Resume(inference_pb2.ResumeCall(request_id=heard.request_id)):
            if event.HasField("delta"):
                texts[event.delta.sequence] += event.delta.text
    assert texts == undisturbed.texts


def test_a_request_that_did_not_ask_for_it_goes_on_too_if_its_client_is_quick(
    served: Served, victim: Callable[[], None]
) -> None:
    first_url, second_url = served.http_urls
    heard = begin(first_url, BODY, EVENT_IDS, victim)
    url = f"{second_url}/v1/requests/{heard.request_id}/events"
    with httpx.stream("GET", url, headers={"last-event-id": heard.last_event_id}, timeout=300) as reply:
        heard.read(reply)
    assert_same(heard, listen(second_url, BODY))


@pytest.mark.parametrize("fields", [{}, PROMPTS], ids=["one prompt", "prompts"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_retried_post_with_its_key_is_the_same_request(
    served: Served, victim: Callable[[], None], stream: bool, fields: dict[str, Any]
) -> None:
    first_url, second_url = served.http_urls
    headers = {"idempotency-key": f"retried-{stream}-{len(fields)}"}
    body = BODY | fields | {"n": 2, "temperature": 1}  # without a seed: it follows from the key
    first = begin(first_url, body, headers, victim)
    if stream:
        again = listen(second_url, body, headers)
        assert again.request_id == first.request_id
        texts = again.texts
    else:
        plain = {key: value for key, value in body.items() if not key.startswith("stream")}
        reply = httpx.post(f"{second_url}/v1/completions", json=plain, headers=headers, timeout=300)
        assert reply.headers["x-penstock-request-id"] == first.request_id
        texts = {each["index"]: each["text"] for each in reply.json()["choices"]}
        assert (
            httpx.post(f"{second_url}/v1/completions", json=plain, headers=headers, timeout=300).json() == reply.json()
        )
    assert all(texts[index].startswith(text) for index, text in first.texts.items())
    other = httpx.post(f"{second_url}/v1/completions", json=body | {"prompt": "another"}, headers=headers, timeout=300)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")


@pytest.mark.parametrize("n", [1, 2])
def test_grpc_resume_goes_on_through_the_other_gateway(served: Served, victim: Callable[[], None], n: int) -> None:
    params = SamplingParams(n=n, temperature=float(n > 1), seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
    first_address, second_address = served.grpc_addresses
    with Client(second_address) as client:
        undisturbed = client.complete([1, 7, 9], params)
    with Client(f"{first_address},{second_address}") as client:
        tokens: list[list[int]] = [[] for _ in range(n)]
        texts = [""] * n
        is_killed = False
        for event in client.generate([1, 7, 9], params, resumable=True):
            if isinstance(event, Delta):
                assert event.token_offset == len(tokens[event.sequence])
                tokens[event.sequence] += event.token_ids
                texts[event.sequence] += event.text
                if not is_killed and min(map(len, tokens)) > 50:
                    victim()
                    is_killed = True
            else:
                accepted = event
    assert is_killed
    assert tokens == [output.token_ids for output in undisturbed.outputs]
    assert texts == [output.text for output in undisturbed.outputs]
    if n == 1:
        assert tokens[0] == expected([1, 7, 9], NUM_TOKENS)
    assert isinstance(accepted, Accepted)
    with grpc.insecure_channel(second_address) as channel:
        # Once more from the start, long after the end.
        call = inference_pb2_grpc.InferenceStub(channel).Resume(
            inference_pb2.ResumeCall(request_id=accepted.request_id)
        )
        again = [event.delta for event in call if event.HasField("delta")]
    assert "".join(delta.text for delta in again if delta.sequence == 0) == texts[0]


def test_many_clients_of_both_kinds_lose_nothing_with_their_gateway(served: Served, victim: Callable[[], None]) -> None:
    first_url, second_url = served.http_urls
    addresses = ",".join(served.grpc_addresses)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

    def over_grpc(prompt: int, begun: Event) -> list[int]:
        token_ids: list[int] = []
        with Client(addresses) as client:
            for event in client.generate([prompt, 7, 9], params, resumable=True):
                if isinstance(event, Delta):
                    token_ids += event.token_ids
                    begun.set()
        return token_ids

    def over_http(prompt: int, begun: Event) -> Heard:
        body, headers = BODY | {"prompt": [prompt, 7, 9]}, {"idempotency-key": f"many-{prompt}"}
        heard = Heard()

        def has_begun() -> bool:
            if heard.texts:
                begun.set()
            return False

        try:
            with httpx.stream("POST", f"{first_url}/v1/completions", json=body, headers=headers, timeout=300) as reply:
                heard.read(reply, has_begun)
        except httpx.TransportError:
            if not heard.last_event_id:
                return listen(second_url, body, headers)
            url = f"{second_url}/v1/requests/{heard.request_id}/events"
            with httpx.stream("GET", url, headers={"last-event-id": heard.last_event_id}, timeout=300) as reply:
                heard.read(reply)
        return heard

    prompts = range(20, 28)
    undisturbed = {prompt: listen(second_url, BODY | {"prompt": [prompt, 7, 9]}) for prompt in prompts}
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        begun = [Event() for _ in (*prompts, *prompts)]
        said = [pool.submit(over_grpc, *each) for each in zip(prompts, begun[::2], strict=True)]
        heard = [pool.submit(over_http, *each) for each in zip(prompts, begun[1::2], strict=True)]
        assert all(each.wait(LIMIT_S) for each in begun)
        victim()
        for prompt, one, other in zip(prompts, said, heard, strict=True):
            assert one.result() == expected([prompt, 7, 9], NUM_TOKENS)
            assert_same(other.result(), undisturbed[prompt])


@pytest.mark.parametrize("killed", [False, True])
def test_a_request_whose_client_stays_away_is_cancelled(hasty: Served, killed: bool) -> None:
    first_url, second_url = hasty.http_urls
    body = BODY | {"max_tokens": ENDLESS_TOKENS}
    broken_s = 0.0
    with killer(hasty) as kill:

        def leave() -> None:
            nonlocal broken_s
            broken_s = time.monotonic()
            if killed:
                kill()

        heard = begin(first_url, body, RESUMABLE, leave)

        def state() -> dict[str, Any]:
            found: dict[str, Any] = httpx.get(f"{second_url}/v1/requests/{heard.request_id}", timeout=300).json()
            return found

        wait_until(lambda: state()["state"] == "ended", "cancelled")
        assert time.monotonic() - broken_s >= GRACE_S
        assert state()["error"]["code"] == "cancelled"
        if not killed:
            kill()
