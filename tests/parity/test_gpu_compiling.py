"""On a GPU: which kernels are compiled together when a model is loaded, and which one by one."""

import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM
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
    LLM(str(BUNDLED_MODEL), dtype="bfloat16", num_blocks=1200, max_num_seqs=256).llm_engine.close()
    return alone, together


def test_what_graphs_record_is_compiled_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # In a process that has compiled nothing yet.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        alone, together = pool.submit(compiled_kernels).result()
    assert {"_decode_inputs", "_chunk_inputs", "_prefill_attention", "_rope_write", "_rms_norm"} <= together
    assert {"_draw_inputs", "_find_most", "_count", "_finish_cuts"} <= together
    assert {"_count_tokens", "_penalise", "_add_entries", "_rank_parts", "_rank"} <= together
    assert not alone
