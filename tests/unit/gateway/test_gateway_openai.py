"""The real `openai` client against a gateway on a real port."""

from collections.abc import Iterator

import httpx
import msgspec
import openai
import pytest
from naive_client import naive_events
from running_gateway import RunningGateway
from scripted_pipeline import LENGTH, MODEL_DIGEST, STOP, Incoming, with_logprobs

from contract.domain.chain import CHAIN_START
from contract.domain.finish import FinishReason
from contract.domain.rows import TextRow, TokenLogprob
from gateway_svc.core.ask import Form
from gateway_svc.core.replies import ReplyHead
from gateway_svc.core.sse import SseFormat
from gateway_svc.core.streams import DeliveredSequence

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def test_models_are_listed_with_their_context(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "penstock")
    assert model.max_model_len == 512
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is 'tiny'"):
        client.models.retrieve("other")


def test_plain_chat(gateway: RunningGateway, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=5, user="somebody")
    (choice,) = reply.choices
    assert reply.object == "chat.completion"
    assert reply.model == "tiny"
    assert reply.system_fingerprint == MODEL_DIGEST.hex()
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello world")
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("stop", 0, None)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (7, 2, 9)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    (request,) = gateway.pipeline.wait_for()
    assert reply.id == "chatcmpl-" + request.request_id.hex()
    assert reply._request_id == request.request_id.hex()
    assert request.header.seed == 5
    assert not request.body.stopping.HasField("max_tokens")


def test_streamed_chat_has_openais_chunks(gateway: RunningGateway, client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
    assert {chunk.id for chunk in chunks} == {"chatcmpl-" + gateway.pipeline.wait_for()[0].request_id.hex()}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.system_fingerprint for chunk in chunks} == {MODEL_DIGEST.hex()}
    assert len({chunk.created for chunk in chunks}) == 1
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert [delta.content for delta in deltas[1:]] == ["Hello", " world"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_streamed_usage_is_null_until_the_last_chunk(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (7, 2, 9)


@pytest.mark.parametrize("form", ["chat", "completion"])
def test_continuous_usage_is_that_of_each_choice_so_far(gateway: RunningGateway, form: str) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("a", [1, 2]), request.row("b", sequence=1))
        request.send(request.row("c"), request.row("", [], sequence=1, finish=STOP))
        request.send(request.row("", [], finish=LENGTH))

    gateway.pipeline.script = script
    asked = {"chat": ("chat/completions", {"messages": MESSAGES}), "completion": ("completions", {"prompt": "x"})}
    path, body = asked[form]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"model": "tiny", "n": 2, "stream": True, "stream_options": options}
    with httpx.stream("POST", f"{gateway.url}/v1/{path}", json=body, timeout=300) as reply:
        *chunks, last = naive_events(reply.iter_raw())
    told: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == 7
        assert usage["total_tokens"] == 7 + usage["completion_tokens"]
        told[chunk["choices"][0]["index"]].append(usage["completion_tokens"])
    role = [0] if form == "chat" else []
    assert told == {0: [*role, 2, 3, 3], 1: [*role, 1, 1]}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("options", "in_chunks", "at_end"),
    [
        ({"continuous_usage_stats": True}, True, True),
        ({"continuous_usage_stats": True, "include_usage": None}, True, True),
        ({"continuous_usage_stats": True, "include_usage": False}, False, False),
        ({"continuous_usage_stats": False, "include_usage": True}, False, True),
        ({}, False, False),
    ],
)
def test_usage_is_told_where_vllm_tells_it(
    gateway: RunningGateway, options: dict[str, bool | None], in_chunks: bool, at_end: bool
) -> None:
    body = {"model": "tiny", "prompt": "x", "stream": True, "stream_options": options}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=300) as reply:
        chunks = naive_events(reply.iter_raw())
    assert [bool(chunk.get("usage")) for chunk in chunks if chunk["choices"]] == [in_chunks] * 2
    assert bool(chunks[-1].get("usage")) == at_end


