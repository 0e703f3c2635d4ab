"""Clients that lose their connection and go on behind their last event, through this gateway or another."""

import httpx
import pytest
from returning_clients import BODY, KEY, RESUMABLE, Heard, Launch, begun, events, hear, streaming
from running_gateway import RunningGateway, eventually
from scripted_pipeline import LENGTH, STOP, Incoming


def test_a_broken_stream_goes_on_behind_its_last_event(gateway: RunningGateway, second: RunningGateway) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.wait_for()
    request.send(request.row("c"))  # for nobody
    request.afterwards.append(lambda: request.say("d", finish=STOP))
    with events(second, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.finishes, heard.is_done) == (["cd"], {0: "stop"}, True)
    assert heard.request_id == first.request_id
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []
    assert second.service.stats.num_resumes == 1


def test_without_an_event_id_a_stream_is_told_from_its_start(gateway: RunningGateway, other: RunningGateway) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.wait_for()
    first.last_event_id = ""
    request.afterwards.append(lambda: request.say("c"))
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert heard.texts == ["abc"]


def test_it_goes_on_in_the_shape_and_with_the_usage_that_was_asked_for(
    gateway: RunningGateway, other: RunningGateway
) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"), request.row("x", sequence=1))
    chat = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "stream_options": {"include_usage": True}}
    body = BODY | chat
    del body["prompt"]
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        first = Heard()
        with http.stream("POST", "/v1/chat/completions", json=body, headers=RESUMABLE) as reply:
            first.request_id = reply.headers["x-penstock-request-id"]
            hear(first, reply.iter_lines(), lambda: first.texts == ["a", "x"])
    (request,) = gateway.pipeline.wait_for()
    request.send(request.row("y", sequence=1, finish=LENGTH))
    request.afterwards.append(lambda: request.send(request.row("b", finish=STOP)))
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.finishes) == (["b", "y"], {0: "stop", 1: "length"})
    assert heard.usage is not None
    assert heard.usage["completion_tokens"] == 4


def test_continuous_usage_goes_on_where_it_was(gateway: RunningGateway, second: RunningGateway) -> None:
    first = begun(gateway, "a", "b", stream_options={"continuous_usage_stats": True})
    (request,) = gateway.pipeline.wait_for()
    request.afterwards.append(lambda: request.say("c", "d"))
    counts = []
    with events(second, first) as (heard, lines):
        for line in lines:
            heard.take(line)
            if heard.usage and line.startswith("data: {"):
                counts.append((heard.usage["prompt_tokens"], heard.usage["completion_tokens"]))
    assert heard.texts == ["cd"]
    assert counts == [(7, 3), (7, 4), (7, 4)]


def test_a_sample_that_had_ended_is_not_told_again(gateway: RunningGateway, other: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("a", finish=STOP), request.row("x", sequence=1))

    gateway.pipeline.script = script
    with streaming(gateway, headers=RESUMABLE, n=2) as (first, lines):
        hear(first, lines, lambda: first.texts == ["a", "x"])
    (request,) = gateway.pipeline.wait_for()
    request.afterwards.append(lambda: request.send(request.row("y", sequence=1, finish=STOP)))
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.finishes) == (["", "y"], {1: "stop"})


def test_a_finished_request_is_told_from_its_result(gateway: RunningGateway, second: RunningGateway) -> None:
    first = begun(gateway, "a", "b")
    (request,) = gateway.pipeline.wait_for()
    request.row("c", finish=STOP)
    assert request.retire()
    with events(second, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.finishes, heard.is_done) == (["c"], {0: "stop"}, True)
    # And again: behind the end there is only the usage, if it was asked for.
    with events(second, heard) as (again, lines):
        hear(again, lines)
    assert (again.texts, again.is_done, again.num_events) == ([], True, 1)


