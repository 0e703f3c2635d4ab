"""On a GPU: which kernels are compiled together when a model is loaded, and which one by one."""

import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import write_tokenizer
from checkpoints import OF_EXPERTS, VOCAB_SIZE, Variant, save_rounded_checkpoint

from penstock import LLM, SamplingParams
from penstock.launcher.layout import BUNDLED_MODEL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MOST_TOKENS = 16_384


def compiled_kernels() -> tuple[set[str], set[str]]:
    """Names of those that the loading thread compiles by itself, and of the others."""
    import triton

    alone, together = set(), set()

    def observe(**event: Any) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        (alone if is_main else together).add(event["src"].name)

    triton.knobs.compilation.listener = observe
    llm = LLM(str(BUNDLED_MODEL), dtype="bfloat16", num_blocks=1200, max_num_seqs=256)
    # Nobody waits for a compiler once there are requests, whatever these ask for.
    asked: list[dict[str, Any]] = [{"presence_penalty": 0.5}, {"logit_bias": {5: 1.0}}, {"top_p": 0.9}, {"logprobs": 3}]
    asked += [{"top_k": 5, "frequency_penalty": 0.1}, {"min_p": 0.1}, {}, {"temperature": 0.0}]
    for params in (SamplingParams(max_tokens=4, ignore_eos=True, **each) for each in asked):
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    llm.llm_engine.close()
    return alone, together


def test_what_graphs_record_is_compiled_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # In a process that has compiled nothing yet.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        alone, together = pool.submit(compiled_kernels).result()
    assert {"_decode_inputs", "_chunk_inputs", "_prefill_attention", "_rope_write", "_rms_norm"} <= together
    assert {"_draw_inputs", "_look_at_groups", "_find_cuts"} <= together
    assert {"_count_tokens", "_penalise", "_add_entries", "_rank_parts", "_rank"} <= together
    assert not alone


def compiled_late(directory: str) -> set[str]:
    """Names of the kernels that are compiled for steps of a model that is ready."""
    import triton

    late: set[str] = set()
    llm = LLM(directory, dtype="bfloat16", num_blocks=1500, max_num_seqs=64, max_num_batched_tokens=MOST_TOKENS)
    triton.knobs.compilation.listener = lambda **event: late.add(event["src"].name)
    rng = np.random.default_rng(5)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for length in (20, 300, 700, 1100, 1500, 2100, 3000, 4000, 4100, 6000, 6100, 8000, 8200, 12_000, 12_300, 16_000):
        # Each a step, after one that decodes.
        llm.generate([{"prompt_token_ids": rng.integers(3, VOCAB_SIZE, length).tolist()}], params, use_tqdm=False)
    for count, length in ((40, 12), (24, 900), (30, 700), (45, 400), (64, 300)):
        # More at once than a step may have: chunks stand beside sequences that decode.
        prompts = [{"prompt_token_ids": rng.integers(3, VOCAB_SIZE, length).tolist()} for _ in range(count)]
        llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.close()
    return late


def test_nobody_waits_for_kernels_of_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which others are for steps of more tokens than are recorded."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    options = {**OF_EXPERTS, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 64}
    options |= {"head_dim": 64, "hidden_size": 1024, "max_position_embeddings": MOST_TOKENS}
    save_rounded_checkpoint(directory, Variant("qwen3_moe", "qwen3_moe", options))
    write_tokenizer(directory)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(compiled_late, str(directory)).result() == set()
