"""The interface of models: token ids to hidden states, and these to logits."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from worker_svc.core.attention.interface import AttentionKind, StepAttention


class LanguageModel(Protocol):
    """This rank's part of a decoder, with its weights."""

    @property
    def attentions(self) -> Sequence[AttentionKind]:
        """By layer of the KV cache."""

    @property
    def vocab_size(self) -> int:
        """Tokens that have logits."""

    @property
    def num_layer_weights(self) -> int:
        """Numbers that all layers of this rank multiply a token with, or about as many."""

    def forward(self, token_ids: Tensor, attention: StepAttention, rows: Tensor | None = None) -> Tensor:
        """token_ids i64[tokens] -> hidden states [tokens, hidden_size]; given `rows` i64[n], those alone."""

    def normalized(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] of `forward` -> f32[rows, hidden_size], as transformers' last hidden state."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] of `forward` -> [rows, vocab_size], the same on every rank."""
