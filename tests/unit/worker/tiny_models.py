"""A model runner over a model with random weights that no file holds."""

import torch

from worker_svc.core.attention.torch_backend import TorchAttention
from worker_svc.core.config import ModelConfig, RopeConfig
from worker_svc.core.interface import Limits
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models import build_model
from worker_svc.core.runner import ModelRunner

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=True,
    dtype=None,
    eos_token_ids=(2,),
)
LIMITS = Limits(
    num_blocks=64,
    block_size=4,
    max_num_seqs=8,
    max_model_len=64,
    max_num_batched_tokens=512,
    vocab_size=CONFIG.vocab_size,
    eos_token_ids=(2,),
)


def make_runner(device: str = "cpu") -> ModelRunner:
    """Weights are the same every time. Time does not pass."""
    placement = Placement(torch.device(device), torch.float32)
    model = build_model(CONFIG, placement, LIMITS.max_model_len)
    generator = torch.Generator().manual_seed(11)
    for name, shard in placement.shards.items():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        shard.destination.copy_(torch.randn(shard.destination.shape, generator=generator) * 0.3 + mean)
    shape = KVCacheShape(CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, LIMITS.block_size, torch.float32)
    cache = KVCache(shape, LIMITS.num_blocks, placement.device)
    return ModelRunner(model, cache, TorchAttention(cache, CONFIG.num_heads), LIMITS, lambda: 0)
