"""Vectors of prompts against transformers: every way to pool, in chunks, beside decodes, after preemptions, with
prefixes that are found.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import BLOCK_SIZE, FEW_BLOCKS, MANY_BLOCKS
from reference import BUNDLED, PARAMS, Reference, assert_equal
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from vectors import expected_vector

from contract.domain.pooling import VECTOR_KINDS, Pooling, PoolingKind
from penstock import LLM, PenstockError, PoolingParams, SamplingParams

CHECKPOINTS = (
    "llama_llama3_rope_tied",
    "granite_multipliers",
    "cohere2_some_not_rotated",
    "gemma2_caps_and_windows",
    BUNDLED,
)
# In few blocks, windows that are given up leave room for others, and are then forgotten.
WINDOWED = ("cohere2_some_not_rotated", "gemma2_caps_and_windows")
POOLINGS = [Pooling(kind, normalize) for kind, normalize in product(VECTOR_KINDS, (True, False))]
POOLINGS += [
    Pooling(PoolingKind.MEAN, normalize=True, dimensions=5),
    Pooling(PoolingKind.LAST, normalize=False, dimensions=5),
]
TOLERANCE = 2e-5  # of the largest number of a vector
ASKED = SamplingParams(temperature=0.0, max_tokens=1)


@lru_cache(1)
def model_of(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def pooling_of(index: int) -> Pooling:
    return POOLINGS[index % len(POOLINGS)]


def assert_near(vector: np.ndarray | None, expected: torch.Tensor) -> None:
    assert vector is not None
    assert vector.shape == expected.shape
    np.testing.assert_allclose(vector, expected.numpy(), rtol=0, atol=TOLERANCE * float(expected.abs().max()))


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize(("budget", "num_blocks"), [(16, FEW_BLOCKS), (512, MANY_BLOCKS)])
def test_vectors_are_those_of_transformers_beside_prompts_that_are_answered(
    reference: Callable[[str], Reference], name: str, budget: int, num_blocks: int
) -> None:
    found = reference(name)
    model = model_of(found.directory)
    llm = LLM(
        str(found.directory),
        dtype="float32",
        max_num_seqs=16,
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )
    engine = llm.llm_engine
    for index, answer in enumerate(found.answers):
        prompt = {"prompt_token_ids": answer.prompt}
        if index % 2:
            engine.add_request(f"answer {index}", prompt, PARAMS, clips=True)
        else:
            engine.add_request(f"vector {index}", prompt, ASKED, pooling=pooling_of(index))
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    for index, answer in enumerate(found.answers):
        if index % 2:
            output = ended[f"answer {index}"].outputs[0]
            assert_equal(answer, output.token_ids, output.logprobs or [])
            continue
        output = ended[f"vector {index}"]
        assert_near(output.vector, expected_vector(model, answer.prompt, pooling_of(index)))
        assert [(each.finish_reason, each.token_ids) for each in output.outputs] == [("pooled", [])]
        if pooling_of(index).needs_whole_prompt:
            assert output.num_cached_tokens == 0
    if num_blocks == FEW_BLOCKS and name in WINDOWED:
        return
    counters = engine.stats().counters
    assert counters.num_cached_tokens > 0
    assert (counters.num_preemptions > 0) == (num_blocks == FEW_BLOCKS)


@dataclass
class Loaded:
    llm: LLM
    model: PreTrainedModel
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def bundled(reference: Callable[[str], Reference]) -> Loaded:
    found = reference(BUNDLED)
    return Loaded(
        LLM(str(found.directory), dtype="float32"),
        model_of(found.directory),
        [answer.prompt for answer in found.answers[:6]],
    )


def test_embed_by_default_is_the_last_hidden_state_of_length_one(bundled: Loaded) -> None:
    outputs = bundled.llm.embed(bundled.prompts, use_tqdm=False)
    for prompt, output in zip(bundled.prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.outputs.hidden_size == bundled.model.config.hidden_size
        assert_near(np.array(output.outputs.embedding), expected_vector(bundled.model, prompt, Pooling()))


def test_a_prefix_that_is_found_changes_no_vector_of_the_last_token(bundled: Loaded) -> None:
    prompt = [5 + at % 90 for at in range(200)]
    first, second = (bundled.llm.encode([prompt], use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 192)
    np.testing.assert_allclose(first.outputs.data, second.outputs.data, atol=1e-5)
    mean = bundled.llm.encode([prompt], PoolingParams(pooling_type="mean", normalize=False), use_tqdm=False)[0]
    assert mean.num_cached_tokens == 0
    assert_near(mean.outputs.data, expected_vector(bundled.model, prompt, Pooling(PoolingKind.MEAN, normalize=False)))


def test_score_is_the_cosine_of_two_vectors(bundled: Loaded) -> None:
    first, *others = bundled.prompts
    scores = bundled.llm.score(first, others, use_tqdm=False)
    one = expected_vector(bundled.model, first, Pooling())
    wanted = [float(one @ expected_vector(bundled.model, each, Pooling())) for each in others]
    assert [each.outputs.score for each in scores] == pytest.approx(wanted, abs=1e-5)
    pairs = bundled.llm.score(others, others, use_tqdm=False)
    assert [each.outputs.score for each in pairs] == pytest.approx([1.0] * len(others))


def test_a_prompt_may_fill_the_context(reference: Callable[[str], Reference]) -> None:
    llm = LLM(str(reference(BUNDLED).directory), dtype="float32", max_model_len=64)
    prompt = list(range(5, 69))
    (output,) = llm.encode([prompt], use_tqdm=False)
    assert_near(output.outputs.data, expected_vector(model_of(reference(BUNDLED).directory), prompt, Pooling()))
    (cut,) = llm.encode([[1, *prompt]], use_tqdm=False, truncate_prompt_tokens=-1)
    assert cut.prompt_token_ids == prompt
    with pytest.raises(PenstockError, match="65 tokens"):
        llm.encode([[1, *prompt]], use_tqdm=False)


def test_a_checkpoint_may_have_the_decoder_alone(reference: Callable[[str], Reference], tmp_path: Path) -> None:
    found = reference("llama_llama3_rope_tied")
    model = model_of(found.directory)
    model.base_model.save_pretrained(tmp_path)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(found.directory / name, tmp_path)
    (tmp_path / "modules.json").write_text('[{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]')
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        assert not any(name.startswith("model.") for name in stored.keys())  # noqa: SIM118  (it is no dict)
    llm = LLM(str(tmp_path), dtype="float32")
    prompt = found.answers[9].prompt
    (output,) = llm.encode([prompt], use_tqdm=False)
    assert_near(output.outputs.data, expected_vector(model, prompt, Pooling(PoolingKind.MEAN, normalize=False)))
