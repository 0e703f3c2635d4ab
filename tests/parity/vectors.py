"""Vectors by transformers: the last hidden states of prompts, pooled in plain words."""

import torch
from transformers import PreTrainedModel

from contract.domain.pooling import Pooling, PoolingKind


@torch.inference_mode()
def expected_vector(model: PreTrainedModel, prompt: list[int], pooling: Pooling) -> torch.Tensor:
    """f32[dimensions]."""
    hidden = model.base_model(torch.tensor([prompt])).last_hidden_state[0].float()
    match pooling.kind:
        case PoolingKind.LAST:
            vector = hidden[-1]
        case PoolingKind.MEAN:
            vector = hidden.mean(0)
        case PoolingKind.CLS:
            vector = hidden[0]
    vector = vector[: pooling.dimensions or None]
    return vector / vector.norm() if pooling.normalize else vector
