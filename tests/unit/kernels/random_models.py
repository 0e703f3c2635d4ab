"""Models with random weights, and caches in which nothing is written."""

import torch
from kernel_inputs import DEVICE

from worker_svc.compute import Compute
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.config import ModelConfig
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.layers.delta_rule import delta_rule_state
from worker_svc.core.layers.placement import Placement
from worker_svc.core.states.slot_states import SlotStates


def random_model(
    config: ModelConfig, compute: Compute, max_model_len: int, dtype: torch.dtype = torch.float32
) -> CausalLM:
    """Of a configuration, always the same."""
    placement = Placement(DEVICE, dtype, operations=compute.operations)
    model = CausalLM(config.decoder, placement, max_model_len)
    generator = torch.Generator().manual_seed(4)
    for shard in placement.wanted:
        mean = 1.0 if shard.name.endswith("norm.weight") else 0.0
        shard.destination.copy_(torch.randn(shard.destination.shape, generator=generator) * 0.2 + mean)
    model.prepare()
    return model


def unwritten_states(config: ModelConfig, num_slots: int) -> SlotStates | None:
    """Full of NaN: what no sequence has written must not matter."""
    shape = delta_rule_state(Placement(DEVICE, torch.float32), config.decoder.delta_rules)
    if shape is None:
        return None
    states = SlotStates(shape, num_slots, DEVICE)
    states.seen.fill_(torch.nan)
    states.matrices.fill_(torch.nan)
    return states


def unwritten_cache(shape: KVCacheShape, num_blocks: int) -> KVCache:
    """Full of NaN: what no sequence has written must not matter."""
    cache = KVCache(shape, num_blocks, DEVICE)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache
