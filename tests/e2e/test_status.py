"""`penstock status`, `complete` and `chat` against a pipeline that runs."""

import subprocess
import sys

import pytest
from served import ROOT, Served, wait_until

from penstock.cli.status import is_complete


def penstock(*argv: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", *argv]
    return subprocess.run(command, cwd=ROOT, input=typed, capture_output=True, text=True, timeout=300, check=False)


def test_status_shows_services_hops_and_figures(simulated: Served) -> None:
    with simulated.client() as client:
        wait_until(lambda: is_complete(client.pipeline()), "all say that they are ready")
    shown = penstock("status", "--address", simulated.grpc_address)
    assert shown.returncode == 0, shown.stderr
    for word in ("gateway-0", "tokenizer-0", "scheduler-0", "worker-0", "detokenizer-0", "ready"):
        assert word in shown.stdout
    for word in ("prompts", "requests", "steps", "results", "tokens", "text", "wait p99", "KV blocks", "tok/s"):
        assert word in shown.stdout


def test_complete_writes_the_text_and_nothing_else(simulated: Served) -> None:
    flags = ("--address", simulated.grpc_address, "--max-tokens", "8", "--temperature", "0")
    first = penstock("complete", *flags, "abc")
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.strip()
    assert penstock("complete", *flags, typed="abc").stdout == first.stdout


def test_chat_answers_until_the_input_ends(simulated: Served) -> None:
    talked = penstock(
        "chat", "--address", simulated.grpc_address, "--max-tokens", "6", typed="hello\nand again\n/new\nhello\n"
    )
    assert talked.returncode == 0, talked.stderr
    assert talked.stdout.count("6 tokens") == 3


def test_over_http_the_same_is_answered_as_over_grpc(simulated: Served) -> None:
    flags = ("--max-tokens", "8", "--temperature", "0", "--model", simulated.model)
    ways = [("--address", simulated.grpc_address), ("--base-url", f"{simulated.http_url}/v1")]
    completions = [penstock("complete", *way, *flags, "abc") for way in ways]
    chats = [penstock("chat", *way, *flags, typed="hello\nand again\n") for way in ways]
    assert [(each.returncode, each.stderr) for each in (*completions, *chats)] == [(0, "")] * 4
    assert completions[0].stdout == completions[1].stdout
    assert completions[0].stdout.strip()
    for chat in chats:
        assert chat.stdout.startswith("simulated ")
        assert chat.stdout.count("8 tokens") == 2
    said = [[line for line in chat.stdout.splitlines() if "8 tokens" not in line] for chat in chats]
    assert said[0] == said[1]


def test_a_model_that_is_not_served_is_a_sentence_by_either_way(simulated: Served) -> None:
    for way in (("--address", simulated.grpc_address), ("--base-url", simulated.http_url)):
        answer = penstock("complete", *way, "--model", "another", "abc")
        assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (1, "", 1)
        assert "another" in answer.stderr


@pytest.mark.parametrize("command", [("status",), ("complete", "abc"), ("chat",)])
def test_without_a_pipeline_a_sentence_says_so(command: tuple[str, ...]) -> None:
    answer = penstock(*command, "--address", "127.0.0.1:1")
    assert answer.returncode == 1
    assert "the gateway cannot be reached" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_wrong_request_is_a_sentence_too(simulated: Served) -> None:
    answer = penstock("complete", "--address", simulated.grpc_address, "--temperature", "-1", "abc")
    assert answer.returncode == 1
    assert "temperature" in answer.stderr
    assert "Traceback" not in answer.stderr
