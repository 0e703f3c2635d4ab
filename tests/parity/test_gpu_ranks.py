"""Two ranks of a model on GPUs, which exchange through NCCL within CUDA graphs and without, against transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import Variant, save_rounded_checkpoint
from near_the_likeliest import MAX_GAP, NUM_PROMPTS, assert_near_the_likeliest, sequences
from tensor_parallel_rank import Ranks
from test_gpu_parity import QWEN3_NEXT_GAP, VARIANTS
from two_gpus import needs_two_gpus

from contract.domain.params import Sampling

pytestmark = needs_two_gpus

# Layers with windows, experts, latents, chunks and states.
NAMES = ("qwen3", "gemma2", "gpt_oss", "deepseek_v2", "llama4", "qwen3_next")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("variant", [each for each in VARIANTS if each.name in NAMES], ids=lambda each: each.name)
def test_tokens_of_two_ranks_are_near_the_likeliest(
    variant: Variant, tmp_path: Path, ranks: Ranks, *, cuda_graphs: bool
) -> None:
    model = save_rounded_checkpoint(tmp_path / "model", variant, torch.bfloat16)
    options = {
        "model": str(tmp_path / "model"),
        "device": "cuda",
        "dtype": "bfloat16",
        "attention": "triton",
        "cuda_graphs": cuda_graphs,
        "max_num_seqs": NUM_PROMPTS,
        "max_num_batched_tokens": 2048,
        "num_blocks": 1500,
        "world_size": 2,
        "distributed_address": f"file://{tmp_path}/rendezvous",
    }
    drives = sequences(Sampling(temperature=0.0, num_logprobs=0))
    ranks.ask(options, drives)
    found = ranks.answers()
    assert found[0] == found[1]
    _, outputs, num_graphs = found[0]
    assert all((count > 0) == cuda_graphs for count in num_graphs)
    for each, (output, *_) in zip(drives, outputs, strict=True):
        each.output.extend(output)
    assert_near_the_likeliest(model, drives, max_gap=QWEN3_NEXT_GAP if variant.name == "qwen3_next" else MAX_GAP)
