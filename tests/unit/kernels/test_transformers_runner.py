"""Modules of transformers' on Triton's attention: the tokens of the module by itself."""

from typing import Any

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE, LINES
from plans import Drive, drive
from teacher import Answered, expected_logprobs, logprob_errors
from transformers import DeepseekV3Config, PreTrainedConfig, PreTrainedModel, Starcoder2Config

from contract.domain.params import Sampling
from worker_svc.compute import TritonCompute
from worker_svc.core.interface import Limits
from worker_svc.core.kv_cache import KVCache
from worker_svc.core.runner import ModelRunner
from worker_svc.core.transformers_models.attention import NAME, register
from worker_svc.core.transformers_models.model import TransformersLM
from worker_svc.core.transformers_models.tiny import build, randomize

# As in `test_triton_runner`.
pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="exact in the interpreter only"),
    pytest.mark.usefixtures("large_tiles"),
]
_COMMON: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 200,
    "eos_token_id": 2,
}
_WINDOW = Starcoder2Config(
    **(_COMMON | {"hidden_size": 128}), num_attention_heads=2, num_key_value_heads=1, sliding_window=21
)
_NARROW_VALUES = DeepseekV3Config(
    **_COMMON,
    num_attention_heads=2,
    num_key_value_heads=2,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=52,
    v_head_dim=40,
    first_k_dense_replace=2,
)


def make_runner(config: PreTrainedConfig) -> tuple[PreTrainedModel, ModelRunner]:
    register()
    eager, module = (build(config, name, dtype=torch.float32) for name in ("eager", NAME))
    randomize(eager)
    module.load_state_dict(eager.state_dict())
    limits = Limits(
        num_blocks=80,
        block_size=16,
        max_num_seqs=6,
        max_model_len=200,
        max_num_batched_tokens=256,
        vocab_size=config.vocab_size,
    )
    model = TransformersLM(module.to(DEVICE), limits.max_model_len)
    cache = KVCache(model.cache_shape(limits.block_size, torch.float32), limits.num_blocks + 1, DEVICE)
    cache.keys.fill_(torch.nan)  # what no sequence has written must not matter
    cache.values.fill_(torch.nan)
    compute = TritonCompute("asked for", DEVICE, LINES)
    return eager, compute.make_runner(model, cache, model.num_heads, limits, lambda: 0, num_graphs=8)


@pytest.mark.parametrize("config", [_WINDOW, _NARROW_VALUES], ids=["window", "narrow values"])
def test_tokens_and_logprobs_equal_the_module_by_itself(config: PreTrainedConfig) -> None:
    eager, runner = make_runner(config)
    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, config.vocab_size, length).tolist() for length in (1, 40, 17)]
    sequences = [Drive(prompt, 3, Sampling(temperature=0.0, num_logprobs=4)) for prompt in prompts]
    stats = drive(runner, sequences, chunk=20, window=2, stagger=1)
    assert stats.num_mixed > 0
    for sequence in sequences:
        answer = Answered.of(sequence)
        expected = expected_logprobs(eager, answer)
        assert sequence.output == expected.argmax(-1).tolist()
        assert float(logprob_errors(expected, answer, 4).max()) < 1e-4
