"""A cross-encoder served by all services: scores and rankings of pairs, over HTTP and gRPC; nothing else is done."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_tokenizer import write_tokenizer
from in_memory import Pipeline
from tokenizers.processors import TemplateProcessing

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from servicekit.checkpoint.tokenizer import read_tokenizer
from worker_svc.core.pretended_model import expected_score

POSITIONS = 64
QUERY, DOCUMENTS = "what is a fox?", ["a fox", "no", "a small animal", "a fox"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("classifier")
    write_tokenizer(directory)
    tokenizer = read_tokenizer(directory)
    tokenizer.post_processor = TemplateProcessing(
        single="$A", pair="$A <eos> $B:1 <eos>:1", special_tokens=[("<eos>", 256)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    sizes = {"vocab_size": 257, "hidden_size": 16, "max_position_embeddings": POSITIONS}
    (directory / "config.json").write_text(json.dumps({"architectures": ["BertForSequenceClassification"], **sizes}))
    return directory


@pytest.fixture(scope="module")
def pipeline(directory: Path) -> Iterator[Pipeline]:
    worker = {"runner": "simulated", "simulated_model": "cross_encoder", "step_ms": 1.0, "max_num_seqs": 8}
    with Pipeline(directory, worker=worker) as pipeline:
        yield pipeline


def wanted(directory: Path, first: str, second: str) -> float:
    joined = read_tokenizer(directory).encode(first, second)
    return expected_score(joined.ids, joined.type_ids.index(1))


def post(pipeline: Pipeline, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{pipeline.gateway.http_port}{path}", json=body, timeout=300)


def test_scores_are_the_model_s_own(pipeline: Pipeline, directory: Path) -> None:
    expected = [wanted(directory, QUERY, each) for each in DOCUMENTS]
    reply = post(pipeline, "/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    assert reply.status_code == 200, reply.text
    assert [each["score"] for each in reply.json()["data"]] == pytest.approx(expected)
    assert reply.json()["usage"]["prompt_tokens"] == sum(len(QUERY) + len(each) + 2 for each in DOCUMENTS)
    turned = post(pipeline, "/score", {"text_1": DOCUMENTS, "text_2": DOCUMENTS[::-1]}).json()["data"]
    pairs = zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)
    assert [each["score"] for each in turned] == pytest.approx([wanted(directory, *pair) for pair in pairs])
    assert len(pipeline.client.score(QUERY, DOCUMENTS).scores) == len(DOCUMENTS)
    assert list(pipeline.client.score(QUERY, DOCUMENTS).scores) == pytest.approx(expected)


def test_rankings_are_by_these_scores(pipeline: Pipeline, directory: Path) -> None:
    expected = [wanted(directory, QUERY, each) for each in DOCUMENTS]
    order = sorted(range(len(DOCUMENTS)), key=lambda at: -expected[at])[:3]
    told = post(pipeline, "/v2/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 3}).json()["results"]
    assert [each["index"] for each in told] == order
    assert [each["relevance_score"] for each in told] == pytest.approx([expected[at] for at in order])
    assert [each["document"]["text"] for each in told] == [DOCUMENTS[at] for at in order]
    over_grpc = pipeline.client.rerank(QUERY, DOCUMENTS, top_n=3).results
    assert [each.index for each in over_grpc] == order
    assert [each.relevance_score for each in over_grpc] == pytest.approx([expected[at] for at in order])


def test_a_reply_is_told_again(pipeline: Pipeline) -> None:
    told = post(pipeline, "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
    url = f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/requests/{told.json()['id']}"
    assert httpx.get(url, timeout=300).json()["reply"] == told.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "abc"}),
        ("/pooling", {"input": [1, 2]}),
        ("/v1/completions", {"prompt": "abc"}),
    ],
)
def test_what_a_cross_encoder_does_not_do_is_refused_by_name(
    pipeline: Pipeline, path: str, body: dict[str, Any]
) -> None:
    reply = post(pipeline, path, body)
    assert reply.status_code == 400
    assert "is a cross-encoder, which scores pairs of texts and does nothing else" in reply.text


@pytest.mark.parametrize("field", [{"pooling_type": "MEAN"}, {"dimensions": 3}, {"use_activation": False}])
def test_what_is_asked_of_a_vector_is_refused(pipeline: Pipeline, field: dict[str, Any]) -> None:
    reply = post(pipeline, "/v1/score", {"text_1": "a", "text_2": "b", **field})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(field)))


def test_pairs_beyond_the_bound_are_refused_or_cut(pipeline: Pipeline, directory: Path) -> None:
    body = {"text_1": "a" * 20, "text_2": "b" * 60}
    refused = post(pipeline, "/v1/score", body)
    assert refused.status_code == 400
    assert f"maximum context length is {POSITIONS} tokens" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "text_2"
    cut = post(pipeline, "/v1/score", body | {"truncate_prompt_tokens": -1, "truncation_side": "right"}).json()
    assert cut["data"][0]["score"] == pytest.approx(wanted(directory, "a" * 20, "b" * 42))


def test_generation_is_refused_over_grpc_too(pipeline: Pipeline) -> None:
    with pytest.raises(PenstockError, match="is a cross-encoder") as caught:
        pipeline.client.complete([1, 2], SamplingParams(max_tokens=3))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
