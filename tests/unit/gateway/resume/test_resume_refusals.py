"""Ids that do not fit, other tenants' requests, and what a request is asked about."""

import json
from pathlib import Path

import grpc
import httpx
import pytest
from returning_clients import BODY, KEY, Launch, begun, events, hear, streaming
from running_gateway import RunningGateway
from scripted_pipeline import CANCELLED, STOP

from contract.domain import chain
from contract.domain.api_keys import hash_api_key
from contract.v1 import inference_pb2, inference_pb2_grpc
from servicekit.bus.calls import Fetch


def test_damaged_and_foreign_event_ids_are_refused(gateway: RunningGateway) -> None:
    first, foreign = begun(gateway, "a"), begun(gateway, "b")
    damaged = first.last_event_id[:9] + ("A" if first.last_event_id[9] != "A" else "B") + first.last_event_id[10:]
    for event_id in (damaged, foreign.last_event_id, "", "nonsense"):
        with streaming(gateway, f"/v1/requests/{first.request_id}/events", headers={"last-event-id": event_id}) as (
            heard,
            _,
        ):
            assert (heard.status, heard.error) == (400, "invalid_argument")


def test_an_event_id_of_another_history_diverges(gateway: RunningGateway, other: RunningGateway) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.wait_for()
    request.spoken[0].token_ids[0] = 7  # the server lost it, and it was generated anew
    request.spoken[0].chain = chain.extend(chain.CHAIN_START, request.spoken[0].token_ids)
    request.send(request.row("c"))
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.error, heard.texts) == ("stream_diverged", [])


def test_a_result_of_another_history_diverges(gateway: RunningGateway, other: RunningGateway) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.wait_for()
    request.spoken[0].token_ids[0] = 7
    request.row("c", finish=STOP)
    assert request.retire()
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.status, heard.error) == (500, "stream_diverged")


def test_unknown_requests_and_wrong_ids(http: httpx.Client) -> None:
    for path in ("/v1/requests/{}/events", "/v1/requests/{}"):
        assert http.get(path.format("0" * 32)).json()["error"]["code"] == "not_found"
        for wrong in ("x", "0" * 31 + " ", "g" * 32):
            assert http.get(path.format(wrong)).json()["error"]["code"] == "invalid_argument"


def test_the_header_says_true_or_false(http: httpx.Client) -> None:
    reply = http.post("/v1/completions", json=BODY, headers={"x-penstock-resumable": "maybe"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-penstock-resumable")


def test_a_request_tells_where_it_is_and_what_came_of_it(gateway: RunningGateway, other: RunningGateway) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.wait_for()
    url = f"{other.url}/v1/requests/{first.request_id}"
    found = httpx.get(url, timeout=300).json()
    assert (found["state"], found["reply"], found["error"]) == ("running", None, None)
    request.row("c", finish=STOP)
    assert request.retire()
    found = httpx.get(url, timeout=300).json()
    assert found["state"] == "ended"
    assert found["reply"]["choices"][0]["text"] == "abc"
    assert found["reply"]["usage"]["completion_tokens"] == 3
    assert found["reply"]["id"] == found["id"] == f"cmpl-{first.request_id}"


def test_a_request_that_failed_tells_why(gateway: RunningGateway) -> None:
    first = begun(gateway, "a")
    (request,) = gateway.pipeline.wait_for()
    request.row("", finish=CANCELLED)
    assert request.retire()
    found = httpx.get(f"{gateway.url}/v1/requests/{first.request_id}", timeout=300).json()
    assert (found["state"], found["reply"], found["error"]["code"]) == ("ended", None, "cancelled")
    with events(gateway, first) as (heard, _):
        assert (heard.status, heard.error) == (499, "cancelled")


def test_another_tenants_request_is_as_unknown_as_one_that_never_was(launch: Launch, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = [{"tenant": name, "sha256": hash_api_key(f"psk_{name}").hex()} for name in ("one", "two")]
    keys.write_text("".join(json.dumps(line) + "\n" for line in lines))
    gateway = launch(api_keys_file=keys)
    mine, theirs = ({"authorization": f"Bearer psk_{name}"} for name in ("one", "two"))
    first = begun(gateway, "a", headers=mine | KEY)
    ids = (first.request_id, "0" * 32)
    with httpx.Client(base_url=gateway.url, timeout=300) as http:

        def answers(method: str, path: str, headers: dict[str, str]) -> list[tuple[int, str]]:
            found = [http.request(method, path.format(each), headers=theirs | headers) for each in ids]
            return [(each.status_code, each.text.replace(name, "ID")) for each, name in zip(found, ids, strict=True)]

        for method, path in (
            ("GET", "/v1/requests/{}"),
            ("GET", "/v1/requests/{}/events"),
            ("DELETE", "/v1/requests/{}"),
        ):
            for headers in ({}, {"last-event-id": first.last_event_id}):
                found = answers(method, path, headers)
                assert found[0] == found[1]
                assert found[0][0] == 404
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        metadata = tuple(theirs.items())
        for name in ids:
            with pytest.raises(grpc.RpcError) as raised:
                list(stub.Resume(inference_pb2.ResumeCall(request_id=name), metadata=metadata))
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
            assert not stub.Cancel(inference_pb2.CancelCall(request_id=name), metadata=metadata).known
    # The same key of another tenant is another request.
    gateway.pipeline.script = lambda request: request.say("theirs")
    with streaming(gateway, headers=theirs | KEY) as (heard, lines):
        hear(heard, lines)
    assert heard.texts == ["theirs"]
    assert heard.request_id != first.request_id
    stored = gateway.pipeline.call(Fetch(bytes.fromhex(first.request_id)))
    assert stored is not None
    assert stored.cancel_reason == 0


def test_what_another_gateway_has_let_in_has_room_where_new_requests_have_none(launch: Launch) -> None:
    gateway = launch()
    other = launch(gateway, max_streams=1)
    first, second = begun(gateway, "a"), begun(gateway, "b")
    begun(other, "c")
    with streaming(other) as (heard, _):
        assert (heard.status, heard.error) == (429, "overloaded")
    request = gateway.pipeline.wait_for(3)[0]
    request.afterwards.append(lambda: request.send(request.row("d")))
    with events(other, first) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["d"])
        with events(other, second) as (refused, _):
            assert refused.status == 429
