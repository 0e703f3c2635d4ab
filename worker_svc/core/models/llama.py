"""Llama (Touvron et al., 2023; Llama 3, 2024): pre-norm decoder, grouped-query attention, rotary embedding, SwiGLU."""

import copy
from typing import Self

import torch
from torch import Tensor

from worker_svc.core.attention.interface import HeadNorms, StepAttention
from worker_svc.core.config import ModelConfig
from worker_svc.core.layers.embedding import VocabParallelEmbedding
from worker_svc.core.layers.linear import ColumnParallelLinear, RowParallelLinear
from worker_svc.core.layers.mlp import GatedMLP
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.layers.rotary import RotaryEmbedding


class LlamaAttention:
    """x + o(attention(norm(x))); q, k and v are one product. What other families change are its hooks."""

    def __init__(self, config: ModelConfig, placement: Placement, name: str, norm_name: str, layer: int) -> None:
        heads = placement.part(config.num_heads, "num_attention_heads")
        kv_heads = placement.kv_heads(config.num_kv_heads)
        dim = config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        q_rows = slice(heads.start * dim, heads.stop * dim)
        kv_rows = slice(kv_heads.start * dim, kv_heads.stop * dim)
        self._layer = layer
        self._operations = placement.operations
        self._norm = RMSNorm(placement, norm_name, config.hidden_size, config.rms_norm_eps)
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
        self._head_norms = self.make_head_norms(config, placement, name)
        self._output = RowParallelLinear(
            placement, f"{name}.o_proj", q_size, q_rows, config.hidden_size, bias=self.has_output_bias(config)
        )

    def has_qkv_bias(self, config: ModelConfig) -> bool:
        """Whether q, k and v have biases."""
        return config.attention_bias

    def has_output_bias(self, config: ModelConfig) -> bool:
        """Whether o has a bias."""
        return config.attention_bias

    def make_head_norms(self, config: ModelConfig, placement: Placement, name: str) -> HeadNorms | None:  # noqa: ARG002
        """What happens to queries and keys before they are rotated."""
        return None

    def fold_norm(self) -> None:
        """See `Operations.fold_norm`."""
        self._operations.fold_norm(self._norm, self._qkv)

    def __call__(self, hidden: Tensor, attention: StepAttention, rows: Tensor | None = None) -> Tensor:
        """hidden [tokens, hidden_size] -> like hidden, or of `rows` i64[n] alone; keys and values are all written."""
        qkv, unscaled = self._operations.norm_linear_unscaled(hidden, self._norm, self._qkv)
        attended = attention.attend(self._layer, qkv, self._head_norms, unscaled)
        if rows is not None:
            attended, hidden = attended[rows], hidden[rows]
        return self._operations.linear_add(attended, self._output, hidden)


class LlamaLayer:
    """One decoder layer."""

    def __init__(
        self, config: ModelConfig, placement: Placement, layer: int, attention_class: type[LlamaAttention]
    ) -> None:
        name = f"model.layers.{layer}"
        self._attention = attention_class(config, placement, f"{name}.self_attn", f"{name}.input_layernorm", layer)
        self._mlp = GatedMLP(placement, f"{name}.mlp", f"{name}.post_attention_layernorm", config)

    def fold_norms(self) -> None:
        """See `Operations.fold_norm`."""
        self._attention.fold_norm()
        self._mlp.fold_norm()

    def __call__(self, hidden: Tensor, attention: StepAttention, rows: Tensor | None = None) -> Tensor:
        """hidden [tokens, hidden_size] -> like hidden, the residual stream; of `rows` i64[n] alone if given."""
        return self._mlp(self._attention(hidden, attention, rows))


class LlamaForCausalLM:
    """Token ids to hidden states, and hidden states to logits."""

    attention_class: type[LlamaAttention] = LlamaAttention

    def __init__(self, config: ModelConfig, placement: Placement, max_model_len: int) -> None:
        self.config = config
        size = config.hidden_size
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, placement.device)
        self._operations = placement.operations
        self._embedding = VocabParallelEmbedding(placement, "model.embed_tokens", config.vocab_size, size)
        self._layers = [
            LlamaLayer(config, placement, layer, self.attention_class) for layer in range(config.num_layers)
        ]
        self._norm = RMSNorm(placement, "model.norm", size, config.rms_norm_eps)
        self._head = (
            self._embedding
            if config.tie_word_embeddings
            else VocabParallelEmbedding(placement, "lm_head", config.vocab_size, size)
        )

    def outline(self) -> Self:
        """The same weights, of the first and the last layer alone: what they launch is all that any layer does."""
        outline = copy.copy(self)
        outline._layers = [self._layers[0], self._layers[-1]]
        return outline

    @torch.inference_mode()
    def fold_norms(self) -> None:
        """Prepare the layers for what computes them; once, when the weights are there."""
        for layer in self._layers:
            layer.fold_norms()

    def forward(self, token_ids: Tensor, attention: StepAttention, rows: Tensor | None = None) -> Tensor:
        """token_ids i64[tokens] -> hidden states [tokens, hidden_size], not yet normalised; given `rows` i64[n], those
        alone [n, hidden_size]: what the last layer does behind its keys and values is done for them only.
        """
        return self.transform(self.embed(token_ids), attention, rows)

    @property
    def embedding_table(self) -> Tensor | None:
        """[at least vocab_size, hidden_size], where this rank has all of it: `embed` is to look up its rows then."""
        return self._embedding.table

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids i64[tokens] -> [tokens, hidden_size]."""
        return self._embedding.embed(token_ids)

    def transform(self, hidden: Tensor, attention: StepAttention, rows: Tensor | None = None) -> Tensor:
        """As `forward`, of embedded tokens."""
        for layer in self._layers[:-1]:
            hidden = layer(hidden, attention)
        return self._layers[-1](hidden, attention, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] of `forward` -> [rows, vocab_size], the same on every rank."""
        return self._head.gather(self._operations.norm_linear(hidden, self._norm, self._head))
