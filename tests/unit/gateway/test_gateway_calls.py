"""Calls of functions and thoughts, as a gateway tells of them: plain, as a stream, and after every event again."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from running_gateway import RunningGateway
from scripted_pipeline import LENGTH, STOP, Incoming
from told_chats import ASKED, FACTS, ROWS, TOOLS, Choice, of_message, put_together

from contract.domain.rows import TokenLogprob

Launch = Callable[..., RunningGateway]
IDS = {"x-penstock-event-ids": "true"}


@pytest.fixture
def gateway(launch: Launch) -> RunningGateway:
    return launch(chat=FACTS)


def say(request: Incoming, rows: tuple[tuple[str, list[int]], ...] = ROWS) -> None:
    for number, (text, ids) in enumerate(rows):
        request.send(request.row(text, ids, finish=STOP if number == len(rows) - 1 else 0))


def post(gateway: RunningGateway, **fields: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=ASKED | fields, timeout=300)


def heard(gateway: RunningGateway, **fields: Any) -> tuple[str, list[str]]:
    """The id of a streamed call, and its lines."""
    body = ASKED | {"stream": True, "stream_options": {"include_usage": True}} | fields
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, headers=IDS, timeout=300) as reply:
        assert reply.status_code == 200, reply.read()
        return reply.headers["x-penstock-request-id"], list(reply.iter_lines())


def test_calls_and_thoughts_stand_apart_in_a_plain_reply(gateway: RunningGateway) -> None:
    gateway.pipeline.script = say
    reply = post(gateway).json()
    (choice,) = reply["choices"]
    told = of_message(choice)
    assert (told.reasoning, told.content, told.finish) == ("let me see", "I look.", "tool_calls")
    assert [(each["name"], each["arguments"]) for each in told.calls] == [("look", '{"at": "a <b>"}'), ("look", "{}")]
    assert len({each["id"] for each in told.calls}) == 2
    assert choice["stop_reason"] is None
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    (request,) = gateway.pipeline.incoming
    assert request.body.text_options.skip_special_tokens is False
    kwargs = json.loads(request.body.messages.template_kwargs_json)
    assert (kwargs["tools"], list(request.body.messages.required_variables)) == (TOOLS, ["tools"])


def test_without_content_it_is_null(gateway: RunningGateway) -> None:
    rows = (('<tool_call>{"name": "look", "arguments": {}}</tool_call>', [1]),)
    gateway.pipeline.script = lambda request: say(request, rows)
    (choice,) = post(gateway).json()["choices"]
    assert choice["message"]["content"] is None
    assert [each["function"]["name"] for each in choice["message"]["tool_calls"]] == ["look"]


@pytest.mark.parametrize("num_at_once", [1, 2, 5, len(ROWS)])
def test_a_stream_says_the_same_however_rows_are_cut(gateway: RunningGateway, num_at_once: int) -> None:
    def script(request: Incoming) -> None:
        parts = [ROWS[start : start + num_at_once] for start in range(0, len(ROWS), num_at_once)]
        for number, part in enumerate(parts):
            text, ids = "".join(each for each, _ in part), [token for _, more in part for token in more]
            request.send(request.row(text, ids, finish=STOP if number == len(parts) - 1 else 0))

    gateway.pipeline.script = script
    _, lines = heard(gateway)
    told, _, usage = put_together(lines)
    gateway.pipeline.script = say
    whole = of_message(post(gateway).json()["choices"][0])
    calls = [{**each, "id": ""} for each in told.calls]
    assert (told.reasoning, told.content, told.finish) == (whole.reasoning, whole.content, whole.finish)
    assert calls == [{**each, "id": ""} for each in whole.calls]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 6}


@pytest.mark.parametrize("fields", [{}, {"stream_interval": 4}])
@pytest.mark.parametrize("through_the_same", [True, False])
def test_a_stream_goes_on_after_any_of_its_events(
    launch: Launch, through_the_same: bool, fields: dict[str, Any]
) -> None:
    gateway = launch(chat=FACTS)
    other = gateway if through_the_same else launch(gateway)
    gateway.pipeline.script = say
    request_id, lines = heard(gateway, **fields)
    (request,) = gateway.pipeline.incoming
    whole, _, usage = put_together(lines)
    assert len(whole.calls) == 2
    ends = [number for number, line in enumerate(lines) if line == ""]
    gateway.pipeline.follows = True
    for end in (*ends[:-3], None, *ends[:-1]):
        if end is None:  # from here on its result is told
            assert request.retire()
            continue
        told, ids, _ = put_together(lines[: end + 1])
        headers = {"last-event-id": ids[-1]} if ids[-1] else {}
        again = httpx.get(f"{other.url}/v1/requests/{request_id}/events", headers=headers, timeout=300)
        assert again.status_code == 200
        told, _, usage_again = put_together(again.text.splitlines(), told if ids[-1] else Choice())
        assert told == whole
        assert usage_again == usage


def test_a_stream_that_goes_on_is_read_from_its_start(launch: Launch) -> None:
    gateway = launch(chat=FACTS)
    other = launch(gateway)
    gateway.pipeline.script = lambda request: [request.send(request.row(*row)) for row in ROWS[:9]] and None
    body = ASKED | {"stream": True, "resumable": True}
    lines: list[str] = []
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=300) as reply:
        request_id = reply.headers["x-penstock-request-id"]
        for line in reply.iter_lines():
            lines.append(line)
            if '"name":"look"' in line:
                break
    told, ids, _ = put_together(lines)
    (request,) = gateway.pipeline.incoming
    gateway.pipeline.follows = True

    def rest() -> None:
        for number, row in enumerate(ROWS[9:], 10):
            request.send(request.row(*row, finish=LENGTH if number == len(ROWS) else 0))

    request.afterwards.append(rest)
    headers = {"last-event-id": ids[-1]}
    again = httpx.get(f"{other.url}/v1/requests/{request_id}/events", headers=headers, timeout=300)
    told, _, _ = put_together(again.text.splitlines(), told)
    assert (told.reasoning, told.content, told.finish) == ("let me see", "I look.", "length")
    assert [each["arguments"] for each in told.calls] == ['{"at": "a <b>"}', "{}"]
    attached = gateway.pipeline.attaches()
    assert attached[0].token_offsets == bytes(4)


def test_samples_go_on_each_where_it_was(launch: Launch) -> None:
    gateway = launch(chat=FACTS)
    other = launch(gateway)

    def script(request: Incoming) -> None:
        for number, (text, ids) in enumerate(ROWS):
            request.send(request.row(text, ids, finish=STOP if number == len(ROWS) - 1 else 0))
        request.send(*(request.row(text, ids, sequence=1) for text, ids in ROWS[:4]))

    gateway.pipeline.script = script
    body = ASKED | {"stream": True, "resumable": True, "n": 2, "stream_options": {"include_usage": True}}
    lines: list[str] = []
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=300) as reply:
        request_id = reply.headers["x-penstock-request-id"]
        for line in reply.iter_lines():
            lines.append(line)
            if '"index":1' in line and '" see"' in line:
                break
    (request,) = gateway.pipeline.incoming
    gateway.pipeline.follows = True

    def rest() -> None:
        for number, (text, ids) in enumerate(ROWS[4:], 5):
            request.send(request.row(text, ids, sequence=1, finish=STOP if number == len(ROWS) else 0))

    request.afterwards.append(rest)
    ids = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]
    headers = {"last-event-id": ids[-1]}
    again = httpx.get(f"{other.url}/v1/requests/{request_id}/events", headers=headers, timeout=300).text.splitlines()
    choices, usage = [Choice(), Choice()], {}
    for line in (*lines, *again):
        if line.startswith("data: {"):
            chunk = json.loads(line[6:])
            usage = chunk["usage"] or usage
            for each in chunk["choices"]:
                choices[each["index"]].add(each)
    assert choices[0].finish == choices[1].finish == "tool_calls"
    assert [each.content for each in choices] == ["I look."] * 2
    assert [each.reasoning for each in choices] == ["let me see"] * 2
    ids_of_calls = {call["id"] for each in choices for call in each.calls}
    assert len(ids_of_calls) == 4
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 12}


def test_an_id_of_another_history_ends_a_stream(launch: Launch) -> None:
    gateway = launch(chat=FACTS)
    gateway.pipeline.script = say
    first, lines = heard(gateway)
    _, ids, _ = put_together(lines)
    gateway.pipeline.script = lambda request: say(request, tuple((text, [*more, 77]) for text, more in ROWS))
    heard(gateway)
    one, two = gateway.pipeline.incoming
    one.spoken = two.spoken  # as if the server had lost what the client has
    gateway.pipeline.follows = True
    headers = {"last-event-id": ids[4]}
    again = httpx.get(f"{gateway.url}/v1/requests/{first}/events", headers=headers, timeout=300)
    assert "stream_diverged" in again.text


def test_a_thought_may_be_left_out(gateway: RunningGateway) -> None:
    gateway.pipeline.script = say
    reply = post(gateway, include_reasoning=False).json()
    message = reply["choices"][0]["message"]
    assert "reasoning" not in message
    assert message["content"] == "I look."
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    told, _, _ = put_together(heard(gateway, include_reasoning=False)[1])
    assert told.reasoning == ""
    assert told.content == "I look."


def test_an_output_begins_in_a_thought_where_the_template_opens_it(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: say(request, (("hm</think>", [1, 900]), ("\nyes", [3])))
    for fields, told in (
        ({"chat_template_kwargs": {"enable_thinking": True}}, ("hm", "yes")),
        ({}, (None, "hm</think>\nyes")),
    ):
        message = post(gateway, **fields).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == told


def test_logprobs_are_told_with_every_token(gateway: RunningGateway) -> None:
    def script(request: Incoming) -> None:
        for number, (text, ids) in enumerate(ROWS):
            told = [TokenLogprob(each, -0.5, token_bytes=b"t") for each in ids]
            request.send(request.row(text, ids, logprobs=told, finish=STOP if number == len(ROWS) - 1 else 0))

    gateway.pipeline.script = script
    num_tokens = sum(len(ids) for _, ids in ROWS)
    (choice,) = post(gateway, logprobs=True).json()["choices"]
    assert len(choice["logprobs"]["content"]) == num_tokens
    told, count = Choice(), 0
    for line in heard(gateway, logprobs=True)[1]:
        if line.startswith("data: {"):
            for each in json.loads(line[6:])["choices"]:
                told.add(each)
                count += len((each["logprobs"] or {"content": []})["content"])
    assert count == num_tokens
    assert (told.reasoning, told.content, len(told.calls)) == ("let me see", "I look.", 2)


def test_tools_that_are_not_to_be_called_are_not_shown(gateway: RunningGateway) -> None:
    gateway.pipeline.script = say
    (choice,) = post(gateway, tool_choice="none").json()["choices"]
    assert "<tool_call>" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    (request,) = gateway.pipeline.incoming
    assert request.body.messages.template_kwargs_json == ""


@pytest.mark.parametrize(
    ("settings", "fields", "param"),
    [
        ({"tool_format": "none"}, {}, "tools"),
        ({"tool_format": "pythonic"}, {"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "a", "parameters": {"properties": {"a-b": {}}}}}]}, "tools"),
        ({}, {"tool_choice": "sometimes"}, "tool_choice"),
        ({}, {"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({}, {"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({}, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({}, {"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({}, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({}, {"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]},
         "tools[0].function.parameters"),
        ({}, {"tool_choice": "required", "response_format": {"type": "json_object"}}, "tools"),
        ({}, {"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(
    launch: Launch, settings: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    reply = post(launch(chat=FACTS, **settings), **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_thoughts_are_content_where_the_operator_says_so(launch: Launch) -> None:
    gateway = launch(chat=FACTS, reasoning_format="none")
    gateway.pipeline.script = lambda request: say(request, (("<think>a</think>b", [1]),))
    message = post(gateway, tools=None).json()["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"
    assert "reasoning" not in message
