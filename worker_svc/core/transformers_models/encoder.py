"""Encoders of transformers' own modules."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from worker_svc.core.encoder import Padded
from worker_svc.core.transformers_models.refusal import NotDoneError

HIDDEN, LOGITS = "last_hidden_state", "logits"
_TYPES = "token_type_ids"


class TransformersEncoder:
    """Implement `Encoder`: everything is the module's, the positions and masks of filled matrices, too."""

    def __init__(self, module: PreTrainedModel) -> None:
        """The module, with its weights or any others.

        Raises:
            NotDoneError: it has no table of tokens.
        """
        self._module = module
        embedding = module.get_input_embeddings()
        if not isinstance(embedding, nn.Embedding):
            raise NotDoneError("has no embeddings of tokens")
        self._num_embeddings = embedding.num_embeddings
        pad_token_id: Any = getattr(module.config, "pad_token_id", None)
        self.pad_token_id = pad_token_id if isinstance(pad_token_id, int) and pad_token_id >= 0 else 0

    @property
    def vocab_size(self) -> int:
        """Implement `Encoder.vocab_size`."""
        return self._num_embeddings

    @property
    def num_layer_weights(self) -> int:
        """Numbers that its layers multiply a token with: all but the tables of tokens and positions."""
        return sum(each.numel() for each in self._module.parameters()) - sum(
            each.weight.numel() for each in self._module.modules() if isinstance(each, nn.Embedding)
        )

    @property
    def num_bytes(self) -> int:
        """Of all weights, shared ones once."""
        return sum(each.nbytes for each in (*self._module.parameters(), *self._module.buffers()))

    def forward(self, prompts: Padded) -> Tensor:
        """Implement `Encoder.forward`."""
        hidden: Tensor = run_padded(self._module, prompts)[HIDDEN]
        return hidden

    def normalized(self, hidden: Tensor) -> Tensor:
        """Implement `Encoder.normalized`."""
        return hidden.float()


class TransformersCrossEncoder(TransformersEncoder):
    """Implement `Encoder` of a classifier with one label: its one hidden state, of the first token, is the score."""

    def __init__(self, module: PreTrainedModel, *, has_sigmoid: bool) -> None:
        """As above; without a sigmoid the score is the classifier's number as it is."""
        super().__init__(module)
        self._has_sigmoid = has_sigmoid

    def forward(self, prompts: Padded) -> Tensor:
        """Implement `Encoder.forward`."""
        logits: Tensor = run_padded(self._module, prompts)[LOGITS]
        hidden = logits.new_zeros(*prompts.token_ids.shape, 1)
        hidden[:, 0] = logits
        return hidden

    def normalized(self, hidden: Tensor) -> Tensor:
        """Implement `Encoder.normalized`."""
        return torch.sigmoid(hidden.float()) if self._has_sigmoid else hidden.float()


def run_padded(module: PreTrainedModel, prompts: Padded) -> Any:
    """A module's forward pass; of types of tokens it is told if it has some."""
    given = {"input_ids": prompts.token_ids, "attention_mask": prompts.mask.long()}
    if _knows_types(module):
        given[_TYPES] = prompts.types
    return module(**given)


def _knows_types(module: PreTrainedModel) -> bool:
    num_types = getattr(module.config, "type_vocab_size", None)
    return isinstance(num_types, int) and num_types > 1 and _TYPES in inspect.signature(module.forward).parameters
