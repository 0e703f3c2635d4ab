"""What HTTP, browsers and proxies expect of a server beside the replies themselves."""

import io
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from running_gateway import RunningGateway, eventually
from scripted_pipeline import STOP

from gateway_svc.core.models import OfferedModel, catalogue

BODY = {"model": "tiny", "prompt": "x"}
STREAMED = BODY | {"stream": True}
ID = "0" * 32
OURS = "x-penstock-request-id"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "given", [None, "", "text/plain", "text/plain; application/json", "application/x-www-form-urlencoded", "json"]
)
def test_a_body_that_does_not_say_that_it_is_json_is_not_read(
    gateway: RunningGateway, path: str, given: str | None
) -> None:
    """A page of any origin may post forms and plain text without the browser asking."""
    headers = {} if given is None else {"content-type": given}
    reply = httpx.post(gateway.url + path, content=json.dumps(BODY).encode(), headers=headers, timeout=300)
    assert (reply.status_code, reply.headers["x-should-retry"]) == (415, "false")
    assert reply.json()["error"]["param"] == "content-type"
    assert "application/json" in reply.json()["error"]["message"]
    assert gateway.pipeline.incoming == []


@pytest.mark.parametrize(
    "given", ["application/json", "Application/JSON; charset=utf-8", "application/json;x=y", "application/vnd.api+json"]
)
def test_json_may_have_parameters_and_kinds(gateway: RunningGateway, given: str) -> None:
    content = json.dumps(BODY).encode()
    reply = httpx.post(f"{gateway.url}/v1/completions", content=content, headers={"content-type": given}, timeout=300)
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", {"POST"}),
        ("PUT", "/v1/chat/completions", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("PATCH", f"/v1/requests/{ID}", {"GET", "HEAD", "DELETE"}),
        ("HEAD", f"/v1/requests/{ID}/events", {"GET"}),
        ("POST", "/health", {"GET", "HEAD"}),
    ],
)
def test_another_method_is_told_which_are_allowed(
    http: httpx.Client, method: str, path: str, allowed: set[str]
) -> None:
    reply = http.request(method, path)
    assert reply.status_code == 405
    assert set(reply.headers["allow"].split(", ")) == allowed


# --- pages of other origins -------------------------------------------------------------------------------------------

ORIGIN = {"origin": "https://chat.example.org"}
PREFLIGHT = ORIGIN | {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-penstock-resumable",
}


def test_pages_of_other_origins_are_not_let_in_unasked(gateway: RunningGateway) -> None:
    assert httpx.options(f"{gateway.url}/v1/completions", headers=PREFLIGHT, timeout=300).status_code == 405
    reply = httpx.post(f"{gateway.url}/v1/completions", json=BODY, headers=ORIGIN, timeout=300)
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("origins", [("*",), ("https://other.example.org", ORIGIN["origin"])])
@pytest.mark.parametrize("stream", [True, False])
def test_pages_of_the_named_origins_are_let_in(
    launch: Callable[..., RunningGateway], origins: tuple[str, ...], stream: bool
) -> None:
    gateway = launch(cors_origins=origins)
    url = f"{gateway.url}/v1/completions"
    asked = httpx.options(url, headers=PREFLIGHT, timeout=300)
    assert asked.status_code == 200
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    for body, status in ((BODY | {"stream": stream}, 200), (BODY | {"temperature": -1}, 400)):
        reply = httpx.post(url, json=body, headers=ORIGIN, timeout=300)
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] in ("*", ORIGIN["origin"])
        assert "x-penstock-request-id" in reply.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" in httpx.get(f"{gateway.url}/v1/models", headers=ORIGIN, timeout=300).headers
    elsewhere = httpx.post(url, json=BODY, headers={"origin": "https://evil.example.org"}, timeout=300)
    assert elsewhere.headers.get("access-control-allow-origin") == ("*" if origins == ("*",) else None)


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [BODY, STREAMED])
def test_our_id_and_the_clients_are_told_beside_each_other(gateway: RunningGateway, body: dict[str, Any]) -> None:
    for given in ({}, {"x-request-id": "theirs-1"}):
        reply = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=given, timeout=300)
        ours = gateway.pipeline.incoming[-1].request_id.hex()
        assert reply.headers.get_list("x-penstock-request-id") == [ours]
        assert reply.headers.get_list("x-request-id") == [given.get("x-request-id", ours)]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/requests/x"), ("GET", "/nowhere")],
)
def test_errors_and_lists_tell_the_clients_id_too(http: httpx.Client, method: str, path: str) -> None:
    reply = http.request(method, path, content=b"{", headers={"x-request-id": "theirs-2"})
    assert reply.headers.get_list("x-request-id") == ["theirs-2"]


