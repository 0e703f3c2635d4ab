"""Logprobs of a prompt's tokens from hidden states, by torch, piece by piece: their logits would not fit at once."""

import torch
from torch import Tensor

from worker_svc.core.language_model import LanguageModel

_CELLS = 2**24  # logits that are computed at once: 64 MiB in fp32, and as much of logprobs


def compute_prompt_logprobs(model: LanguageModel, hidden: Tensor, token_ids: Tensor, num_top: int) -> list[Tensor]:
    """Logprobs of tokens i64[n] after hidden states [n, hidden_size], in pieces, so that memory is bounded.

    Returns:
        own f32[n], ranks i64[n], top_ids i64[n, num_top] and top_logprobs f32[n, num_top].
    """
    if not len(token_ids):  # a prompt of one token, or the last of one
        return [hidden.new_empty(shape) for shape in ((0,), (0,), (0, num_top), (0, num_top))]
    num_rows = max(1, _CELLS // model.vocab_size)
    pieces = [
        _logprobs(model.logits(hidden[at : at + num_rows]).float(), token_ids[at : at + num_rows], num_top)
        for at in range(0, len(token_ids), num_rows)
    ]
    return [torch.cat(columns) for columns in zip(*pieces, strict=True)]


def _logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, ...]:
    own = token_ids.unsqueeze(1)
    ranks = (logits > logits.gather(1, own)).sum(dim=-1).add_(1)
    logprobs = logits.log_softmax(dim=-1)
    top_logprobs, top_ids = logprobs.topk(num_top, dim=-1)
    return logprobs.gather(1, own).squeeze(1), ranks, top_ids, top_logprobs
