"""`/tokenize`, `/detokenize` and `/v1/chat/completions/render` of real pipeline, and a tokenizer killed meanwhile."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import CALM_LEASES, EOS, SIMULATED, Served, expected, wait_until

from contract.domain.errors import ErrorCode, PenstockError
from penstock import Client

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
RENDERED = "user: hi\nassistant:"


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", "--tokenizers=2", "--step-ms=5", *SIMULATED)
    flags += (CALM_LEASES,)  # while one tokenizer is started again, the other one's must not run out
    with Served(tmp_path_factory.mktemp("vocabulary"), *flags) as served:
        yield served.wait_ready()


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.http_url, timeout=300) as client:
        yield client


def answer(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_tokens_of_a_text_are_those_that_become_it_again(http: httpx.Client) -> None:
    found = answer(http, "/tokenize", prompt="hi é", return_token_strs=True)
    assert (found["count"], found["max_model_len"]) == (5, 4096)
    assert found["token_strs"] == ["h", "i", "Ġ", "Ã", "©"]
    assert answer(http, "/detokenize", tokens=found["tokens"]) == {"prompt": "hi é"}
    assert answer(http, "/detokenize", tokens=[EOS]) == {"prompt": "<eos>"}
    assert answer(http, "/tokenize", prompt="")["tokens"] == []


def test_over_grpc_the_same_is_told(served: Served, http: httpx.Client) -> None:
    with Client(served.grpc_address) as client:
        for body in ({"prompt": "hi é"}, CHAT):
            assert client.tokenize(**body) == answer(http, "/tokenize", **body)["tokens"]
        assert client.detokenize(client.tokenize("hi é")) == "hi é"
        assert client.detokenize([EOS]) == "<eos>"
        assert client.tokenize("") == []
        with pytest.raises(PenstockError, match="give either a prompt or messages"):
            client.tokenize("hi", **CHAT)
        with pytest.raises(PenstockError) as caught:
            client.tokenize("hi", model="nobody")
        assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
        with pytest.raises(PenstockError) as caught:
            client.detokenize([10**9])
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_a_rendered_chat_generates_what_the_chat_does(http: httpx.Client) -> None:
    tokens = answer(http, "/tokenize", **CHAT)["tokens"]
    assert answer(http, "/detokenize", tokens=tokens)["prompt"] == RENDERED
    rendered = answer(http, "/v1/chat/completions/render", **CHAT, temperature=0, model="simulated", request_id="mine")
    assert (rendered["token_ids"], rendered["model"], rendered["request_id"]) == (tokens, "simulated", "chatcmpl-mine")
    params = rendered["sampling_params"]
    assert (params["temperature"], params["max_tokens"]) == (0, 4096 - len(tokens))
    chat = answer(http, "/v1/chat/completions", **CHAT, temperature=0, max_tokens=8, ignore_eos=True)
    ids = answer(http, "/v1/completions", prompt=rendered["token_ids"], temperature=0, max_tokens=8, ignore_eos=True)
    assert chat["choices"][0]["message"]["content"] == ids["choices"][0]["text"]
    assert len(expected(tokens, 8)) == ids["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {"prompt": "x", "model": "other"}, "model", "model_not_found"),
        ("/tokenize", {"messages": []}, "messages", "invalid_argument"),
        ("/detokenize", {"tokens": [301]}, "tokens", "invalid_argument"),
        ("/v1/chat/completions/render", {**CHAT, "max_tokens": 5000}, "max_tokens", "context_length_exceeded"),
        ("/v1/chat/completions/render", {**CHAT, "documents": [{"a": "b"}]}, "documents", "invalid_argument"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    error = http.post(path, json=body).json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_a_body_that_does_not_say_that_it_is_json_is_refused(http: httpx.Client) -> None:
    for path in ("/tokenize", "/detokenize", "/v1/chat/completions/render"):
        assert http.post(path, content=b"{}").status_code == 415


def test_a_tokenizer_that_dies_is_noticed_by_nobody(served: Served, http: httpx.Client) -> None:
    before = served.pids()["tokenizer-0"]
    os.kill(before, signal.SIGKILL)
    wait_until(
        lambda: answer(http, "/tokenize", prompt="hi")["count"] == 2 and served.pids()["tokenizer-0"] != before,
        "the tokenizer is started again",
    )
    for _ in range(8):
        assert answer(http, "/tokenize", prompt="hi")["count"] == 2


def test_a_large_text_is_tokenized(http: httpx.Client) -> None:
    assert answer(http, "/tokenize", prompt="x" * 300_000)["count"] == 300_000


def test_health_is_told_where_sagemaker_looks_and_load_where_vllms_clients_do(http: httpx.Client) -> None:
    assert [http.get("/ping").status_code, http.post("/ping").status_code] == [200, 200]
    assert http.get("/load").json() == {"server_load": 0}
    body = {"prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # its end would be the stream's
        next(lines)
        assert http.get("/load").json() == {"server_load": 1}
