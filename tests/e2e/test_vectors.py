"""Vectors of real processes: as the real `openai` package asks for them, as `LLM` makes them, and through any death."""

import os
import secrets
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from served import LIMIT_S, SIMULATED, Served, wait_until

from contract.domain.pooling import Pooling, PoolingKind, PoolingParams
from penstock import LLM
from penstock.launcher.layout import BUNDLED_MODEL
from worker_svc.core.pretended_model import expected_vector

TEXTS = ["Once upon a time", "there was a “naïve” librarian", "who liked foxes " * 40]
SIZE = 16  # of the simulated checkpoint's hidden states
NUM_CLIENTS, NUM_CALLS = 12, 40
MEAN = Pooling(PoolingKind.MEAN)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(BUNDLED_MODEL))


def test_openai_embeddings_are_those_of_the_llm_as_numbers_and_as_base64(bundled: Served, llm: LLM) -> None:
    wanted = [each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)]
    with openai.OpenAI(base_url=f"{bundled.http_url}/v1", api_key="none", timeout=300) as client:
        model = client.models.list().data[0].id
        by_default = client.embeddings.create(model=model, input=TEXTS)  # asks for base64
        as_numbers = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
        cut = client.embeddings.create(model=model, input=TEXTS[0], dimensions=8)
    for reply in (by_default, as_numbers):
        for told, vector in zip(reply.data, wanted, strict=True):
            np.testing.assert_allclose(told.embedding, vector, atol=1e-4)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0
    first = np.array(wanted[0][:8])
    np.testing.assert_allclose(cut.data[0].embedding, first / np.linalg.norm(first), atol=1e-4)


def test_rankings_and_scores_are_those_of_the_llm(bundled: Served, llm: LLM) -> None:
    wanted = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    body = {"text_1": TEXTS[0], "text_2": TEXTS}
    told = httpx.post(f"{bundled.http_url}/score", json=body, timeout=300).json()["data"]
    assert [each["score"] for each in told] == pytest.approx(wanted, abs=1e-4)
    ranked = httpx.post(f"{bundled.http_url}/rerank", json={"query": TEXTS[0], "documents": TEXTS}, timeout=300).json()
    assert [each["index"] for each in ranked["results"]] == sorted(range(3), key=lambda at: -wanted[at])


def test_over_grpc_they_are_the_same(bundled: Served, llm: LLM) -> None:
    params = PoolingParams(pooling_type="MEAN", normalize=False)
    (wanted,) = llm.encode(TEXTS[1], params, use_tqdm=False)
    with bundled.client() as client:
        told = client.embed(TEXTS[1], params)
    np.testing.assert_allclose(told.embedding, wanted.outputs.data, atol=1e-4)
    assert told.usage.num_prompt_tokens == len(wanted.prompt_token_ids)


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    timing = ("--step-ms=5", "--session-ttl-s=10", "--reclaim-after-s=1", "--max-num-batched-tokens=128")
    flags = (f"--model={checkpoint}", *timing, *SIMULATED)
    with Served(tmp_path_factory.mktemp("vectors"), *flags) as served:
        yield served.wait_ready()


def embed(served: Served, number: int) -> list[float]:
    """Asks until there is an answer; the key says that it is one request."""
    headers = {"idempotency-key": secrets.token_hex(8)}
    body = {"input": prompt_of(number), "pooling_type": "mean"}
    until_s = time.monotonic() + LIMIT_S
    while True:
        try:
            reply = httpx.post(f"{served.http_url}/v1/embeddings", json=body, headers=headers, timeout=300)
        except httpx.TransportError:
            reply = httpx.Response(503)
        if reply.status_code not in (429, 503):
            assert reply.status_code == 200, reply.text
            told: list[float] = reply.json()["data"][0]["embedding"]
            return told
        assert time.monotonic() < until_s
        time.sleep(0.1)


def prompt_of(number: int) -> list[int]:
    return [(number * 31 + at) % 256 for at in range(1 + number * 37 % 400)]


@pytest.mark.parametrize("victim", ["gateway-0", "tokenizer-0", "scheduler-0", "worker-0", "detokenizer-0", "server"])
def test_a_death_costs_no_vector(served: Served, victim: str) -> None:
    embed(served, 0)
    pid = served.pids()[victim]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        calls = [pool.submit(embed, served, number) for number in range(NUM_CALLS)]
        wait_until(lambda: any(call.done() for call in calls), "the first vector is there")
        os.kill(pid, signal.SIGKILL)
        vectors = [call.result() for call in calls]
    for number, vector in enumerate(vectors):
        np.testing.assert_allclose(vector, expected_vector(prompt_of(number), MEAN, size=SIZE), atol=1e-6)
    wait_until(lambda: served.pids()[victim] != pid, "restarted")
