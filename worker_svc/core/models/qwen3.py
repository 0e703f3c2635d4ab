"""Qwen3 (Qwen team, 2025): Llama's structure with each head's queries and keys normalised before rotation."""

from worker_svc.core.attention.interface import HeadNorms
from worker_svc.core.config import ModelConfig
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen3Attention(LlamaAttention):
    """One norm weight of head_dim for all query heads, one for all key heads."""

    def make_head_norms(self, config: ModelConfig, placement: Placement, name: str) -> HeadNorms:
        """RMS norms over each head."""
        return HeadNorms(
            RMSNorm(placement, f"{name}.q_norm", config.head_dim, config.rms_norm_eps),
            RMSNorm(placement, f"{name}.k_norm", config.head_dim, config.rms_norm_eps),
        )


class Qwen3ForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`."""

    attention_class = Qwen3Attention
