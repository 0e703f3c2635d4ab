"""Models with random weights, and caches in which nothing is written."""

import torch
from kernel_inputs import DEVICE

from worker_svc.compute import Compute
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.config import ModelConfig
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.layers.placement import Placement


def random_model(config: ModelConfig, compute: Compute, max_model_len: int) -> CausalLM:
    """Of a configuration, always the same."""
    placement = Placement(DEVICE, torch.float32, operations=compute.operations)
    model = CausalLM(config.decoder, placement, max_model_len)
    generator = torch.Generator().manual_seed(4)
    for shard in placement.wanted:
        mean = 1.0 if shard.name.endswith("norm.weight") else 0.0
        shard.destination.copy_(torch.randn(shard.destination.shape, generator=generator) * 0.2 + mean)
    return model


def unwritten_cache(shape: KVCacheShape, num_blocks: int) -> KVCache:
    """Full of NaN: what no sequence has written must not matter."""
    cache = KVCache(shape, num_blocks, DEVICE)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache
