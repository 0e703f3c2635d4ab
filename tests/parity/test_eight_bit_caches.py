"""Keys and values in 8 bits: tokens are those of transformers over a cache that rounds, in any batch."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import write_tokenizer
from checkpoints import VARIANTS, VOCAB_SIZE
from eight_bit_caches import SCALES, rounded_logprobs, save_with_scales

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from penstock import LLM
from penstock.outputs import CompletionOutput
from worker_svc.factory import load_runner
from worker_svc.runner_options import RunnerOptions

# A number that lies between two of 8 bits, but for rounding, may be kept as either: logprobs move by some thousandths,
# by which tokens that are compared are further apart.
NEAR, GAP = 0.02, 0.05
MAX_TOKENS = 6
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
BY_NAME = {variant.name: variant for variant in VARIANTS}
NAMES = {
    "llama_biases": ("k_scale", "v_scale"),
    "qwen3_biases": ("k_proj.k_scale", "v_proj.v_scale"),
    "phi3_packed": ("attn.k_scale", "attn.v_scale"),
    "gemma2_caps_and_windows": ("k_proj.output_scale", "v_proj.output_scale"),
    "gpt_oss_sinks": ("k_scale", "v_scale"),
    "llama4_chunks_and_temperature": ("k_scale", "v_scale"),
}
# By budget, blocks and company: whole prompts, pieces of 16 tokens, preemption.
BATCHES = {
    "whole": {"num_blocks": 2000, "max_num_batched_tokens": 1024},
    "pieces": {"num_blocks": 2000, "max_num_batched_tokens": 16},
    "preempted": {"num_blocks": 80, "max_num_batched_tokens": 64},
    "alone": {"num_blocks": 100, "max_num_seqs": 1},
}


def make_prompts() -> list[list[int]]:
    """Some begin alike."""
    rng = np.random.default_rng(5)
    longest = rng.integers(3, VOCAB_SIZE, 150).tolist()
    drawn = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in (1, 17, 40, 90, 120)]
    return [longest, *drawn, longest[:60] + drawn[1], longest[:100] + drawn[2], longest[:33]]


def generate(directory: Path, **options: Any) -> tuple[LLM, list[CompletionOutput]]:
    given: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "fp8", "block_size": 4, "max_model_len": 256}
    llm = LLM(str(directory), **(given | options))
    return llm, [each.outputs[0] for each in llm.generate(make_prompts(), PARAMS, use_tqdm=False)]


def told(output: CompletionOutput) -> torch.Tensor:
    """The logprobs of its tokens."""
    assert output.logprobs is not None
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return torch.tensor([logprobs[token].logprob for token, logprobs in pairs])


def is_alike(model: Any, prompt: list[int], output: CompletionOutput) -> bool:
    """Return whether its tokens are the likeliest, or almost, and their logprobs near."""
    expected = rounded_logprobs(model, prompt, output.token_ids)
    own = expected.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    return bool(((expected.max(-1).values - own) < NEAR).all()) and float((told(output) - own).abs().max()) < NEAR


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_logprobs_are_those_of_transformers_over_a_cache_that_rounds(name: str, tmp_path: Path) -> None:
    model = save_with_scales(tmp_path, BY_NAME[name], NAMES[name])
    write_tokenizer(tmp_path)
    _, outputs = generate(tmp_path, **BATCHES["pieces"])
    assert all(is_alike(model, prompt, output) for prompt, output in zip(make_prompts(), outputs, strict=True))
    _, exact = generate(tmp_path, kv_cache_dtype="auto")
    assert not all(is_alike(model, prompt, output) for prompt, output in zip(make_prompts(), exact, strict=True))


@pytest.mark.parametrize("name", ["qwen3_biases", "llama4_chunks_and_temperature"])
def test_a_token_does_not_depend_on_its_batch(name: str, tmp_path: Path) -> None:
    """But where two are almost as likely: from there on sequences are others."""
    model = save_with_scales(tmp_path, BY_NAME[name])
    write_tokenizer(tmp_path)
    runs = {}
    for batch, options in BATCHES.items():
        llm, runs[batch] = generate(tmp_path, enable_prefix_caching=batch != "whole", **options)
        counters = llm.llm_engine.stats().counters
        # Blocks that chunks give up leave room for others.
        assert (counters.num_preemptions > 0) == (batch == "preempted" and name != "llama4_chunks_and_temperature")
        assert (counters.num_cached_tokens > 0) == (batch != "whole")
    num_compared = 0
    for prompt, *outputs in zip(make_prompts(), *runs.values(), strict=True):
        expected = rounded_logprobs(model, prompt, outputs[0].token_ids)
        first, second = expected.topk(2).values.T
        num_clear = int(((first - second) > GAP).int().cumprod(0).sum())
        num_compared += num_clear
        assert len({tuple(output.token_ids[:num_clear]) for output in outputs}) == 1
    assert num_compared > len(make_prompts()) * MAX_TOKENS / 3


def test_the_scales_are_those_of_the_checkpoint_each_for_its_layer(tmp_path: Path) -> None:
    model = save_with_scales(tmp_path, BY_NAME["llama_biases"])
    write_tokenizer(tmp_path)
    _, outputs = generate(tmp_path)
    prompt, token_ids = make_prompts()[0], outputs[0].token_ids
    for layer in range(3):
        for changed in range(2):
            others = [list(pair) for pair in SCALES]
            others[layer][changed] *= 0.1
            expected = rounded_logprobs(model, prompt, token_ids, [(keys, values) for keys, values in others])
            own = expected.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
            assert float((told(outputs[0]) - own).abs().max()) > NEAR


def test_workers_of_one_checkpoint_are_told_apart_by_what_they_keep(tmp_path: Path) -> None:
    save_with_scales(tmp_path, BY_NAME["llama_biases"])
    found = {}
    for kept in ("auto", "fp8", "fp8_e4m3"):
        options = RunnerOptions(str(tmp_path), device="cpu", kv_cache_dtype=kept, kv_cache_memory_bytes=1 << 20)
        loaded = load_runner(options, time.monotonic_ns)
        found[kept] = loaded.precision, loaded.profile.block_bytes
        loaded.close()
    precision, block_bytes = found["auto"]
    assert found["fp8"] == found["fp8_e4m3"] == (f"{precision}, KV torch.float8_e4m3fn", block_bytes // 4)


@pytest.mark.parametrize(
    ("name", "options", "named", "code"),
    [
        ("deepseek_v3_biases", {}, "kv_cache_dtype 'fp8' of latent attention", ErrorCode.UNIMPLEMENTED),
        ("llama_biases", {"model_impl": "transformers"}, "for a module of transformers'", ErrorCode.UNIMPLEMENTED),
        (
            "llama_biases",
            {"kv_cache_dtype": "fp8_e5m2"},
            "must be one of auto, fp8, fp8_e4m3",
            ErrorCode.INVALID_ARGUMENT,
        ),
    ],
    ids=["latent", "transformers", "unknown"],
)
def test_what_is_not_there_is_refused_by_name(
    name: str, options: dict[str, Any], named: str, code: ErrorCode, tmp_path: Path
) -> None:
    save_with_scales(tmp_path, BY_NAME[name])
    (tmp_path / "model.safetensors").unlink()  # before weights are read
    given: dict[str, Any] = {"device": "cpu", "kv_cache_dtype": "fp8"}
    with pytest.raises(PenstockError, match=named) as caught:
        load_runner(RunnerOptions(str(tmp_path), **(given | options)), time.monotonic_ns)
    assert caught.value.code is code
