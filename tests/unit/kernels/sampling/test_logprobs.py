"""Logprobs of chosen tokens and of the likeliest ones are those of a sort in double precision."""

import pytest
import torch
from kernel_inputs import DEVICE, DTYPE, randn

from contract.domain.params import MAX_LOGPROBS
from worker_svc.core.kernels.sampling.logprobs import token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
@pytest.mark.parametrize("num_top", [0, 1, 5, MAX_LOGPROBS])
@pytest.mark.parametrize("vocab_size", [MAX_LOGPROBS, 97, 2048, 2049, 9001])
def test_logprobs_are_those_of_all_logits_sorted(vocab_size: int, num_top: int, dtype: torch.dtype) -> None:
    logits = randn(5, vocab_size, scale=4.0, dtype=dtype)
    logits[3] += 200  # nothing overflows
    token_ids = torch.tensor([0, vocab_size - 1, 7, 11, 3], device=DEVICE)
    rows = torch.tensor([4, 1, 3], device=DEVICE)
    own, ranks, top_ids, top = token_logprobs(logits, token_ids, rows, num_top)
    exact = logits[rows].double().log_softmax(-1)
    # Of equals the first.
    values, ids = exact.sort(dim=-1, descending=True, stable=True)
    assert top_ids.tolist() == ids[:, :num_top].tolist()
    torch.testing.assert_close(top.double(), values[:, :num_top], rtol=0, atol=2e-5)
    raw = logits[rows]
    assert ranks.tolist() == ((raw > raw.gather(1, token_ids[rows, None])).sum(-1) + 1).tolist()
    torch.testing.assert_close(own.double(), exact.gather(1, token_ids[rows, None])[:, 0], rtol=0, atol=2e-5)


def test_equals_stand_in_the_order_of_their_ids_across_parts() -> None:
    logits = torch.full((1, 7000), -3.0, device=DEVICE)
    logits[0, [6999, 5, 2047, 2048, 4100]] = 1.0
    row = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    _, ranks, top_ids, top = token_logprobs(logits, row, row, 8)
    assert ranks.tolist() == [6]
    assert top_ids.tolist() == [[5, 2047, 2048, 4100, 6999, 0, 1, 2]]
    assert (top[0, :5] == top[0, 0]).all()


def test_tokens_that_are_impossible_come_last_and_once_each() -> None:
    logits = torch.full((1, 5000), -torch.inf, device=DEVICE)
    logits[0, [2500, 17]] = torch.tensor([1.0, 1.0], device=DEVICE)
    token_ids = torch.tensor([2500], device=DEVICE)
    own, ranks, top_ids, top = token_logprobs(logits, token_ids, torch.zeros_like(token_ids), 5)
    assert ranks.tolist() == [1]
    assert top_ids.tolist() == [[17, 2500, 0, 1, 2]]
    half = pytest.approx(-0.693147, abs=1e-5)
    assert (own.tolist(), top.tolist()) == ([half], [[half, half, *[-torch.inf] * 3]])
