"""All services hold alike what a checkpoint says of its model's tokens."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import write_byte_model

from contract.domain.errors import Fault, PenstockError
from penstock import LLM
from servicekit.checkpoint.facts import ModelFacts
from servicekit.checkpoint.location import find_checkpoint
from servicekit.checkpoint.tokenizer import read_tokenizer
from tokenizer_svc.loading import load_vocabulary
from worker_svc.factory import load_runner
from worker_svc.loading import load_worker
from worker_svc.runner_options import RunnerOptions
from worker_svc.settings import WorkerSettings

LINEAR = {"type": "linear", "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EOS = {"tokenizer_config.json": {"eos_token": "<eos>"}}


def write(directory: Path, files: dict[str, Any], **config: Any) -> str:
    """A checkpoint of 300 ids and 64 positions, whose tokenizer has ids up to 256, `<eos>`; None takes a field out."""
    write_byte_model(directory, vocab_size=300, max_model_len=64)
    path = directory / "config.json"
    fields = {**json.loads(path.read_text()), "eos_token_id": 7, **config}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value))
    return str(directory)


@pytest.mark.parametrize(
    ("files", "config", "max_model_len", "facts"),
    [
        ({}, {}, None, ModelFacts(300, (7,), 64)),
        ({}, {}, 48, ModelFacts(300, (7,), 48)),
        ({}, {"eos_token_id": [9, 7, 9]}, None, ModelFacts(300, (7, 9), 64)),
        (EOS, {}, None, ModelFacts(300, (7, 256), 64)),
        (EOS, {"eos_token_id": None}, None, ModelFacts(300, (256,), 64)),
        ({"generation_config.json": {"temperature": 0.5}}, {}, None, ModelFacts(300, (7,), 64)),
        ({"generation_config.json": {"eos_token_id": None}}, {}, None, ModelFacts(300, (7,), 64)),
        ({"generation_config.json": {"eos_token_id": [3, 300, -1, None]}}, {}, None, ModelFacts(300, (3,), 64)),
        ({}, {"rope_scaling": LINEAR}, None, ModelFacts(300, (7,), 64)),
        ({}, {"rope_scaling": LINEAR}, 160, ModelFacts(300, (7,), 160)),
        ({}, {"rope_scaling": LLAMA3}, 64, ModelFacts(300, (7,), 64)),
        ({}, {"max_position_embeddings": None}, 80, ModelFacts(300, (7,), 80)),
        (EOS, {"vocab_size": 200}, None, ModelFacts(200, (7,), 64)),
    ],
)
def test_tokenizer_and_workers_hold_the_same(
    tmp_path: Path, files: dict[str, Any], config: dict[str, Any], max_model_len: int | None, facts: ModelFacts
) -> None:
    model = write(tmp_path, files, **config)
    vocabulary = load_vocabulary(model, max_model_len=max_model_len)
    assert ModelFacts(vocabulary.vocab_size, vocabulary.eos_token_ids, vocabulary.context_length) == facts
    assert simulated(model, max_model_len) == facts
    options = RunnerOptions(model, device="cpu", load_format="dummy", max_model_len=max_model_len, num_blocks=64)
    runner = load_runner(options, time.monotonic_ns)
    assert (runner.runner.limits.vocab_size, runner.runner.limits.max_model_len) == (
        facts.vocab_size,
        facts.context_length,
    )
    runner.close()


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"vocab_size": None, "text_config": {"vocab_size": 280, "eos_token_id": 5}}, ModelFacts(280, (5,), 64)),
        ({"text_config": {"max_position_embeddings": 32, "rope_scaling": LINEAR}}, ModelFacts(300, (7,), 32)),
        ({"text_config": {"eos_token_id": [2, 1]}, "vocab_size": None}, ModelFacts(257, (1, 2), 64)),
        ({"architectures": ["WhateverForConditionalGeneration"]}, ModelFacts(300, (7,), 64)),
    ],
)
def test_so_do_simulated_workers_of_models_that_no_worker_computes(
    tmp_path: Path, config: dict[str, Any], facts: ModelFacts
) -> None:
    model = write(tmp_path, {}, **config)
    vocabulary = load_vocabulary(model)
    assert ModelFacts(vocabulary.vocab_size, vocabulary.eos_token_ids, vocabulary.context_length) == facts
    assert simulated(model) == facts


def simulated(model: str, max_model_len: int | None = None) -> ModelFacts:
    """As a simulated worker holds them."""
    worker = load_worker(WorkerSettings(model=model, runner="simulated", max_model_len=max_model_len))
    worker.close()
    limits = worker.runner.limits
    return ModelFacts(limits.vocab_size, limits.eos_token_ids, limits.max_model_len)


@pytest.mark.parametrize(
    ("config", "max_model_len", "words", "fault"),
    [
        ({}, 65, "max_model_len 65 exceeds the 64 positions", Fault.CALLER),
        ({"rope_scaling": LLAMA3}, 65, "max_model_len 65 exceeds the 64 positions", Fault.CALLER),
        ({"rope_scaling": LINEAR}, 161, "max_model_len 161 exceeds the 160 positions", Fault.CALLER),
        ({"max_position_embeddings": None}, None, r"config\.json does not say max_position_embeddings", Fault.OPERATOR),
    ],
)
def test_all_refuse_a_context_in_the_same_words(
    tmp_path: Path, config: dict[str, Any], max_model_len: int | None, words: str, fault: Fault
) -> None:
    model = write(tmp_path, {}, **config)
    options = RunnerOptions(model, device="cpu", load_format="dummy", max_model_len=max_model_len)
    said = []
    for load in (
        lambda: load_vocabulary(model, max_model_len=max_model_len),
        lambda: simulated(model, max_model_len),
        lambda: load_runner(options, time.monotonic_ns),
    ):
        with pytest.raises(PenstockError, match=words) as refused:
            load()
        assert refused.value.fault is fault
        said.append(refused.value.message)
    assert len(set(said)) == 1


def test_eos_that_is_no_id_is_refused(tmp_path: Path) -> None:
    model = write(tmp_path, {}, eos_token_id="</s>")
    for load in (load_vocabulary, simulated):
        with pytest.raises(PenstockError, match="eos_token_id must be a token id or a list of them, got '</s>'"):
            load(model)


def test_a_detokenizer_has_the_tokenizers_vocabulary(tmp_path: Path) -> None:
    model = write(tmp_path, {})
    theirs = load_vocabulary(model).tokenizer
    ours = read_tokenizer(find_checkpoint(model))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.to_str() == theirs.to_str()


def test_the_facts_are_the_models_where_the_tokenizer_is_anothers(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "other").mkdir()
    model = write(tmp_path / "model", {}, eos_token_id=9)
    (tmp_path / "model" / "tokenizer.json").unlink()
    other = write(tmp_path / "other", EOS, vocab_size=257, max_position_embeddings=32)
    vocabulary = LLM(model, tokenizer=other, runner="simulated").llm_engine.vocabulary
    assert (vocabulary.vocab_size, vocabulary.eos_token_ids, vocabulary.context_length) == (300, (9, 256), 64)