def test_who_had_everything_is_told_the_usage_again(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        row = request.row("a", finish=STOP)
        assert request.retire(row)

    gateway.pipeline.script = script
    ids = {"x-penstock-event-ids": "true"}
    with streaming(gateway, headers=ids, stream_options={"include_usage": True}) as (first, lines):
        hear(first, lines)
    with events(gateway, first) as (again, lines):
        hear(again, lines)
    assert again.texts == []
    assert again.usage == first.usage != None  # noqa: E711


def test_several_prompts_go_on_together(gateway: RunningGateway, other: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, headers=RESUMABLE, prompt=["x", "y"]) as (first, lines):
        hear(first, lines, lambda: first.texts == ["a", "a"])
    one, two = sorted(gateway.pipeline.incoming, key=lambda request: request.request_id.hex() != first.request_id)
    one.afterwards.append(lambda: one.say("b"))
    two.afterwards.append(lambda: two.say("c"))
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.is_done) == (["b", "c"], True)


def test_each_prompts_request_leads_to_the_whole_call(gateway: RunningGateway, other: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, headers=RESUMABLE, prompt=["x", "y", "z"]) as (first, lines):
        hear(first, lines, lambda: first.texts == ["a", "a", "a"])
    ids = {request.request_id for request in gateway.pipeline.incoming}
    last = next(each.hex() for each in ids if each.hex() != first.request_id)
    found = httpx.get(f"{other.url}/v1/requests/{last}", timeout=300).json()
    assert (found["id"], found["state"]) == (f"cmpl-{first.request_id}", "running")
    assert httpx.delete(f"{other.url}/v1/requests/{last}", timeout=300).status_code == 200
    assert {request_id for request_id, _ in gateway.pipeline.cancels(3)} == ids


@pytest.mark.parametrize("num_prompts", [3, 33], ids=["with event ids", "more choices than event ids have room for"])
def test_prompts_of_which_some_have_ended_go_on_together(
    gateway: RunningGateway, second: RunningGateway, num_prompts: int
) -> None:
    """What came again comes once where events have ids, and from the start where they have none."""

    def script(request: Incoming) -> None:
        is_last = request.body.text == prompts[-1]
        rows = [request.row("a", finish=0 if is_last else STOP)]
        request.send(*rows) if is_last else request.retire(*rows)

    prompts = [f"p{index}" for index in range(num_prompts)]
    gateway.pipeline.script = script
    usage = {"include_usage": True}
    with streaming(gateway, headers=RESUMABLE, prompt=prompts, stream_options=usage) as (first, lines):
        hear(first, lines, lambda: first.texts == ["a"] * num_prompts and len(first.finishes) == num_prompts - 1)
    (last,) = [request for request in gateway.pipeline.incoming if request.body.text == prompts[-1]]
    last.row("b", finish=STOP)
    assert last.retire()
    with events(second, first) as (heard, lines):
        hear(heard, lines)
    has_ids = num_prompts == 3
    assert bool(first.last_event_id) == has_ids
    assert heard.texts == ([""] * (num_prompts - 1) + ["b"] if has_ids else ["a"] * (num_prompts - 1) + ["ab"])
    assert heard.is_done
    assert heard.usage is not None
    assert heard.usage["completion_tokens"] == num_prompts + 1


def test_a_request_waits_for_its_client_and_is_cancelled_when_the_grace_is_over(launch: Launch) -> None:
    gateway = launch(resume_grace_s=0.3)
    begun(gateway, "a")
    assert gateway.pipeline.cancels() == [(gateway.pipeline.wait_for()[0].request_id, 1)]
    eventually(lambda: gateway.service.stats.num_streams == gateway.service.stats.num_detached == 0)


def test_where_the_gateway_is_set_so_every_request_waits(launch: Launch) -> None:
    gateway = launch(resumable=True)
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["a"])
    eventually(lambda: gateway.service.stats.num_detached == 1)
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


@pytest.mark.parametrize(
    ("headers", "fields", "has_ids"),
    [
        ({}, {}, False),
        ({"x-penstock-event-ids": "false"}, {"resumable": False}, False),
        ({"x-penstock-event-ids": "true"}, {}, True),
        (RESUMABLE, {}, True),
        (KEY, {}, True),
        ({}, {"resumable": True}, True),
    ],
)
def test_events_have_ids_for_who_asks_for_them_and_for_nobody_else(
    gateway: RunningGateway, headers: dict[str, str], fields: dict[str, bool], has_ids: bool
) -> None:
    with streaming(gateway, headers=headers, **fields) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, bool(heard.last_event_id)) == (["Hello world"], has_ids)


