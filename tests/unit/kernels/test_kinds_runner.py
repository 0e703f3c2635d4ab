"""A runner on Triton's kernels whose layers are of two kinds, with a scheduler that gives up what windows and
chunks have left: its tokens are those of plain torch over all tokens, whatever is left in such blocks.
"""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE, LINES
from random_models import random_model, unwritten_cache
from runner_configs import FIELDS, GPT_OSS, LLAMA4
from test_chunk_graphs import Unrecorded

from contract.domain.kv_kinds import KVKind, Reach
from contract.domain.params import Sampling, Stopping
from contract.domain.plan import StepPlan
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QueuedRequest
from worker_svc.compute import Compute, TorchCompute, TritonCompute
from worker_svc.core.chunk_graphs import Shape
from worker_svc.core.config import ModelConfig, parse_config
from worker_svc.core.interface import Limits
from worker_svc.core.kv_cache import KVCacheShape
from worker_svc.core.runner import ModelRunner

BLOCK_SIZE, WINDOW = 16, 21
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CHANGES: dict[str, dict[str, Any]] = {
    "gpt_oss": GPT_OSS,
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "sliding_window": WINDOW},
    "llama4": {
        **LLAMA4,
        "no_rope_layers": [1, 0, 1],
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    },
}
pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="exact in the interpreter only"),
    pytest.mark.usefixtures("large_tiles"),
]


def make_runner(config: ModelConfig, compute: Compute, *, by_kinds: bool) -> ModelRunner:
    reaches = tuple(Reach(each.window, each.chunk) for each in config.decoder.attentions) if by_kinds else ()
    shape = KVCacheShape(
        3, config.attention.num_kv_heads, config.attention.head_dim, BLOCK_SIZE, torch.float32, reaches=reaches
    )
    limits = Limits(20, BLOCK_SIZE, 6, 200, 64, config.decoder.vocab_size, kinds=shape.layout.kinds)
    size = BLOCK_SIZE
    assert limits.kinds == ((KVKind(2 * size), KVKind(size, reaches[0])) if by_kinds else (KVKind(size),))
    model = random_model(config, compute, limits.max_model_len)
    cache = unwritten_cache(shape, limits.num_blocks + 1)
    return compute.make_runner(model, cache, config.attention.num_heads, limits, lambda: 0, num_graphs=0)


def run(runner: ModelRunner) -> tuple[dict[tuple[bytes, int], list[int]], int]:
    """The outputs of some prompts, and how often a block was left with NaN."""
    limits = runner.limits
    scheduler = Scheduler(SchedulerConfig(enable_prefix_caching=False, plans_in_flight=1))
    offered = WorkerLimits(
        limits.num_blocks, BLOCK_SIZE, limits.max_num_seqs, limits.max_model_len, 64, kinds=limits.kinds
    )
    scheduler.add_worker("a", offered)
    rng = np.random.default_rng(8)
    outputs: defaultdict[tuple[bytes, int], list[int]] = defaultdict(list)
    for number, length in enumerate((1, 70, 15, 17, 100, 33)):
        request_id = number.to_bytes(16, "big")
        prompt = rng.integers(3, limits.vocab_size, length).astype(np.uint32)
        sampling = Sampling(temperature=0.0 if number % 2 else 1.0)
        scheduler.add(QueuedRequest(request_id, prompt, 1 + number // 4, sampling, Stopping(max_tokens=6)), 1)
    num_spoiled = 0
    while (plan := scheduler.schedule("a", 1)) is not None:
        result = runner.launch(plan).result()
        rows = scheduler.apply("a", result, 1)
        ends = np.cumsum(rows.counts)
        columns = rows.request_ids, rows.sequences.tolist(), ends.tolist(), rows.counts.tolist()
        for request_id, sequence, end, count in zip(*columns, strict=True):
            outputs[request_id, sequence] += rows.token_ids[end - count : end].tolist()
        empty = scheduler.workers["a"].blocks.empty
        num_spoiled += spoil(runner, empty, plan)
    assert not scheduler.requests
    return outputs, num_spoiled


def spoil(runner: ModelRunner, empty: list[int], plan: StepPlan) -> int:
    for cells in (runner._cache.keys, runner._cache.values):
        cells.unflatten(1, (-1, runner.limits.num_pages))[:, empty] = torch.nan
    return len(empty) * (plan.step > 1)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("in_shapes", [False, True], ids=["kernel by kernel", "in shapes"])
def test_tokens_are_those_of_the_reference_that_keeps_all(name: str, in_shapes: bool) -> None:
    changes = {"layer_types": LAYERS, "num_hidden_layers": 3, **CHANGES[name]}
    config = parse_config({**FIELDS, **changes}, "config.json")
    expected, _ = run(make_runner(config, TorchCompute(""), by_kinds=False))
    runner = make_runner(config, TritonCompute("", DEVICE, LINES), by_kinds=True)
    if in_shapes:
        runner._decoder = decoder = Unrecorded(runner, Shape(0, 64), Shape(6, 64))
    found, num_spoiled = run(runner)
    assert found == expected
    assert num_spoiled > 0
    assert not in_shapes or decoder.taken
