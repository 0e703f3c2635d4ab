"""An encoder of real processes: as the real `openai` package asks for embeddings, and through any death."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from byte_tokenizer import write_tokenizer
from served import Served, wait_until
from test_vectors import NUM_CALLS, NUM_CLIENTS, SIZE, embed, prompt_of
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForSequenceClassification, BertModel

from contract.domain.model_kind import ModelKind
from contract.domain.pooling import Pooling, PoolingKind
from servicekit.checkpoint.tokenizer import read_tokenizer
from worker_svc.core.pretended_model import expected_vector

VOCAB_SIZE, POSITIONS = 300, 64
TEXTS = ["Once upon a time", "there was a “naïve” librarian", "who liked foxes"]
MEAN = Pooling(PoolingKind.MEAN)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BertModel]:
    directory = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=POSITIONS, **sizes)).eval()
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory, model


@torch.inference_mode()
def wanted(directory: Path, model: BertModel, text: str) -> list[float]:
    token_ids = read_tokenizer(directory).encode(text).ids
    first = model(torch.tensor([token_ids])).last_hidden_state[0, 0]
    vector: list[float] = (first / first.norm()).tolist()
    return vector


def test_openai_embeddings_are_those_of_transformers_and_nothing_is_generated(
    model: tuple[Path, BertModel], tmp_path: Path
) -> None:
    directory, module = model
    with Served(tmp_path, f"--model={directory}", "--device=cpu") as served:
        served.wait_ready()
        with openai.OpenAI(base_url=f"{served.http_url}/v1", api_key="none", timeout=300, max_retries=0) as client:
            name = client.models.list().data[0].id
            for told, text in zip(client.embeddings.create(model=name, input=TEXTS).data, TEXTS, strict=True):
                np.testing.assert_allclose(told.embedding, wanted(directory, module, text), atol=1e-5)
            with pytest.raises(openai.BadRequestError, match="is an encoder") as refused:
                client.completions.create(model=name, prompt="hello")
            assert refused.value.param == "model"
            with pytest.raises(openai.BadRequestError, match=f"maximum context length is {POSITIONS} tokens"):
                client.embeddings.create(model=name, input="x" * (POSITIONS + 1))
            cut = client.embeddings.create(
                model=name, input="x" * (POSITIONS + 1), extra_body={"truncate_prompt_tokens": -1}
            )
            np.testing.assert_allclose(cut.data[0].embedding, wanted(directory, module, "x" * POSITIONS), atol=1e-5)


def test_documents_are_ranked_as_transformers_scores_them(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=POSITIONS, num_labels=1, **sizes)
    config.initializer_range = 0.3  # scores far enough apart
    model = BertForSequenceClassification(config).eval()
    directory = tmp_path / "model"
    model.save_pretrained(directory)
    write_tokenizer(directory)
    tokenizer = read_tokenizer(directory)
    tokenizer.post_processor = TemplateProcessing(
        single="$A", pair="$A <eos> $B:1 <eos>:1", special_tokens=[("<eos>", 256)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    expected = []
    for text in TEXTS:
        joined = tokenizer.encode("who?", text)
        with torch.inference_mode():
            output = model(torch.tensor([joined.ids]), token_type_ids=torch.tensor([joined.type_ids]))
        expected.append(float(torch.sigmoid(output.logits[0, 0])))
    with Served(tmp_path, f"--model={directory}", "--device=cpu") as served:
        served.wait_ready()
        body = {"query": "who?", "documents": TEXTS}
        told = httpx.post(f"{served.http_url}/v1/rerank", json=body, timeout=300).json()["results"]
    assert [each["index"] for each in told] == sorted(range(len(TEXTS)), key=lambda at: -expected[at])
    for each in told:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-5)


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    timing = ("--step-ms=5", "--session-ttl-s=10", "--reclaim-after-s=1")
    flags = ("--runner=simulated", "--simulated-model=encoder", "--max-num-seqs=8", "--max-num-batched-tokens=512")
    with Served(tmp_path_factory.mktemp("encoders"), f"--model={checkpoint}", *timing, *flags) as served:
        yield served.wait_ready()


@pytest.mark.parametrize("victim", ["scheduler-0", "worker-0", "server"])
def test_a_death_costs_no_vector_of_an_encoder(served: Served, victim: str) -> None:
    embed(served, 0)
    pid = served.pids()[victim]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        calls = [pool.submit(embed, served, number) for number in range(NUM_CALLS)]
        wait_until(lambda: any(call.done() for call in calls), "the first vector is there")
        os.kill(pid, signal.SIGKILL)
        vectors = [call.result() for call in calls]
    for number, vector in enumerate(vectors):
        expected = expected_vector(prompt_of(number), MEAN, size=SIZE, model_kind=ModelKind.ENCODER)
        np.testing.assert_allclose(vector, expected, atol=1e-6)
    wait_until(lambda: served.pids()[victim] != pid, "restarted")
