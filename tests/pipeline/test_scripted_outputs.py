"""A simulated model that answers by a script: thoughts, calls and what an agent does with them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from byte_tokenizer import write_byte_model
from in_memory import Pipeline

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the door"}}\n</tool_call>'
ANSWERS = (
    ("it is shut", "The door is shut."),
    ("see to the door", f"<think>\nI must look.\n</think>\n\nA moment.\n{CALL}"),
    ("twice", f"{CALL}\n{CALL}"),
    ("hurried", "Answer at once.</think>\n\nYes."),
    ("broken", '<tool_call>\n{"name": look}\n</tool_call>'),
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    checkpoint = tmp_path_factory.mktemp("scripted")
    write_byte_model(checkpoint, vocab_size=300, max_model_len=2048, calls=True)
    script = checkpoint / "script.jsonl"
    script.write_text("\n".join(json.dumps({"match": match, "answer": answer}) for match, answer in ANSWERS))
    worker = {"runner": "simulated", "num_blocks": 1024, "step_ms": 0.2, "script": script}
    with Pipeline(checkpoint, worker=worker, gateway={"served_model_name": ("scripted",)}) as pipeline:
        yield pipeline


def ask(pipeline: Pipeline, *messages: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    told = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    body = {"messages": told, "tools": TOOLS, **fields}
    url = f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/chat/completions"
    reply = httpx.post(url, json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_an_agent_calls_and_goes_on_with_what_it_was_told(pipeline: Pipeline) -> None:
    reply = ask(pipeline, "see to the door")
    (choice,) = reply["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("I must look.", "A moment.")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": "the door"}'}
    assert choice["finish_reason"] == "tool_calls"
    thought = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert thought == len("\nI must look.\n") + 2  # a token for each byte, and one for each mark
    result = {"role": "tool", "tool_call_id": call["id"], "content": "it is shut"}
    again = ask(pipeline, "see to the door", message, result)["choices"][0]
    assert (again["message"]["content"], again["finish_reason"]) == ("The door is shut.", "stop")


def test_several_calls_are_told_unless_one_is_to_stay_alone(pipeline: Pipeline) -> None:
    assert len(ask(pipeline, "twice")["choices"][0]["message"]["tool_calls"]) == 2
    (choice,) = ask(pipeline, "twice", parallel_tool_calls=False)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


def test_a_thought_that_the_template_opened_is_one(pipeline: Pipeline) -> None:
    (choice,) = ask(pipeline, "hurried", chat_template_kwargs={"enable_thinking": True})["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Answer at once.", "Yes.")


def test_what_is_no_call_is_content(pipeline: Pipeline) -> None:
    (choice,) = ask(pipeline, "broken")["choices"]
    assert choice["message"]["content"] == ANSWERS[-1][1]
    assert choice["finish_reason"] == "stop"


def test_who_is_in_no_line_gets_what_is_drawn(pipeline: Pipeline) -> None:
    (choice,) = ask(pipeline, "something else", max_tokens=5)["choices"]
    assert choice["finish_reason"] == "length"
