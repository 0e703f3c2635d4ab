"""Agents of open packages finish a task of several tool calls, and typed outputs are as asked for."""

import json
from collections.abc import Iterator

import pytest
from byte_tokenizer import write_byte_model
from served import Served
from test_foreign_clients import call


def made(name: str, **arguments: str) -> str:
    """A call of a function as models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWER = "Rome, by 15 degrees."
# What has been told so far says what comes next: the first line that fits a prompt counts.
SCRIPT = (
    ("it is 19 degrees there", ANSWER),
    ("they say that it is 19 degrees", made("final_answer", answer=ANSWER)),  # agents of smolagents end with a call
    ("it is 4 degrees there", made("temperature", city="Rome")),
    ("Which of Oslo and Rome", made("temperature", city="Oslo")),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint = tmp_path_factory.mktemp("agents-model")
    write_byte_model(checkpoint, vocab_size=300, max_model_len=32768, calls=True)
    script = checkpoint / "script"
    script.write_text("\n".join(json.dumps({"match": match, "answer": answer}) for match, answer in SCRIPT))
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", "--runner=simulated", "--num-blocks=8192")
    with Served(tmp_path_factory.mktemp("agents"), *flags, f"--script={script}") as served:
        yield served.wait_ready()


@pytest.mark.parametrize(
    ("package", "calls"),
    [
        ("pydantic-ai", "pydantic_ai_calls.py"),
        ("instructor", "instructor_calls.py"),
        ("langchain-openai", "langchain_tools.py"),
        ("smolagents", "smolagents_calls.py"),
    ],
)
def test_an_agent_finishes_its_task(served: Served, package: str, calls: str) -> None:
    call(package, calls, f"{served.http_url}/v1", "simulated")
