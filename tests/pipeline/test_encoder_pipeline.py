"""An encoder served by all services: vectors as of a decoder, generation is refused, prompts are bounded."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from in_memory import Pipeline

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.model_kind import ModelKind
from contract.domain.params import SamplingParams
from contract.domain.pooling import F32, Pooling, PoolingKind, PoolingParams
from worker_svc.core.pretended_model import expected_vector

SIZE = 16  # of the checkpoint's hidden states
BOUND = 100  # tokens of a step
DEFAULT = Pooling()  # as the checkpoint's architecture has it
GENERATING = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/v1/responses": {"input": "abc"},
    "/v1/messages": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3},
}


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Iterator[Pipeline]:
    worker = {
        "runner": "simulated",
        "simulated_model": "encoder",
        "step_ms": 1.0,
        "max_num_seqs": 8,
        "max_num_batched_tokens": BOUND,
    }
    with Pipeline(checkpoint, worker=worker) as pipeline:
        yield pipeline


def wanted(token_ids: Sequence[int], pooling: Pooling = DEFAULT) -> F32:
    return expected_vector(token_ids, pooling, size=SIZE, model_kind=ModelKind.ENCODER)


def post(pipeline: Pipeline, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{pipeline.gateway.http_port}{path}", json=body, timeout=300)


def test_embeddings_of_many_inputs_are_computed_whole(pipeline: Pipeline) -> None:
    prompts = [[(7 * i + j) % 256 for j in range(1 + 13 * i % BOUND)] for i in range(40)]
    reply = post(pipeline, "/v1/embeddings", {"input": prompts})
    assert reply.status_code == 200, reply.text
    for prompt, each in zip(prompts, reply.json()["data"], strict=True):
        np.testing.assert_allclose(each["embedding"], wanted(prompt), atol=1e-6)
    assert reply.json()["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_clients_over_grpc_get_what_they_ask_for(pipeline: Pipeline) -> None:
    prompts = [[(5 * i + j) % 256 for j in range(20 + i)] for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        vectors = list(pool.map(lambda each: pipeline.client.embed(each, PoolingParams(pooling_type="MEAN")), prompts))
    for prompt, vector in zip(prompts, vectors, strict=True):
        np.testing.assert_allclose(vector.embedding, wanted(prompt, Pooling(PoolingKind.MEAN)), atol=1e-6)


@pytest.mark.parametrize("path", GENERATING)
def test_what_would_generate_is_refused_by_name(pipeline: Pipeline, path: str) -> None:
    reply = post(pipeline, path, GENERATING[path])
    assert reply.status_code == 400
    name = httpx.get(f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/models", timeout=300).json()["data"][0]["id"]
    # By the gateway: nobody else tells the name.
    assert f"the model '{name}' is an encoder, which makes vectors of prompts and generates nothing" in reply.text


def test_it_is_refused_over_grpc_too(pipeline: Pipeline) -> None:
    with pytest.raises(PenstockError, match="is an encoder") as caught:
        pipeline.client.complete([1, 2], SamplingParams(max_tokens=3))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "model")


def test_a_prompt_beyond_the_bound_is_told_it_or_truncated_to_it(pipeline: Pipeline) -> None:
    prompt = [(3 * j) % 256 for j in range(BOUND + 1)]
    refused = post(pipeline, "/v1/embeddings", {"input": prompt})
    assert refused.status_code == 400
    assert f"maximum context length is {BOUND} tokens" in refused.json()["error"]["message"]
    for truncated in (-1, BOUND):
        cut = post(pipeline, "/v1/embeddings", {"input": prompt, "truncate_prompt_tokens": truncated}).json()
        np.testing.assert_allclose(cut["data"][0]["embedding"], wanted(prompt[1:]), atol=1e-6)
    models = httpx.get(f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/models", timeout=300).json()
    assert models["data"][0]["max_model_len"] == BOUND
