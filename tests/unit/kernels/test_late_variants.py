"""Kernels are compiled for each set of constants once, which takes a second: steps of a worker that is ready need none
that was not launched before, while graphs were recorded or memory was measured. Nothing is computed here.
"""

from typing import Any

import pytest
import torch
from kernel_inputs import DEVICE, LINES
from random_models import random_model, unwritten_cache
from runner_configs import FIELDS
from triton.runtime.interpreter import GridExecutor

from worker_svc.compute import TritonCompute
from worker_svc.core.attention.triton_backend import TritonAttention
from worker_svc.core.chunk_graphs import ChunkGraphs, ChunkStep, make_shapes
from worker_svc.core.config import parse_config
from worker_svc.core.decode_step import DecodeStep
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.graphs import batch_sizes
from worker_svc.core.interface import Limits
from worker_svc.core.kv_cache import KVCacheShape
from worker_svc.core.slots import HostSlots
from worker_svc.profiling import _full_plan, full_lengths, smaller_steps

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="in the interpreter only")

MOST_TOKENS, NUM_SEQS, HEAD_DIM = 1536, 96, 128
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 256,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": MOST_TOKENS,
}
Variant = tuple[object, ...]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """The kernels that were to be launched, with the constants that they are compiled for."""
    variants: set[Variant] = set()

    def note(self: Any, *_args: Any, **named: Any) -> None:
        constants = {name for name, kind in self.fn.__annotations__.items() if "constexpr" in str(kind)}
        variants.add((self.fn.__name__, *sorted((name, str(named[name])) for name in constants & named.keys())))

    monkeypatch.setattr(GridExecutor, "__call__", note)
    return variants


@pytest.mark.parametrize("num_weights", [600_000_000, 3_000_000_000, 8_000_000_000, 70_000_000_000])
@pytest.mark.parametrize("budget", [512, 1536, 8192, 16_384])
def test_no_graph_has_room_for_the_steps_that_memory_is_measured_with(num_weights: int, budget: int) -> None:
    limits = Limits(9999, 16, 256, 16_384, budget, 211)
    shapes = make_shapes(limits, num_weights, with_flash=True, takes_finished=lambda count: count >= 64)
    for lengths in smaller_steps(budget, 256, 16_384):
        chunks = [length for length in lengths if length > 1]
        room = len(lengths) - len(chunks), len(chunks), sum(chunks), len(lengths)
        # Of fewer tokens no step can have more chunks.
        assert sum(lengths) < 196 or not any(shape.has_room(*room) for shape in shapes)


@pytest.mark.parametrize(("kv_heads", "group"), [(4, 8), (8, 4), (2, 1)])
def test_no_step_needs_a_kernel_that_was_not_launched_before(launched: set[Variant], kv_heads: int, group: int) -> None:
    heads = {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}
    config, compute = parse_config({**FIELDS, **MIXTURE, **heads}, "config.json"), TritonCompute("", DEVICE, LINES)
    limits = Limits(800, 16, NUM_SEQS, MOST_TOKENS, MOST_TOKENS, config.decoder.vocab_size)
    model = random_model(config, compute, limits.max_model_len, dtype=torch.bfloat16)
    shape = KVCacheShape(1, kv_heads, HEAD_DIM, limits.block_size, torch.bfloat16)
    cache = unwritten_cache(shape, limits.num_blocks + 1)
    attention = TritonAttention(cache, kv_heads * group, model.attentions, NUM_SEQS)
    slots = DeviceSlots(HostSlots(limits), DEVICE)
    step = DecodeStep(model, attention, slots)
    shapes = make_shapes(limits, 1, with_flash=False, takes_finished=attention.takes_finished)
    chunks = ChunkGraphs(ChunkStep(model, attention, slots, limits), shapes)
    runner = compute.make_runner(model, cache, kv_heads * group, limits, lambda: 0, num_graphs=0)

    def compute_step(lengths: list[int]) -> None:
        runner.launch(_full_plan(lengths, limits.kinds)).result()

    with torch.inference_mode():
        for size in batch_sizes(NUM_SEQS):
            step(torch.zeros(size, dtype=torch.int64))
        for each in shapes:
            chunks._step(chunks._columns[each], chunks._staging)
    sizes = MOST_TOKENS, NUM_SEQS, MOST_TOKENS
    for lengths in (*smaller_steps(*sizes), full_lengths(*sizes)):
        compute_step(lengths)
    before = set(launched)
    assert any(name == "attend_splits" for name, *_ in before)
    for num_decodes in range(NUM_SEQS - 19):
        for length in (2, 25, 70):
            compute_step([1] * num_decodes + [length] * 20)
    assert launched == before
