"""Scores, rankings and rendered chats over gRPC, as HTTP has routes for them; both clients ask for them."""

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from byte_tokenizer import write_byte_model
from in_memory import Pipeline

from contract.domain.errors import ErrorCode, PenstockError
from contract.v1 import inference_pb2, inference_pb2_grpc, requests_pb2
from penstock import PoolingParams, SamplingParams
from penstock.client import AsyncClient

QUERY, TEXTS = "a fox", ["a fox", "the river", "a fox and a river"]
CHAT = [{"role": "user", "content": "look"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    model = tmp_path_factory.mktemp("calls")
    write_byte_model(model, vocab_size=300, calls=True)
    with Pipeline(model, worker={"runner": "simulated", "step_ms": 1.0}) as pipeline:
        yield pipeline


def address(pipeline: Pipeline) -> str:
    return f"127.0.0.1:{pipeline.running[-1].grpc_port}"


def post(pipeline: Pipeline, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"http://127.0.0.1:{pipeline.gateway.http_port}{path}", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()
    return told


@pytest.mark.parametrize("first", [QUERY, TEXTS[::-1]])
def test_scores_are_those_of_http(pipeline: Pipeline, first: str | list[str]) -> None:
    wanted = post(pipeline, "/score", {"text_1": first, "text_2": TEXTS, "pooling_type": "mean"})
    told = pipeline.client.score(first, TEXTS, PoolingParams(pooling_type="MEAN"))
    assert told.scores == [each["score"] for each in wanted["data"]]
    assert told.usage.num_prompt_tokens == wanted["usage"]["prompt_tokens"]
    assert (told.model, len(told.request_id), len(told.system_fingerprint)) == (wanted["model"], 32, 16)


def test_a_ranking_is_that_of_http(pipeline: Pipeline) -> None:
    body = {"query": QUERY, "documents": TEXTS, "top_n": 2}
    wanted = post(pipeline, "/rerank", body)["results"]
    told = pipeline.client.rerank(QUERY, TEXTS, top_n=2)
    assert [(each.index, each.relevance_score) for each in told.results] == [
        (each["index"], each["relevance_score"]) for each in wanted
    ]
    assert len(pipeline.client.rerank(QUERY, TEXTS).results) == len(TEXTS)


def test_a_call_with_a_key_is_one_request_and_its_page_is_that_of_http(pipeline: Pipeline) -> None:
    told = [pipeline.client.score(QUERY, TEXTS, idempotency_key="once") for _ in range(2)]
    assert told[0] == told[1]
    page = httpx.get(f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/requests/{told[0].request_id}", timeout=300)
    assert [each["score"] for each in page.json()["reply"]["data"]] == told[0].scores
    with pytest.raises(PenstockError) as other:
        pipeline.client.score("another", TEXTS, idempotency_key="once")
    assert other.value.code is ErrorCode.IDEMPOTENCY_CONFLICT


def test_a_rendered_chat_is_that_of_http_and_what_generate_takes(pipeline: Pipeline) -> None:
    body = {"messages": CHAT, "tools": [TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 40}
    wanted = post(pipeline, "/v1/chat/completions/render", body)
    params = SamplingParams(temperature=0, max_tokens=40)
    told = pipeline.client.render(CHAT, params, tools=[TOOL], tool_choice="required")
    assert (told.token_ids, told.max_tokens) == (wanted["token_ids"], 40)
    assert told.text == post(pipeline, "/detokenize", {"tokens": told.token_ids})["prompt"]
    assert "look" in told.text
    by_default = pipeline.client.render(CHAT)
    assert by_default.max_tokens == 512 - len(by_default.token_ids)


def test_generate_goes_on_with_what_was_rendered(pipeline: Pipeline) -> None:
    request = requests_pb2.GenerateRequest(sampling=requests_pb2.SamplingParameters(temperature=0))
    request.messages.messages.add(role="user", content="look")
    request.stopping.max_tokens = 12
    with grpc.insecure_channel(address(pipeline)) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        rendered = stub.Render(inference_pb2.RenderCall(request=request), timeout=300)
        assert not rendered.request.HasField("seed")
        texts = [
            "".join(event.delta.text for event in stub.Generate(inference_pb2.GenerateCall(request=each), timeout=300))
            for each in (request, rendered.request)
        ]
    assert texts[0] == texts[1] != ""


def test_tokens_are_left_out_at_either_side(pipeline: Pipeline) -> None:
    text = "abcdefgh"
    for side, kept in (("left", "fgh"), ("right", "abc")):
        params = PoolingParams(truncate_prompt_tokens=3, truncation_side=side)
        cut, whole = pipeline.client.embed(text, params), pipeline.client.embed(kept)
        assert cut.embedding == whole.embedding
        assert cut.usage.num_prompt_tokens == 3
    scored = pipeline.client.score(text, ["abc"], PoolingParams(truncate_prompt_tokens=3, truncation_side="right"))
    assert scored.scores == pytest.approx([1.0])


def test_the_other_client_has_the_same(pipeline: Pipeline) -> None:
    async def ask() -> tuple[Any, ...]:
        async with AsyncClient(address(pipeline)) as client:
            return await asyncio.gather(
                client.score(QUERY, TEXTS), client.rerank(QUERY, TEXTS, top_n=1), client.render(CHAT)
            )

    scores, ranking, rendered = asyncio.run(ask())
    assert scores.scores == pipeline.client.score(QUERY, TEXTS).scores
    assert ranking.results == pipeline.client.rerank(QUERY, TEXTS).results[:1]
    assert rendered == pipeline.client.render(CHAT)


def test_what_is_wrong_is_named_in_the_words_of_the_call(pipeline: Pipeline) -> None:
    def refused(call: Any) -> str | None:
        with pytest.raises(PenstockError) as error:
            call()
        return error.value.param

    client = pipeline.client
    assert refused(lambda: client.score(["a", "b"], TEXTS)) == "text_1"
    assert refused(lambda: client.score(QUERY, [])) == "text_2"
    assert refused(lambda: client.score(QUERY, ["a", ""])) == "text_2"
    assert refused(lambda: client.rerank("", TEXTS)) == "query"
    assert refused(lambda: client.rerank(QUERY, ["", "a"])) == "documents"
    assert refused(lambda: client.rerank(QUERY, ["a"] * 2048)) == "documents"
    assert refused(lambda: client.rerank(QUERY, TEXTS, top_n=-1)) == "top_n"
    assert refused(lambda: client.embed("a", PoolingParams(truncation_side="both"))) == "truncation_side"
    assert refused(lambda: client.render([])) == "messages"
    assert refused(lambda: client.render(CHAT, SamplingParams(max_tokens=900))) == "max_tokens"
    with grpc.insecure_channel(address(pipeline)) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as wrong:
            stub.Score(inference_pb2.ScoreCall(text_1=["a"], text_2=["b"], kind=9), timeout=300)
        assert "pooling_type" not in wrong.value.details()
        with pytest.raises(grpc.RpcError) as no_chat:
            stub.Render(inference_pb2.RenderCall(request=requests_pb2.GenerateRequest(text="a")), timeout=300)
    assert "messages" in no_chat.value.details()