def test_plain_and_streamed_completion(gateway: RunningGateway, client: openai.OpenAI) -> None:
    gateway.pipeline.script = lambda request: request.say("one", " two", finish=LENGTH)
    reply = client.completions.create(model="tiny", prompt="count", max_tokens=2)
    assert reply.object == "text_completion"
    assert reply.choices[0].text == "one two"
    assert reply.choices[0].finish_reason == "length"
    assert gateway.pipeline.wait_for()[0].body.stopping.max_tokens == 2
    chunks = list(client.completions.create(model="tiny", prompt="count", stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == ["one", " two"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "length"]
    assert gateway.pipeline.incoming[1].body.stopping.max_tokens == 16


def test_the_last_event_carries_what_ended_it(gateway: RunningGateway, client: openai.OpenAI) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("a"))
        request.send(request.row("", finish=STOP, stop="END"))

    gateway.pipeline.script = script
    *_, last = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, stop=["END"]))
    assert last.choices[0].model_dump(exclude_unset=True)["delta"] == {}
    assert last.choices[0].stop_reason == "END"
    assert list(gateway.pipeline.wait_for()[0].body.text_options.stop) == ["END"]


def test_a_chat_choice_that_ends_without_text_has_its_role_and_its_end(
    gateway: RunningGateway, client: openai.OpenAI
) -> None:
    def script(request: Incoming) -> None:
        request.send(request.row("", [], sequence=1, finish=STOP))
        request.send(request.row("", finish=LENGTH))

    gateway.pipeline.script = script
    asked = {"model": "tiny", "messages": MESSAGES, "n": 2}
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    told = [(chunk.index, chunk.delta.model_dump(exclude_unset=True), chunk.finish_reason) for chunk in chunks]
    role = {"role": "assistant", "content": ""}
    assert told == [(1, role, None), (1, {}, "stop"), (0, role, None), (0, {}, "length")]
    reply = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in reply.choices] == ["", ""]
    assert [choice.finish_reason for choice in reply.choices] == ["length", "stop"]


def test_a_chat_choice_that_ended_without_text_is_not_opened_again(gateway: RunningGateway) -> None:
    have = [DeliveredSequence(finish=FinishReason.STOP), DeliveredSequence()]
    head = ReplyHead(Form.CHAT, "chatcmpl-1", "tiny", 1, num_choices=2)
    sse = SseFormat(head, b"r" * 16, have)
    again, first = (TextRow(b"r" * 16, index, 0, 0, CHAIN_START, (), "", finish=FinishReason.STOP) for index in (0, 1))
    assert b'"role"' not in sse.chunk(0, again, CHAIN_START)
    assert b'"role"' in sse.chunk(1, first, CHAIN_START)


@pytest.mark.parametrize("form", [Form.CHAT, Form.COMPLETION])
def test_a_choice_is_heard_of_with_its_first_token_though_that_has_no_text(form: Form) -> None:
    sse = SseFormat(ReplyHead(form, "id", "tiny", 1, num_choices=1), b"r" * 16, [DeliveredSequence()])
    first, second, third = (
        sse.chunk(0, TextRow(b"r" * 16, 0, token, 0, CHAIN_START, (7,), text), CHAIN_START)
        for token, text in enumerate(("", "", "é"))
    )
    assert first.count(b"data: ") == 1
    assert b'"content":""' in first or b'"text":""' in first
    assert second == b""
    assert third.count(b"data: ") == 1
    assert b"\xc3\xa9" in third
    # Who comes back after the first token has heard of it.
    again = SseFormat(ReplyHead(form, "id", "tiny", 1, num_choices=1), b"r" * 16, [DeliveredSequence(num_tokens=1)])
    assert again.chunk(0, TextRow(b"r" * 16, 0, 1, 0, CHAIN_START, (7,), ""), CHAIN_START) == b""


def test_several_prompts_with_several_samples_are_indexed(gateway: RunningGateway, client: openai.OpenAI) -> None:
    def script(request: Incoming) -> None:
        for sequence in (1, 0):
            request.say(request.body.text, f"-{sequence}", sequence=sequence)

    gateway.pipeline.script = script
    reply = client.completions.create(model="tiny", prompt=["a", "b"], n=2, seed=1)
    assert {choice.index: choice.text for choice in reply.choices} == {0: "a-0", 1: "a-1", 2: "b-0", 3: "b-1"}
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (14, 8)
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(model="tiny", prompt=["a", "b"], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "a-0", 1: "a-1", 2: "b-0", 3: "b-1"}
    assert [request.body.n for request in gateway.pipeline.incoming] == [2] * 4