@pytest.mark.parametrize("given", ["", "two words", "x" * 256, "é"])
def test_an_id_that_cannot_be_told_as_it_is_is_refused(http: httpx.Client, given: str) -> None:
    reply = http.post("/v1/completions", json=BODY, headers={"x-request-id": given.encode("latin-1")})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-request-id")
    assert "x-request-id" not in reply.headers


def test_both_ids_are_in_the_log(gateway: RunningGateway, log: io.StringIO) -> None:
    gateway.pipeline.script = lambda request: request.retire(request.row("a", finish=STOP)) and None
    headers = {"x-request-id": "theirs-3"}
    ours = httpx.post(f"{gateway.url}/v1/completions", json=BODY, headers=headers, timeout=300).headers[OURS]
    httpx.get(f"{gateway.url}/v1/requests/{ours}/events", headers=headers, timeout=300).raise_for_status()
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    told = [line["event"] for line in lines if line.get("client_request_id") == "theirs-3"]
    assert told == ["request", "served", "resumed", "served"]
    assert {line["request_id"] for line in lines if line.get("client_request_id") == "theirs-3"} == {ours}


def test_the_openai_client_is_shown_its_own_id(gateway: RunningGateway) -> None:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        reply = client.completions.create(model="tiny", prompt="x", extra_headers={"x-request-id": "theirs-4"})
    assert reply._request_id == "theirs-4"
    assert reply.id == "cmpl-" + gateway.pipeline.incoming[-1].request_id.hex()


# --- replies ----------------------------------------------------------------------------------------------------------


def test_a_model_says_where_its_tokenizer_is(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert model["root"] == "tiny"
    named = catalogue(("a", "b"), [OfferedModel("/models/story-7b", 100, "d")], 5).models
    assert [(each.name, each.root) for each in named] == [("a", "/models/story-7b"), ("b", "/models/story-7b")]
    assert [each.root for each in catalogue(("a",), [], 5).models] == [None]


def test_vllms_clients_find_that_there_are_no_logprobs_of_prompts(gateway: RunningGateway) -> None:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        completion = client.completions.create(model="tiny", prompt="x", extra_body={"prompt_logprobs": None})
        chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert completion.choices[0].prompt_logprobs is None  # type: ignore[attr-defined]
    assert chat.prompt_logprobs is None  # type: ignore[attr-defined]


def test_deleting_a_request_that_has_ended_says_so(gateway: RunningGateway, http: httpx.Client) -> None:
    gateway.pipeline.script = lambda request: request.retire(request.row("a", finish=STOP)) and None
    ended = http.post("/v1/completions", json=BODY | {"prompt": ["a", "b"]}).headers["x-penstock-request-id"]
    reply = http.delete(f"/v1/requests/{ended}")
    assert (reply.status_code, reply.json()["cancelled"], reply.json()["state"]) == (200, False, "ended")
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []
    gateway.pipeline.script = lambda request: None
    client = threading.Thread(target=lambda: httpx.post(f"{gateway.url}/v1/completions", json=BODY, timeout=300))
    client.start()
    running = gateway.pipeline.wait_for(3)[2]
    assert http.delete(f"/v1/requests/{running.request_id.hex()}").json()["cancelled"] is True
    running.send(running.row("", [], finish=3))
    client.join(300)
    eventually(lambda: not client.is_alive())


def test_a_body_may_say_what_the_client_calls_it(gateway: RunningGateway) -> None:
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        for headers, told in (({}, "theirs-9"), ({"x-request-id": "theirs-8"}, "theirs-8")):
            reply = http.post("/v1/completions", json={**BODY, "request_id": "theirs-9"}, headers=headers)
            assert reply.headers.get_list("x-request-id") == [told]
        reply = http.post("/v1/completions", json={**BODY, "request_id": "two words"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "request_id")
