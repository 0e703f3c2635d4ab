"""Prompts that begin with a state that another one has left: tokens are those of transformers, or on a GPU as near to
the likeliest as those that are computed from the first token on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from byte_tokenizer import write_tokenizer
from checkpoints import DELTA_RULE, OF_EXPERTS, OF_QWEN3_5, SHARED, VOCAB_SIZE, Variant, save_rounded_checkpoint
from teacher import Answered, expected_logprobs, gaps
from transformers import PreTrainedModel

from penstock import LLM, SamplingParams

NUM_TOKENS = 16
NUM_SHARED, LONGEST = 600, 700
POSITIONS = {"max_position_embeddings": LONGEST + NUM_TOKENS}
QWEN3_NEXT = {**DELTA_RULE, **OF_EXPERTS, **SHARED, **POSITIONS, "num_experts_per_tok": 8, "head_dim": 64}
WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 64}
VARIANTS = (
    Variant("qwen3_next", "qwen3_next", QWEN3_NEXT),
    Variant("qwen3_5", "qwen3_5", {**OF_QWEN3_5, **WIDE, **POSITIONS}),
)
HAS_GPU = torch.cuda.is_available()
MAX_GAP = 1.0 if HAS_GPU else 1e-4  # in bf16 as in `test_gpu_parity`, on a CPU in fp32


def make_prompts(number: int) -> list[list[int]]:
    """All but one begin alike."""
    rng = np.random.default_rng(13)
    shared = rng.integers(3, VOCAB_SIZE, NUM_SHARED).tolist()
    lengths = rng.integers(1, LONGEST - NUM_SHARED, number - 1)
    tails = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
    return [*([*shared, *tail] for tail in tails), rng.integers(3, VOCAB_SIZE, 90).tolist()]


def assert_near_the_likeliest(model: PreTrainedModel, answers: list[Answered]) -> None:
    model.to("cuda" if HAS_GPU else "cpu", torch.float32)
    worst = max(float(gaps(expected_logprobs(model, each), each).max()) for each in answers)
    assert worst < MAX_GAP


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda each: each.name)
@pytest.mark.parametrize("cuda_graphs", [True, False] if HAS_GPU else [False])
def test_tokens_after_a_saved_state_are_the_likeliest(tmp_path: Path, variant: Variant, cuda_graphs: bool) -> None:
    model = save_rounded_checkpoint(tmp_path, variant)
    write_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), num_blocks=600, max_num_seqs=16, max_num_batched_tokens=1024, cuda_graphs=cuda_graphs)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in make_prompts(12)]
    # One that leaves blocks, one that leaves a state where these end to be shared, and all others.
    outputs = [
        output
        for asked in (prompts[:1], prompts[1:2], prompts[2:])
        for output in llm.generate(asked, params, use_tqdm=False)
    ]
    llm.llm_engine.close()
    whole = NUM_SHARED // 16 * 16
    assert [each.num_cached_tokens for each in outputs] == [0, 0, *[whole] * 9, 0]
    assert_near_the_likeliest(model, [Answered(each.prompt_token_ids, each.outputs[0].token_ids) for each in outputs])