@pytest.mark.parametrize(("prompt", "expected"), [([1, 2, 3], [[1, 2, 3]]), ([[1], [2, 3]], [[1], [2, 3]])])
def test_prompts_as_token_ids(
    gateway: RunningGateway, client: openai.OpenAI, prompt: list[int], expected: list[list[int]]
) -> None:
    client.completions.create(model="tiny", prompt=prompt)
    packed = [request.body.token_ids.ids for request in gateway.pipeline.incoming]
    assert sorted(list(memoryview(ids).cast("I")) for ids in packed) == sorted(expected)


def test_chat_logprobs(gateway: RunningGateway, client: openai.OpenAI) -> None:
    gateway.pipeline.script = with_logprobs
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert gateway.pipeline.wait_for()[0].body.sampling.num_logprobs == 2
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == ["He", "\ufffd", "\ufffd", "<eos>"]
    assert [entry.logprob for entry in content] == [-0.5, -1.5, -2.0, -0.125]
    assert bytes(content[1].bytes or []) + bytes(content[2].bytes or []) == "雪".encode()
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("He", -0.5), ("Ho", -9999.0)]
    streamed = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, stream=True)
    found = [chunk.choices[0].logprobs.content for chunk in streamed if chunk.choices[0].logprobs]
    assert [len(entries or []) for entries in found] == [1, 2, 1]
    assert [entry for entries in found for entry in entries or []] == content


def test_completion_logprobs(gateway: RunningGateway, client: openai.OpenAI) -> None:
    gateway.pipeline.script = with_logprobs
    logprobs = client.completions.create(model="tiny", prompt="x", logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["He", "bytes:\\xe9\\x9b", "bytes:\\xaa", "<eos>"]
    assert logprobs.token_logprobs == [-0.5, -1.5, -2.0, -0.125]
    assert logprobs.text_offset == [0, 2, 2, 3]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"He": -0.5, "Ho": -9999.0}
    assert list(logprobs.top_logprobs[1].items()) == [("bytes:\\xe9\\x9b", -1.5), ("x", -0.25)]
    offsets: list[int] = []
    for chunk in client.completions.create(model="tiny", prompt="x", logprobs=2, stream=True):
        assert chunk.choices[0].logprobs is not None
        offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == [0, 2, 2, 3]


def test_tokens_of_one_text_are_all_told_the_sampled_one_first(gateway: RunningGateway, client: openai.OpenAI) -> None:
    top = ((4, -0.5), (6, -0.75), (5, -1.0), (8, -1.25))
    twins = TokenLogprob(5, -1.0, top, b"a", (b"a", b"b", b"a", b"a"))
    gateway.pipeline.script = lambda request: request.send(request.row("a", [5], logprobs=[twins], finish=STOP))
    logprobs = client.completions.create(model="tiny", prompt="x", logprobs=4).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert list(logprobs.top_logprobs[0].items()) == [
        ("a", -1.0), ("token_id:4", -0.5), ("b", -0.75), ("token_id:8", -1.25),
    ]  # fmt: skip


def test_tokens_can_be_named_by_their_ids(gateway: RunningGateway, client: openai.OpenAI) -> None:
    gateway.pipeline.script = with_logprobs
    extra = {"return_tokens_as_token_ids": True}
    logprobs = client.completions.create(model="tiny", prompt="x", logprobs=0, extra_body=extra).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["token_id:5", "token_id:7", "token_id:9", "token_id:2"]


def test_vllms_sampling_fields_arrive(gateway: RunningGateway, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        max_completion_tokens=9,
        temperature=0.5,
        logit_bias={"7": -3},
        extra_body={
            "top_k": 4,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [8],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "priority": -2,
            "chat_template_kwargs": {"enable_thinking": False},
            "something_new": 1,
            "tools": [],
        },
    )
    body = gateway.pipeline.wait_for()[0].body
    assert (body.sampling.top_k, body.sampling.min_p, body.sampling.repetition_penalty) == (4, 0.25, 1.5)
    assert (body.sampling.temperature, body.stopping.max_tokens, body.stopping.min_tokens) == (0.5, 9, 2)
    assert body.stopping.ignore_eos
    assert list(memoryview(body.stopping.stop_token_ids).cast("I")) == [8]
    assert list(memoryview(body.sampling.logit_bias_ids).cast("I")) == [7]
    assert not body.text_options.skip_special_tokens
    assert body.text_options.include_stop_str_in_output
    assert gateway.pipeline.wait_for()[0].header.priority == -2
    assert body.messages.template_kwargs_json == '{"enable_thinking":false}'
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert msgspec.json.decode(body.messages.messages[0].parts_json) == parts
