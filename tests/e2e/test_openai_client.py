"""The pipeline as the real `openai` package calls it."""

import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from served import LONG_MODEL_LEN, Served

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(simulated: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{simulated.http_url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def test_models_lists_the_served_one(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["simulated"]
    assert client.models.retrieve("simulated").object == "model"


def test_chat_completion_counts_what_it_used(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="simulated", messages=CHAT, max_tokens=12, temperature=0)
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len("user: hello\nassistant:")
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (12, reply.usage.prompt_tokens + 12)


def test_a_stream_adds_up_to_the_whole_reply(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="simulated", messages=CHAT, max_tokens=40, temperature=0)
    text, reasons, usage = "", [], None
    for chunk in client.chat.completions.create(
        model="simulated", messages=CHAT, max_tokens=40, temperature=0, stream=True,
        stream_options={"include_usage": True},
    ):  # fmt: skip
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert reasons == ["length"]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 40


def test_completions_take_text_token_ids_and_several_prompts(client: openai.OpenAI) -> None:
    def texts(prompt: object) -> list[str]:
        reply = client.completions.create(model="simulated", prompt=prompt, max_tokens=8, temperature=0)  # type: ignore[call-overload]
        return [choice.text for choice in sorted(reply.choices, key=lambda choice: choice.index)]

    one, other = texts("abc")[0], texts("abd")[0]
    assert one != other
    assert texts(["abc", "abd"]) == [one, other]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="simulated", prompt="abc", max_tokens=64, temperature=0).choices[0].text
    stop = next(char for char in whole[8:] if char.isascii() and char.isprintable())
    choice = client.completions.create(
        model="simulated", prompt="abc", max_tokens=64, temperature=0, stop=[stop]
    ).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_samples_with_one_seed_are_the_same_again_and_differ_from_each_other(client: openai.OpenAI) -> None:
    def sample() -> list[str]:
        reply = client.completions.create(model="simulated", prompt="abc", max_tokens=16, n=3, seed=7)
        return [choice.text for choice in sorted(reply.choices, key=lambda choice: choice.index)]

    first = sample()
    assert len(set(first)) == 3
    assert sample() == first


def test_logprobs_have_as_many_alternatives_as_asked_for(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="simulated", messages=CHAT, max_tokens=5, logprobs=True, top_logprobs=2, temperature=0
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in logprobs.content)


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (openai.NotFoundError, {"model": "another"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"max_tokens": 0}),
        (openai.BadRequestError, {"n": 100000}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"messages": [{"role": "user"}]}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "x" * LONG_MODEL_LEN}]}),
        (openai.BadRequestError, {"logprobs": True, "top_logprobs": 1000}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value),
)
def test_wrong_requests_have_typed_errors_that_say_what_is_wrong(
    client: openai.OpenAI, error: type[openai.APIStatusError], fields: dict[str, object]
) -> None:
    asked = {"model": "simulated", "messages": CHAT, "max_tokens": 4} | fields
    with pytest.raises(error) as caught:
        client.chat.completions.create(**asked)  # type: ignore[call-overload]
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["message"]
    assert body["type"] == "invalid_request_error"


def test_bad_json_and_an_oversized_body_are_refused(simulated: Served) -> None:
    url = f"{simulated.http_url}/v1/completions"
    headers = {"content-type": "application/json"}
    assert httpx.post(url, content=b"{", headers=headers, timeout=300).status_code == 400
    big = json.dumps({"prompt": "x" * (9 * 1024 * 1024)}).encode()
    assert httpx.post(url, content=big, headers=headers, timeout=300).status_code == 413


def test_beams_come_best_first_and_a_stream_tells_the_same(client: openai.OpenAI) -> None:
    asked = {"use_beam_search": True, "length_penalty": 0.8, "early_stopping": True}
    whole = client.chat.completions.create(model="simulated", messages=CHAT, n=3, max_tokens=20, extra_body=asked)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1  # two tokens may stand for bytes of no character
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 60
    told = dict.fromkeys(range(3), "")
    for chunk in client.chat.completions.create(
        model="simulated", messages=CHAT, n=3, max_tokens=20, stream=True, extra_body=asked
    ):
        for choice in chunk.choices:
            told[choice.index] += choice.delta.content or ""
    assert list(told.values()) == texts


def test_what_beams_cannot_have_beside_them_is_told_as_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="simulated", messages=CHAT, n=2, logprobs=True, extra_body={"use_beam_search": True}
        )
    assert refused.value.param == "logprobs"
