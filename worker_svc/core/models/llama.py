"""Llama (Touvron et al., 2023; Llama 3, 2024): pre-norm decoder, grouped-query attention, rotary embedding, SwiGLU."""

import torch
from torch import Tensor

from worker_svc.core.attention.interface import StepAttention
from worker_svc.core.config import ModelConfig
from worker_svc.core.layers.embedding import VocabParallelEmbedding
from worker_svc.core.layers.linear import ColumnParallelLinear, RowParallelLinear
from worker_svc.core.layers.mlp import GatedMLP
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.layers.rotary import RotaryEmbedding, rotate


class LlamaAttention:
    """Grouped-query attention; q, k and v are one product. What other families change are its hooks."""

    def __init__(self, config: ModelConfig, placement: Placement, name: str, layer: int) -> None:
        heads = placement.part(config.num_heads, "num_attention_heads")
        kv_heads = placement.kv_heads(config.num_kv_heads)
        self._layer = layer
        self._head_dim = dim = config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        q_rows = slice(heads.start * dim, heads.stop * dim)
        kv_rows = slice(kv_heads.start * dim, kv_heads.stop * dim)
        self._qkv = ColumnParallelLinear(
            placement,
            config.hidden_size,
            [
                (f"{name}.q_proj", q_size, q_rows),
                (f"{name}.k_proj", kv_size, kv_rows),
                (f"{name}.v_proj", kv_size, kv_rows),
            ],
            bias=self.has_qkv_bias(config),
        )
        self._output = RowParallelLinear(
            placement, f"{name}.o_proj", q_size, q_rows, config.hidden_size, bias=self.has_output_bias(config)
        )

    def has_qkv_bias(self, config: ModelConfig) -> bool:
        """Whether q, k and v have biases."""
        return config.attention_bias

    def has_output_bias(self, config: ModelConfig) -> bool:
        """Whether o has a bias."""
        return config.attention_bias

    def normalise(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """What happens to queries and keys [tokens, heads, head_dim] before they are rotated."""
        return query, key

    def __call__(self, hidden: Tensor, angles: tuple[Tensor, Tensor], attention: StepAttention) -> Tensor:
        """hidden [tokens, hidden_size] -> like hidden; `angles` are those of the tokens' positions."""
        query, key, value = (
            part.view(len(hidden), -1, self._head_dim)
            for part in torch.split(self._qkv(hidden), self._qkv.sizes, dim=-1)
        )
        query, key = self.normalise(query, key)
        attended = attention.attend(self._layer, rotate(query, *angles), rotate(key, *angles), value)
        return self._output(attended.flatten(1))


class LlamaLayer:
    """One decoder layer."""

    def __init__(
        self, config: ModelConfig, placement: Placement, layer: int, attention_class: type[LlamaAttention]
    ) -> None:
        name = f"model.layers.{layer}"
        size, eps = config.hidden_size, config.rms_norm_eps
        self._attention_norm = RMSNorm(placement, f"{name}.input_layernorm", size, eps)
        self._attention = attention_class(config, placement, f"{name}.self_attn", layer)
        self._mlp_norm = RMSNorm(placement, f"{name}.post_attention_layernorm", size, eps)
        self._mlp = GatedMLP(placement, f"{name}.mlp", config)

    def __call__(self, hidden: Tensor, angles: tuple[Tensor, Tensor], attention: StepAttention) -> Tensor:
        """hidden [tokens, hidden_size] -> like hidden, the residual stream."""
        hidden = hidden + self._attention(self._attention_norm(hidden), angles, attention)
        return hidden + self._mlp(self._mlp_norm(hidden))


class LlamaForCausalLM:
    """Token ids to hidden states, and hidden states to logits."""

    attention_class: type[LlamaAttention] = LlamaAttention

    def __init__(self, config: ModelConfig, placement: Placement, max_model_len: int) -> None:
        self.config = config
        size = config.hidden_size
        self._embedding = VocabParallelEmbedding(placement, "model.embed_tokens", config.vocab_size, size)
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, placement.device)
        self._layers = [
            LlamaLayer(config, placement, layer, self.attention_class) for layer in range(config.num_layers)
        ]
        self._norm = RMSNorm(placement, "model.norm", size, config.rms_norm_eps)
        self._head = (
            self._embedding
            if config.tie_word_embeddings
            else VocabParallelEmbedding(placement, "lm_head", config.vocab_size, size)
        )

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """token_ids and positions i64[tokens] -> normalised hidden states [tokens, hidden_size]."""
        hidden = self._embedding.embed(token_ids)
        angles = self._rotary.angles(positions)
        for layer in self._layers:
            hidden = layer(hidden, angles, attention)
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] -> f32[rows, vocab_size], the same on every rank."""
        return self._head.logits(hidden)
