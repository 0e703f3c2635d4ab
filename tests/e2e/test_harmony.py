"""A model that answers in messages on channels, as gpt-oss does, through the real `openai` package and deaths."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import openai
import pytest
from byte_tokenizer import write_harmony_model
from served import CALM_LEASES, SIMULATED, TWO_GATEWAYS, Served, is_ready, is_running, wait_until

from contract.domain.errors import PenstockError
from penstock.client import AsyncClient, ChatChoice, ChatReply, Client, Delta, resumption
from penstock.v1 import inference_pb2, inference_pb2_grpc, requests_pb2

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": PLACE, "strict": True}}]
PLAIN = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": False}}]
THOUGHT = "they ask for the weather, " * 20
LONG_THOUGHT = THOUGHT * 4  # a gateway that stands still for a second is not told all of it at once
CALLING = (
    f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
    '<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", '
    '"days": 3}<|call|>'
)
ANSWERING = "<|channel|>analysis<|message|>12 it is<|end|><|start|>assistant<|channel|>final<|message|>It is warm."
SCRIPT = [
    {"match": "12 degrees", "answer": ANSWERING},
    {"match": "how warm", "answer": CALLING},
    {"match": "how hot", "answer": CALLING.replace(THOUGHT, LONG_THOUGHT)},
]
CHAT: list[Any] = [{"role": "user", "content": "how warm is it?"}]
LONG_CHAT: list[Any] = [{"role": "user", "content": "how hot is it?"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint = tmp_path_factory.mktemp("harmony-model")
    write_harmony_model(checkpoint, max_model_len=8192)
    script = checkpoint / "script"
    script.write_text("\n".join(map(json.dumps, SCRIPT)))
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", *TWO_GATEWAYS, "--step-ms=2", *SIMULATED)
    flags += (CALM_LEASES, f"--script={script}")
    with Served(tmp_path_factory.mktemp("harmony"), *flags) as served:
        yield served.wait_ready()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http_urls[1]}/v1", api_key="none", max_retries=0, timeout=900) as client:
        yield client


def test_a_task_is_done_in_thoughts_a_call_and_an_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "simulated", "tools": TOOLS[:1], "reasoning_effort": "high"}
    reply = client.chat.completions.create(messages=CHAT, **{**asked, "tools": PLAIN})
    (choice,), usage = reply.choices, reply.usage
    message: Any = choice.message
    assert (message.reasoning, message.content, choice.finish_reason) == (THOUGHT, "I look.", "tool_calls")
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo", "days": 3})
    assert usage is not None
    assert usage.completion_tokens_details is not None
    # A token for each mark and each byte, from the first header to the mark that ends the thought.
    assert usage.completion_tokens_details.reasoning_tokens == len("analysis" + THOUGHT) + 3
    told = {**message.to_dict(), "reasoning": message.reasoning}  # what it said and thought, and a call: all goes back
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    last: Any = client.chat.completions.create(messages=[*CHAT, told, result], **{**asked, "tools": PLAIN}).choices[0]
    assert (last.message.content, last.message.reasoning, last.finish_reason) == ("It is warm.", "12 it is", "stop")


def test_a_call_that_is_required_comes_after_a_thought_or_at_once(client: openai.OpenAI) -> None:
    for seed in range(3):
        said: list[Any] = [{"role": "user", "content": "hello"}]
        (choice,) = client.chat.completions.create(
            model="simulated", messages=said, tools=TOOLS, tool_choice="required", seed=seed, max_tokens=4000
        ).choices
        if choice.finish_reason == "tool_calls":
            (call,) = choice.message.tool_calls or []
            found = json.loads(call.function.arguments)  # type: ignore[union-attr]
            assert found["city"] in ("Oslo", "Rome")
            assert choice.message.content is None


@pytest.mark.parametrize("form", [{"json": PLACE}, {"choice": ["yes", "no"]}])
def test_an_answer_has_its_form(client: openai.OpenAI, form: dict[str, Any]) -> None:
    (choice,) = client.chat.completions.create(
        model="simulated",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4000,
        seed=1,
        extra_body={"structured_outputs": form},
    ).choices
    assert choice.finish_reason == "stop"
    content = choice.message.content or ""
    assert content in ("yes", "no") or json.loads(content)["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "structured_outputs"),
        ({"tools": TOOLS, "extra_body": {"add_generation_prompt": False}}, "add_generation_prompt"),
    ],
)
def test_what_is_not_done_is_refused(client: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="simulated", messages=CHAT, **more)
    assert refused.value.param == param


def test_agents_apis_have_it_too(served: Served) -> None:
    url, plain = served.http_urls[0], {"name": "weather", "parameters": PLACE}
    body: dict[str, Any] = {"model": "simulated", "input": "how warm is it?", "tools": [{"type": "function", **plain}]}
    output = httpx.post(f"{url}/v1/responses", json=body, timeout=300).json()["output"]
    assert [each["type"] for each in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"][0]["text"] == THOUGHT
    body = {"model": "simulated", "messages": CHAT, "max_tokens": 2000}
    body["tools"] = [{"name": "weather", "input_schema": PLACE}]
    message = httpx.post(f"{url}/v1/messages", json=body, timeout=300).json()
    assert [each["type"] for each in message["content"]] == ["thinking", "text", "tool_use"]
    assert (message["content"][2]["input"], message["stop_reason"]) == ({"city": "Oslo", "days": 3}, "tool_use")


def test_grpc_clients_have_it_too(served: Served) -> None:
    with served.client() as client:
        reply = client.chat(CHAT, tools=PLAIN, chat_template_kwargs={"reasoning_effort": "low"})
        (choice,) = reply.choices
        assert (choice.reasoning, choice.content, choice.finish_reason) == (THOUGHT, "I look.", "tool_calls")
        assert choice.num_reasoning_tokens == len("analysis" + THOUGHT) + 3
        (call,) = choice.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo", "days": 3})
        result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
        last = client.chat([*CHAT, reply.message, result], tools=PLAIN).choices[0]
        assert (last.content, last.reasoning, last.finish_reason) == ("It is warm.", "12 it is", "stop")
        quiet = client.chat(CHAT, tools=PLAIN, include_reasoning=False).choices[0]
        assert (quiet.reasoning, quiet.content) == ("", "I look.")
        said: list[Any] = [{"role": "user", "content": "hello"}]
        forced = client.chat(said, {"seed": 2, "max_tokens": 4000}, tools=TOOLS, tool_choice="required").choices[0]
        if forced.finish_reason == "tool_calls":
            assert json.loads(forced.tool_calls[0].arguments)["city"] in ("Oslo", "Rome")
        raw = client.complete(messages=CHAT)
        assert "analysis" in raw.text
        for wrong, param in (
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
            ({"tools": [{"type": "x"}]}, "tools[0]"),
        ):
            with pytest.raises(PenstockError) as refused:
                client.chat(CHAT, **wrong)  # type: ignore[arg-type]
            assert refused.value.param == param
        with pytest.raises(TypeError):
            client.chat(CHAT, tols=PLAIN)  # type: ignore[call-arg]


def test_the_client_for_coroutines_has_it_too(served: Served) -> None:
    async def ask() -> ChatReply:
        async with AsyncClient(served.grpc_address) as client:
            return await client.chat(CHAT, tools=PLAIN)

    (choice,) = asyncio.run(ask()).choices
    assert (choice.reasoning, choice.content, choice.tool_calls[0].name) == (THOUGHT, "I look.", "weather")


def test_turns_have_fields_of_their_own_over_grpc(served: Served) -> None:
    turns = requests_pb2.ChatMessages(
        messages=[
            requests_pb2.ChatMessage(role="user", content="how warm is it?"),
            requests_pb2.ChatMessage(
                role="assistant",
                reasoning="hm",
                tool_calls=[requests_pb2.ToolCall(id="call_1", name="weather", arguments='{"city": "Oslo"}')],
            ),
            requests_pb2.ChatMessage(role="tool", content="12 degrees", tool_call_id="call_1"),
        ]
    )
    tool = inference_pb2.Tool(name="weather", description="of a city", parameters_json=json.dumps(PLACE))
    call = inference_pb2.GenerateCall(
        request=requests_pb2.GenerateRequest(messages=turns), chat=inference_pb2.ChatOutput(tools=[tool])
    )
    with grpc.insecure_channel(served.grpc_address) as channel:
        events = list(inference_pb2_grpc.InferenceStub(channel).Generate(call, timeout=300))
    assert "".join(each.delta.chat.content for each in events) == "It is warm."
    assert "".join(each.delta.chat.reasoning for each in events) == "12 it is"


def test_a_grpc_stream_goes_on_through_another_gateway(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "PATIENCE_S", 300.0)  # nothing comes until one of both is started again
    wait_until(lambda: all(is_ready(url) for url in served.http_urls), "ready")
    place, choice = 0, ChatChoice()
    with Client(",".join(served.grpc_addresses), timeout_s=900) as client:
        # Whichever of the two it is at dies at last.
        for event in client.stream_chat(LONG_CHAT, tools=PLAIN, resumable=True):
            if isinstance(event, Delta):
                choice.extend(event)
            if len(choice.reasoning) > 60 and not place:
                place = len(choice.reasoning)
                for name in ("gateway-0", "gateway-1"):
                    pid = served.pids()[name]
                    os.kill(pid, signal.SIGKILL)
                    wait_until(lambda pid=pid: not is_running(pid), "dead")  # type: ignore[misc]
    assert 60 < place < len(LONG_THOUGHT)
    assert (choice.reasoning, choice.content, choice.finish_reason) == (LONG_THOUGHT, "I look.", "tool_calls")
    assert json.loads(choice.tool_calls[0].arguments) == {"city": "Oslo", "days": 3}


class Heard:
    """All that a client was told of a choice."""

    def __init__(self) -> None:
        self.thought = self.content = self.arguments = self.finish = self.event_id = ""

    def read(self, lines: Iterator[str], most: int = 1 << 30) -> "Heard":
        event_id = ""
        for line in lines:
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data" and value != "[DONE]":
                for choice in json.loads(value)["choices"]:
                    delta = choice["delta"]
                    self.thought += delta.get("reasoning") or ""
                    self.content += delta.get("content") or ""
                    self.arguments += "".join(each["function"]["arguments"] for each in delta.get("tool_calls", ()))
                    self.finish = choice["finish_reason"] or self.finish
                self.event_id = event_id
            if len(self.thought) > most:
                break
        return self


def test_a_stream_goes_on_through_another_gateway(served: Served) -> None:
    first_url, second_url = served.http_urls
    # The test before may have killed both, and is over when one of them has told the rest.
    wait_until(lambda: all(is_ready(url) for url in served.http_urls), "ready")
    body = {"model": "simulated", "messages": LONG_CHAT, "tools": PLAIN, "stream": True}
    headers, pid = {"x-penstock-resumable": "true"}, served.pids()["gateway-0"]
    with httpx.stream("POST", f"{first_url}/v1/chat/completions", json=body, headers=headers, timeout=300) as reply:
        request_id = reply.headers["x-penstock-request-id"]
        heard = Heard().read(reply.iter_lines(), 60)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "dead")
    assert 60 < len(heard.thought) < len(LONG_THOUGHT)
    url, given = f"{second_url}/v1/requests/{request_id}/events", {"last-event-id": heard.event_id}
    with httpx.stream("GET", url, headers=given, timeout=300) as reply:
        heard.read(reply.iter_lines())
    assert (heard.thought, heard.content, heard.finish) == (LONG_THOUGHT, "I look.", "tool_calls")
    assert json.loads(heard.arguments) == {"city": "Oslo", "days": 3}
