"""A model runner over a model with random weights that no file holds."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from worker_svc.core.attention.torch_backend import TorchAttention
from worker_svc.core.config import ModelConfig, RopeConfig
from worker_svc.core.interface import Limits
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models import build_model
from worker_svc.core.models.llama import LlamaForCausalLM
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


def make_model(device: str = "cpu") -> tuple[LlamaForCausalLM, Placement]:
    """Weights are the same every time."""
    placement = Placement(torch.device(device), torch.float32)
    model = build_model(CONFIG, placement, LIMITS.max_model_len)
    generator = torch.Generator().manual_seed(11)
    for name, shard in placement.shards.items():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        shard.destination.copy_(torch.randn(shard.destination.shape, generator=generator) * 0.3 + mean)
    return model, placement


def save_model(directory: Path) -> None:
    """The model of `make_model` as a checkpoint."""
    _, placement = make_model()
    tensors = {name: shard.destination.clone() for name, shard in placement.shards.items()}
    save_file(tensors, directory / "model.safetensors")
    fields = {
        "architectures": [CONFIG.architecture],
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "max_position_embeddings": CONFIG.max_position_embeddings,
        "tie_word_embeddings": CONFIG.tie_word_embeddings,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(fields))


def make_runner(device: str = "cpu") -> ModelRunner:
    """A runner of `make_model`. Time does not pass."""
    model, placement = make_model(device)
    shape = KVCacheShape(CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, LIMITS.block_size, torch.float32)
    cache = KVCache(shape, LIMITS.num_blocks, placement.device)
    return ModelRunner(model, cache, TorchAttention(cache, CONFIG.num_heads, model.rotary), LIMITS, lambda: 0)
