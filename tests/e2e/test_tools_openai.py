"""Calls of functions as the real `openai` package asks for them, through the death of a gateway too."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from byte_tokenizer import write_byte_model
from served import CALM_LEASES, SIMULATED, TWO_GATEWAYS, Served, is_running, wait_until

CHAT: list[Any] = [{"role": "user", "content": "how warm is it?"}]
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NUMBERS = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 150, "maxItems": 200}},
    "required": ["numbers"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any], **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters, **more}}


TOOLS = [tool("weather", PLACE), tool("count", NUMBERS)]
THOUGHT = "now here, now there, " * 20
ANSWER = (
    f'<think>\n{THOUGHT}\n</think>\n\nSo be it.\n<tool_call>{{"name": "go", "arguments": {{"to": "fro"}}}}</tool_call>'
)
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint = tmp_path_factory.mktemp("calling-model")
    write_byte_model(checkpoint, vocab_size=300, max_model_len=8192, calls=True)
    script = checkpoint / "script"
    script.write_text(json.dumps({"match": "to and fro", "answer": ANSWER}))
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", *TWO_GATEWAYS, "--step-ms=2", *SIMULATED)
    flags += (CALM_LEASES, f"--script={script}")
    with Served(tmp_path_factory.mktemp("tools"), *flags) as served:
        yield served.wait_ready()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http_urls[1]}/v1", api_key="none", max_retries=0, timeout=900) as client:
        yield client


def check(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "weather":
        assert found.keys() == {"city", "days"}
        assert found["city"] in ("Oslo", "Rome")
        assert 1 <= found["days"] <= 9
    else:
        assert (name, 150 <= len(found["numbers"]) <= 200) == ("count", True)


def test_a_call_that_is_required_comes_with_right_arguments(client: openai.OpenAI) -> None:
    counts = set()
    for seed in range(4):
        reply = client.chat.completions.create(
            model="simulated", messages=CHAT, tools=TOOLS[:1], tool_choice="required", seed=seed
        )
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        calls: list[Any] = choice.message.tool_calls or []
        for call in calls:
            check(call.function.name, call.function.arguments)
        assert len({call.id for call in calls}) == len(calls) > 0
        counts.add(len(calls))
    assert len(counts) > 1


@pytest.mark.parametrize("more", [{"tool_choice": NAMED}, {"tool_choice": "required", "parallel_tool_calls": False}])
def test_one_call_stays_alone(client: openai.OpenAI, more: dict[str, Any]) -> None:
    for seed in range(3):
        reply = client.chat.completions.create(
            model="simulated", messages=CHAT, tools=[TOOLS[0], tool("rest", {})], seed=seed, max_tokens=2000, **more
        )
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name in ("weather", "rest")
        json.loads(call.function.arguments)
        assert more["tool_choice"] != NAMED or call.function.name == "weather"


def test_a_stream_is_put_together_as_it_comes(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "simulated", "messages": CHAT, "tools": TOOLS[:1], "tool_choice": "required"}
    whole = client.chat.completions.create(**asked, seed=7).choices[0]
    with client.chat.completions.stream(**asked, seed=7) as stream:
        events = [event.type for event in stream]
        told = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events
    assert told.finish_reason == whole.finish_reason == "tool_calls"
    calls: list[Any] = whole.message.tool_calls or []
    assert [(each.function.name, each.function.arguments) for each in told.message.tool_calls or []] == [
        (each.function.name, each.function.arguments) for each in calls
    ]


def test_what_was_called_goes_back_to_the_template(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "simulated", "tools": TOOLS[:1], "tool_choice": NAMED}
    message = client.chat.completions.create(messages=CHAT, **asked).choices[0].message
    (call,) = message.tool_calls or []
    told: Any = message.to_dict()
    answer = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    again = client.chat.completions.create(messages=[*CHAT, told, answer], **asked)
    assert again.choices[0].finish_reason == "tool_calls"


def test_arguments_are_right_where_the_function_is_strict(client: openai.OpenAI) -> None:
    strict = [tool("weather", PLACE, strict=True)]
    for seed in range(4):
        reply = client.chat.completions.create(
            model="simulated", messages=CHAT, tools=strict, seed=seed, max_tokens=800
        )
        for call in reply.choices[0].message.tool_calls or []:
            if reply.choices[0].finish_reason == "tool_calls":
                check(call.function.name, call.function.arguments)  # type: ignore[union-attr]


def test_thoughts_are_told_apart_and_counted(client: openai.OpenAI) -> None:
    for seed in range(3):
        reply = client.chat.completions.create(
            model="simulated",
            messages=CHAT,
            tools=TOOLS[:1],
            tool_choice=NAMED,
            seed=seed,
            max_tokens=3000,
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        )
        (choice,), usage = reply.choices, reply.usage
        assert usage is not None
        assert usage.completion_tokens_details is not None
        thought: str = choice.message.reasoning  # type: ignore[attr-defined]
        num_thinking = usage.completion_tokens_details.reasoning_tokens or 0
        assert 0 < num_thinking <= usage.completion_tokens
        if choice.finish_reason == "tool_calls":
            assert num_thinking < usage.completion_tokens
            assert len(choice.message.tool_calls or []) == 1
        assert "</think>" not in thought


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [tool("f", {"type": "object", "properties": {"a": {"not": {}}}})], "tool_choice": "required"},
         "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_the_callers_fault(client: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="simulated", messages=CHAT, **more)
    assert refused.value.param == param


def test_a_chat_with_tools_is_rendered_as_it_is_answered(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": "required"}
    with httpx.Client(base_url=served.http_url, timeout=180) as http:
        rendered = http.post("/v1/chat/completions/render", json=body).json()
        usage = http.post("/v1/chat/completions", json=body | {"max_tokens": 4}).json()["usage"]
    assert len(rendered["token_ids"]) == usage["prompt_tokens"]


def test_a_template_without_tools_refuses_them(simulated: Served) -> None:
    body = {"model": "simulated", "messages": CHAT, "tools": TOOLS[:1]}
    reply = httpx.post(f"{simulated.http_url}/v1/chat/completions", json=body, timeout=300)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("victim", ["worker-0", "detokenizer-0"])
def test_an_agent_hears_a_scripted_answer_through_a_death(served: Served, client: openai.OpenAI, victim: str) -> None:
    thought = content = arguments = finish = ""
    asked: list[Any] = [{"role": "user", "content": "to and fro"}]
    stream = client.chat.completions.create(model="simulated", messages=asked, tools=[tool("go", {})], stream=True)
    is_killed = False
    for chunk in stream:
        (choice,) = chunk.choices
        told = choice.delta.to_dict()
        thought += str(told.get("reasoning", ""))
        content += choice.delta.content or ""
        arguments += "".join(each.function.arguments or "" for each in choice.delta.tool_calls or () if each.function)
        finish = choice.finish_reason or finish
        if not is_killed and len(thought) > 60:
            os.kill(served.pids()[victim], signal.SIGKILL)
            is_killed = True
    assert is_killed
    assert (thought, content, arguments) == (THOUGHT.strip(), "So be it.", '{"to": "fro"}')
    assert finish == "tool_calls"


class Heard:
    """The events of one choice that a client has."""

    def __init__(self) -> None:
        self.calls: list[dict[str, str]] = []
        self.finish = self.last_event_id = ""
        self.usage: dict[str, Any] = {}

    @property
    def num_chars(self) -> int:
        return sum(len(each["arguments"]) for each in self.calls)

    def read(self, lines: Iterator[str], most: int = 1 << 30) -> None:
        event_id = ""
        for line in lines:
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data" and value != "[DONE]":
                chunk = json.loads(value)
                assert "error" not in chunk, chunk
                self.usage = chunk.get("usage") or self.usage
                for choice in chunk["choices"]:
                    self.finish = choice["finish_reason"] or self.finish
                    for call in choice["delta"].get("tool_calls", ()):
                        if "id" in call:
                            self.calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                        self.calls[call["index"]]["arguments"] += call["function"]["arguments"]
                self.last_event_id = event_id
            if self.num_chars > most:
                return


def test_a_gateway_that_dies_takes_no_call_along(served: Served) -> None:
    first_url, second_url = served.http_urls
    body: dict[str, Any] = {"model": "simulated", "messages": CHAT, "tools": [TOOLS[1]], "stream": True, "seed": 3}
    body |= {"tool_choice": {"type": "function", "function": {"name": "count"}}}
    body |= {"stream_options": {"include_usage": True}}
    heard, undisturbed = Heard(), Heard()
    with httpx.stream("POST", f"{second_url}/v1/chat/completions", json=body, timeout=300) as reply:
        undisturbed.read(reply.iter_lines())
    pid = served.pids()["gateway-0"]
    headers = {"x-penstock-resumable": "true"}
    with httpx.stream("POST", f"{first_url}/v1/chat/completions", json=body, headers=headers, timeout=300) as reply:
        request_id = reply.headers["x-penstock-request-id"]
        heard.read(reply.iter_lines(), 60)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "dead")
    assert not heard.finish
    assert 60 < heard.num_chars < undisturbed.num_chars
    url, given = f"{second_url}/v1/requests/{request_id}/events", {"last-event-id": heard.last_event_id}
    with httpx.stream("GET", url, headers=given, timeout=300) as reply:
        heard.read(reply.iter_lines())
    assert [{**each, "id": ""} for each in heard.calls] == [{**each, "id": ""} for each in undisturbed.calls]
    assert (heard.finish, heard.usage["completion_tokens"]) == ("tool_calls", undisturbed.usage["completion_tokens"])
    (stored,) = httpx.get(f"{second_url}/v1/requests/{request_id}", timeout=300).json()["reply"]["choices"]
    assert stored["message"]["tool_calls"][0]["id"] == heard.calls[0]["id"]