def test_where_every_request_is_resumable_events_have_ids(launch: Launch) -> None:
    with streaming(launch(resumable=True)) as (heard, lines):
        hear(heard, lines)
    assert heard.last_event_id


def test_who_comes_back_gets_ids_though_the_first_call_asked_for_none(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway) as (first, lines):
        hear(first, lines, lambda: first.texts == ["a"])
        (request,) = gateway.pipeline.wait_for()
        request.afterwards.append(lambda: request.say("b"))
        with events(gateway, first) as (heard, rest):
            hear(heard, rest)
    assert not first.last_event_id
    assert (heard.texts, bool(heard.last_event_id)) == (["ab"], True)


def test_the_header_for_ids_says_true_or_false(http: httpx.Client) -> None:
    reply = http.post("/v1/completions", json=BODY, headers={"x-penstock-event-ids": "yes"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-penstock-event-ids")


def test_the_body_can_ask_for_it_too(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, resumable=True) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["a"])
    eventually(lambda: gateway.service.stats.num_detached == 1)


def test_a_request_that_ends_while_its_client_is_gone_is_over(gateway: RunningGateway) -> None:
    begun(gateway, "a")
    eventually(lambda: gateway.service.stats.num_detached == 1)
    gateway.pipeline.wait_for()[0].say("b")
    eventually(lambda: gateway.service.stats.num_streams == gateway.service.stats.num_detached == 0)
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


def test_who_still_follows_is_told_that_another_call_does(gateway: RunningGateway, second: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, headers=RESUMABLE) as (first, first_lines):
        hear(first, first_lines, lambda: first.texts == ["a"])
        (request,) = gateway.pipeline.wait_for()
        request.afterwards.append(lambda: request.say("b"))
        with events(second, first) as (heard, lines):
            hear(heard, lines)
        hear(first, first_lines)
    assert (first.error, first.texts, first.is_done) == ("superseded", ["a"], True)
    assert (heard.texts, heard.is_done) == (["b"], True)
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


def test_a_gateway_that_waits_for_a_client_is_told_that_it_came_back_elsewhere(
    gateway: RunningGateway, other: RunningGateway
) -> None:
    first = begun(gateway, "a")
    (request,) = gateway.pipeline.wait_for()
    eventually(lambda: gateway.service.stats.num_detached == 1)
    request.afterwards.append(lambda: request.send(request.row("b")))
    with events(other, first) as (heard, lines):
        hear(heard, lines, lambda: heard.texts == ["b"])
        eventually(lambda: gateway.service.stats.num_streams == gateway.service.stats.num_detached == 0)
        request.say("c")
        hear(heard, lines)
    assert (heard.texts, heard.is_done) == (["bc"], True)
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []


def test_back_and_forth_between_gateways(gateway: RunningGateway, other: RunningGateway) -> None:
    heard = begun(gateway, "a")
    (request,) = gateway.pipeline.wait_for()
    for turn, text in enumerate("bcde"):
        request.send(request.row(text))  # for nobody, or for who does not listen any more
        with events((other, gateway)[turn % 2], heard) as (heard, lines):
            hear(heard, lines, lambda heard=heard, text=text: heard.texts == [text])
    request.afterwards.append(lambda: request.say("f"))
    with events(other, heard) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.is_done) == (["f"], True)


def test_a_gateway_that_is_drained_leaves_its_resumable_requests_to_another(launch: Launch) -> None:
    gateway = launch()
    other = launch(gateway)
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    with streaming(gateway, headers=RESUMABLE) as (first, first_lines):
        hear(first, first_lines, lambda: first.texts == ["a"])
        gateway.stop.end()
        hear(first, first_lines)
    assert first.error == "unavailable"
    (request,) = gateway.pipeline.wait_for()
    request.afterwards.append(lambda: request.say("b"))
    with events(other, first) as (heard, lines):
        hear(heard, lines)
    assert (heard.texts, heard.is_done) == (["b"], True)
    assert gateway.pipeline.hints(gateway.bus.keys.cancels, 0) == []
