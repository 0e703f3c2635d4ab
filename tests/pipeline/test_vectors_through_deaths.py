"""Vectors through all services: over HTTP and gRPC, of many prompts at once, beside answers."""

import base64
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from in_memory import Pipeline, wait_until

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from contract.domain.pooling import F32, VECTOR_KINDS, Pooling, PoolingKind, PoolingParams, cosine
from servicekit.checkpoint.tokenizer import read_tokenizer
from worker_svc.core.pretended_model import expected_vector

SIZE = 16  # of the checkpoint's hidden states
DEFAULT = Pooling()


@pytest.fixture(scope="module")
def texts(checkpoint: Path) -> Callable[[str], list[int]]:
    tokenizer = read_tokenizer(checkpoint)
    return lambda text: list(tokenizer.encode(text).ids)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Iterator[Pipeline]:
    worker = {"runner": "simulated", "step_ms": 1.0, "block_size": 4, "num_blocks": 400, "max_num_seqs": 32}
    with Pipeline(checkpoint, worker=worker) as pipeline:
        yield pipeline


def wanted(token_ids: Sequence[int], pooling: Pooling = DEFAULT) -> F32:
    return expected_vector(token_ids, pooling, size=SIZE)


def post(pipeline: Pipeline, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{pipeline.gateway.http_port}{path}", json=body, timeout=300)


def test_embeddings_of_several_inputs_come_in_their_order(pipeline: Pipeline) -> None:
    prompts = [[(7 * i + j) % 256 for j in range(1 + 13 * i % 90)] for i in range(24)]
    reply = post(pipeline, "/v1/embeddings", {"input": prompts})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["object"] == "list"
    assert [each["index"] for each in body["data"]] == list(range(24))
    for prompt, each in zip(prompts, body["data"], strict=True):
        np.testing.assert_allclose(each["embedding"], wanted(prompt), atol=1e-6)
    total = sum(map(len, prompts))
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == total
    assert body["usage"]["completion_tokens"] == 0
    wait_until(lambda: pipeline.scheduler.stats().workers["worker"].num_used_blocks == 0)


@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_pooling_has_every_kind_and_base64(pipeline: Pipeline, kind: PoolingKind) -> None:
    prompt = list(range(50))
    body = {"input": prompt, "pooling_type": kind.name.lower(), "normalize": False, "encoding_format": "base64"}
    told = post(pipeline, "/pooling", body).json()["data"][0]
    assert told["object"] == "pooling"
    values = np.frombuffer(base64.b64decode(told["data"]), "<f4")
    np.testing.assert_allclose(values, wanted(prompt, Pooling(kind, normalize=False)), atol=1e-6)


def test_dimensions_are_cut_before_the_length_is_one(pipeline: Pipeline, texts: Callable[[str], list[int]]) -> None:
    told = post(pipeline, "/v1/embeddings", {"input": "abc", "dimensions": 3}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(told, wanted(texts("abc"), Pooling(dimensions=3)), atol=1e-6)
    refused = post(pipeline, "/v1/embeddings", {"input": "abc", "dimensions": SIZE + 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")


def test_scores_and_rankings_are_cosines(pipeline: Pipeline, texts: Callable[[str], list[int]]) -> None:
    words = ["one", "two", "three"]
    vectors = [wanted(texts(word)) for word in words]
    likeness = [cosine(vectors[0], each) for each in vectors]
    scores = post(pipeline, "/score", {"text_1": "one", "text_2": words}).json()
    assert [each["score"] for each in scores["data"]] == pytest.approx(likeness, abs=1e-6)
    pairs = post(pipeline, "/v1/score", {"text_1": words, "text_2": words}).json()
    assert [each["score"] for each in pairs["data"]] == pytest.approx([1.0] * 3, abs=1e-6)
    ranked = post(pipeline, "/v2/rerank", {"query": "one", "documents": words, "top_n": 2}).json()
    order = sorted(range(3), key=lambda at: -likeness[at])[:2]
    assert [each["index"] for each in ranked["results"]] == order
    assert [each["document"]["text"] for each in ranked["results"]] == [words[at] for at in order]


def test_clients_over_grpc_get_vectors_beside_answers(pipeline: Pipeline) -> None:
    prompts = [[(5 * i + j) % 256 for j in range(20 + i)] for i in range(8)]
    mean = PoolingParams(pooling_type="MEAN")
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(pipeline.client.complete, each, SamplingParams(max_tokens=9)) for each in prompts]
        vectors = [pool.submit(pipeline.client.embed, each, mean) for each in prompts]
    for prompt, vector in zip(prompts, vectors, strict=True):
        told = vector.result()
        np.testing.assert_allclose(told.embedding, wanted(prompt, Pooling(PoolingKind.MEAN)), atol=1e-6)
        assert (told.usage.num_prompt_tokens, told.usage.num_output_tokens) == (len(prompt), 0)
        assert told.system_fingerprint
    assert all(len(answer.result().outputs[0].token_ids) == 9 for answer in answers)


def test_the_same_key_is_the_same_request_and_its_reply_can_be_asked_for(pipeline: Pipeline) -> None:
    url = f"http://127.0.0.1:{pipeline.gateway.http_port}"
    first, second = (
        httpx.post(f"{url}/v1/embeddings", json={"input": "abc"}, headers={"Idempotency-Key": "k"}, timeout=300)
        for _ in range(2)
    )
    assert first.json() == second.json()
    told = httpx.get(f"{url}/v1/requests/{first.json()['id']}", timeout=300).json()
    assert (told["state"], told["reply"]) == ("ended", first.json())
    events = httpx.get(f"{url}/v1/requests/{first.json()['id']}/events", timeout=300)
    assert events.status_code == 400
    other = httpx.post(
        f"{url}/v1/embeddings",
        json={"input": "abc", "pooling_type": "mean"},
        headers={"Idempotency-Key": "k"},
        timeout=300,
    )
    assert other.status_code == 409


def test_a_prompt_may_fill_the_context_and_no_more(pipeline: Pipeline) -> None:
    assert len(pipeline.client.embed([1] * 512).embedding) == SIZE
    with pytest.raises(PenstockError) as caught:
        pipeline.client.embed([1] * 513)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    cut = post(pipeline, "/v1/embeddings", {"input": [1, *range(100)], "truncate_prompt_tokens": 100}).json()
    np.testing.assert_allclose(cut["data"][0]["embedding"], wanted(list(range(100))), atol=1e-6)
