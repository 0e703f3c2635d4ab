"""A model runner over a model with random weights that no file holds."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from worker_svc.core.attention.torch_backend import TorchAttention
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.config import parse_config
from worker_svc.core.interface import Limits
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.layers.placement import Placement
from worker_svc.core.runner import ModelRunner

FIELDS = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
CONFIG = parse_config(FIELDS, "config.json")
ATTENTION = CONFIG.attention
LIMITS = Limits(
    num_blocks=64,
    block_size=4,
    max_num_seqs=8,
    max_model_len=64,
    max_num_batched_tokens=512,
    vocab_size=CONFIG.decoder.vocab_size,
    eos_token_ids=(2,),
)


def make_model(device: str = "cpu") -> tuple[CausalLM, Placement]:
    """Weights are the same every time."""
    placement = Placement(torch.device(device), torch.float32)
    model = CausalLM(CONFIG.decoder, placement, LIMITS.max_model_len)
    generator = torch.Generator().manual_seed(11)
    for shard in placement.wanted:
        mean = 1.0 if shard.name.endswith("norm.weight") else 0.0
        shard.destination.copy_(torch.randn(shard.destination.shape, generator=generator) * 0.3 + mean)
    return model, placement


def save_model(directory: Path) -> None:
    """The model of `make_model` as a checkpoint."""
    _, placement = make_model()
    tensors = {shard.name: shard.destination.clone() for shard in placement.wanted}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(FIELDS))


def make_runner(device: str = "cpu") -> ModelRunner:
    """A runner of `make_model`. Time does not pass."""
    model, placement = make_model(device)
    shape = KVCacheShape(2, ATTENTION.num_kv_heads, ATTENTION.head_dim, LIMITS.block_size, torch.float32)
    cache = KVCache(shape, LIMITS.num_blocks, placement.device)
    return ModelRunner(model, cache, TorchAttention(cache, ATTENTION.num_heads, model.attentions), LIMITS, lambda: 0)
