"""Qwen3 (Qwen team, 2025): Llama's structure with each head's queries and keys normalised before rotation."""

from torch import Tensor

from worker_svc.core.config import ModelConfig
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen3Attention(LlamaAttention):
    """One norm weight of head_dim for all query heads, one for all key heads."""

    def __init__(self, config: ModelConfig, placement: Placement, name: str, layer: int) -> None:
        super().__init__(config, placement, name, layer)
        self._query_norm = RMSNorm(placement, f"{name}.q_norm", config.head_dim, config.rms_norm_eps)
        self._key_norm = RMSNorm(placement, f"{name}.k_norm", config.head_dim, config.rms_norm_eps)

    def normalise(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """RMS norm over each head."""
        return self._query_norm(query), self._key_norm(key)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`."""

    attention_class = Qwen3Attention
