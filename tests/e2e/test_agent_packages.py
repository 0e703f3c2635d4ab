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


FINAL = "Rome, by 15 degrees."
FINAL_CALL = made("final_answer", answer=FINAL)


def script(final: str) -> str:
    """What has been told so far says what comes next: the first line that fits a prompt counts."""
    lines = (
        ("it is 19 degrees there", final),
        ("it is 4 degrees there", made("temperature", city="Rome")),
        ("Which of Oslo and Rome", made("temperature", city="Oslo")),
    )
    return "\n".join(json.dumps({"match": match, "answer": answer}) for match, answer in lines)


@pytest.fixture(scope="module", params=[FINAL, FINAL_CALL], ids=["says", "calls"])
def final(request: pytest.FixtureRequest) -> str:
    """How the model ends: it says the answer, or it calls the function that smolagents has for that."""
    said: str = request.param
    return said


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, final: str) -> Iterator[Served]:
    checkpoint = tmp_path_factory.mktemp("agents-model")
    write_byte_model(checkpoint, vocab_size=300, max_model_len=32768, calls=True)
    path = checkpoint / "script"
    path.write_text(script(final))
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", "--runner=simulated", "--num-blocks=8192")
    with Served(tmp_path_factory.mktemp("agents"), *flags, f"--script={path}") as served:
        yield served.wait_ready()


@pytest.mark.parametrize(
    ("package", "calls", "ending"),
    [
        ("pydantic-ai", "pydantic_ai_calls.py", FINAL),
        ("instructor", "instructor_calls.py", FINAL),
        ("langchain-openai", "langchain_tools.py", FINAL),
        ("smolagents", "smolagents_calls.py", FINAL_CALL),
    ],
)
def test_an_agent_finishes_its_task(served: Served, final: str, package: str, calls: str, ending: str) -> None:
    if final != ending:
        pytest.skip("this package's agents end otherwise")
    call(package, calls, f"{served.http_url}/v1", "simulated")
