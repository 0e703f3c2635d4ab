"""An encoder of transformers' own module."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from worker_svc.core.transformers_models.refusal import NotDoneError

HIDDEN = "last_hidden_state"


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

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Implement `Encoder.forward`."""
        hidden: Tensor = self._module(input_ids=token_ids, attention_mask=mask.long())[HIDDEN]
        return hidden

    def normalized(self, hidden: Tensor) -> Tensor:
        """Implement `Encoder.normalized`."""
        return hidden.float()
