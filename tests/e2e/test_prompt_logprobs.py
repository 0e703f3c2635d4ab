"""Logprobs of prompts of real processes: the same over HTTP, gRPC and in `LLM`, plain, streamed and afterwards."""

import json
from typing import Any

import httpx
import pytest
from served import Served

from contract.domain.params import SamplingParams
from penstock import LLM
from penstock.launcher.layout import BUNDLED_MODEL
from penstock.outputs import Logprob

PROMPT = "Once upon a time there was a “naïve” librarian"
PARAMS = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3)
BODY = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def expected() -> list[dict[int, Logprob] | None]:
    (output,) = LLM(str(BUNDLED_MODEL)).generate([PROMPT], PARAMS, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def assert_told(told: list[dict[str, Any] | None], expected: list[dict[int, Logprob] | None]) -> None:
    assert told[0] is None
    assert expected[0] is None
    for entry, wanted in zip(told[1:], expected[1:], strict=True):
        assert entry is not None
        assert wanted is not None
        assert list(map(int, entry)) == list(wanted)
        for each, logprob in zip(entry.values(), wanted.values(), strict=True):
            assert each["logprob"] == pytest.approx(logprob.logprob, abs=1e-3)
            assert each["decoded_token"] == logprob.decoded_token


def post(served: Served, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    reply = httpx.post(f"{served.http_url}{path}", json=BODY | fields, timeout=300)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def test_over_http_they_are_those_of_the_llm(bundled: Served, expected: list[dict[int, Logprob] | None]) -> None:
    reply = post(bundled, prompt_logprobs=3, n=2)
    for choice in reply["choices"]:
        assert_told(choice["prompt_logprobs"], expected)
    page = httpx.get(f"{bundled.http_url}/v1/requests/{reply['id']}", timeout=300).json()
    assert page["reply"]["choices"] == reply["choices"]


def test_what_is_cached_changes_nothing_and_is_not_counted(
    bundled: Served, expected: list[dict[int, Logprob] | None]
) -> None:
    for _ in range(2):
        post(bundled)
        reply = post(bundled, prompt_logprobs=3)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert_told(reply["choices"][0]["prompt_logprobs"], expected)


def test_a_stream_has_them_in_its_first_chunk(bundled: Served, expected: list[dict[int, Logprob] | None]) -> None:
    body = BODY | {"prompt_logprobs": 3, "stream": True}
    lines = httpx.post(f"{bundled.http_url}/v1/completions", json=body, timeout=300).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert_told(chunks[0]["choices"][0]["prompt_logprobs"], expected)
    assert not any(chunk["choices"][0].get("prompt_logprobs") for chunk in chunks[1:])


def test_over_grpc_they_come_before_the_output(bundled: Served, expected: list[dict[int, Logprob] | None]) -> None:
    with bundled.client() as client:
        told = client.complete(PROMPT, PARAMS).prompt_logprobs
        alone = client.complete([5], PARAMS).prompt_logprobs
    assert told is not None
    assert_told([entry and {str(token): vars_of(each) for token, each in entry.items()} for entry in told], expected)
    assert alone == [None]


def vars_of(each: Logprob) -> dict[str, Any]:
    return {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}


def test_chosen_tokens_stand_beside_the_sampled_one(bundled: Served) -> None:
    ids = [305, 7]
    fields = {"logprob_token_ids": ids, "return_tokens_as_token_ids": True}
    (choice,) = post(bundled, logprobs=3, **fields)["choices"]
    for sampled, told in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        assert list(told) == list(dict.fromkeys([sampled, "token_id:7", "token_id:305"]))
    messages = [{"role": "user", "content": "Hi"}]
    reply = post(bundled, "/v1/chat/completions", prompt=None, messages=messages, logprobs=True, **fields)
    for entry in reply["choices"][0]["logprobs"]["content"]:
        assert [each["token"] for each in entry["top_logprobs"]] == ["token_id:7", "token_id:305"]
    refused = httpx.post(f"{bundled.http_url}/v1/completions", json=BODY | {"logprob_token_ids": [7]}, timeout=300)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_token_ids")


def test_an_echo_is_the_text_whose_tokens_it_scores(bundled: Served, expected: list[dict[int, Logprob] | None]) -> None:
    (choice,) = post(bundled, echo=True, logprobs=1)["choices"]
    logprobs = choice["logprobs"]
    own = [next(iter(each.values())).logprob for each in expected[1:] if each is not None]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(own) + 1] == pytest.approx(own, abs=1e-3)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"].startswith(token, offset)
    alone = post(bundled, echo=True, logprobs=1, max_tokens=0)
    assert alone["choices"][0]["text"] == PROMPT
    assert alone["choices"][0]["logprobs"]["tokens"] == logprobs["tokens"][: len(own) + 1]
    assert alone["usage"]["completion_tokens"] == 0
