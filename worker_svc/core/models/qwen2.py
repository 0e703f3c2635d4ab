"""Qwen2 and Qwen2.5 (Qwen team, 2024): Llama's structure with biases on queries, keys and values."""

from worker_svc.core.config import ModelConfig
from worker_svc.core.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen2Attention(LlamaAttention):
    """Biases are part of the architecture, not of the configuration."""

    def has_qkv_bias(self, config: ModelConfig) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def has_output_bias(self, config: ModelConfig) -> bool:  # noqa: ARG002
        """Never."""
        return False


class Qwen2ForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`."""

    attention_class = Qwen2Attention
