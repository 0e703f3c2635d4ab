"""The embedding and head of a vocabulary of any size."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from worker_svc.core.layers.embedding import VocabParallelEmbedding
from worker_svc.core.layers.placement import Placement

HIDDEN = 16


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 32_003])
def test_logits_are_those_of_the_vocabulary_and_their_rows_are_aligned(vocab_size: int) -> None:
    placement = Placement(torch.device("cpu"), torch.bfloat16)
    layer = VocabParallelEmbedding(placement, "head", vocab_size, HIDDEN)
    weight, x = torch.randn(vocab_size, HIDDEN).bfloat16(), torch.randn(3, HIDDEN).bfloat16()
    (shard,) = placement.wanted
    shard.destination.copy_(weight[shard.index])

    logits = layer.logits(x)

    torch.testing.assert_close(logits, F.linear(x, weight))
    assert logits.stride(0) * logits.element_size() % 16 == 0


def test_what_pads_the_vocabulary_is_no_token() -> None:
    placement = Placement(torch.device("cpu"), torch.float32)
    layer = VocabParallelEmbedding(placement, "embed", 70, HIDDEN)
    placement.wanted[0].destination.fill_(1.0)
    assert layer.table is not None
    assert layer.table[70:].count_nonzero() == 0
    assert torch.equal(layer.embed(torch.tensor([0, 69])), torch.ones(2, HIDDEN))
