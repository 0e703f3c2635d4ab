"""On a GPU: which kernels are compiled together when a model is loaded, and which one by one."""

import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.launcher.layout import BUNDLED_MODEL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
