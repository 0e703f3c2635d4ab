"""What top-k, top-p and min-p keep is what the reference keeps, ties included; draws follow the exact probabilities."""

from itertools import product

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE

from worker_svc.core.kernels.sampling import sample_tokens
from worker_svc.core.kernels.truncation import floors
from worker_svc.core.sampler import Truncation, _truncate

TOP_K, TOP_P, MIN_P = (0, 5, 40), (1.0, 0.6), (0.0, 0.05)
NUM_DRAWS = 200_000 if DEVICE.type == "cuda" else 300


def kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """bool[rows, columns] by the reference, in torch."""
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    rows = torch.arange(len(logits), device=logits.device)
    if top_k or top_p < 1:
        limits = torch.full_like(rows, top_k), torch.full((len(rows),), top_p, device=logits.device)
        _truncate(scaled, Truncation(rows, *limits, longest=None))
    return (scaled > -torch.inf) & (scaled >= torch.tensor(min_p).log())


def found(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    def each(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((len(logits),), value, dtype=dtype, device=logits.device)

    return floors(logits, each(temperature), each(top_k, torch.int64), each(top_p), each(min_p))


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), list(product(TOP_K, TOP_P, MIN_P)))
def test_what_is_kept_is_what_the_reference_keeps(top_k: int, top_p: float, min_p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(4, 97, generator=generator) * 2).to(DEVICE)
    logits[1] = logits[1].round()  # many are as likely as the last one kept
    logits[2, 5:] = -torch.inf
    logits[3] += 100.0
    lowest = found(logits, 0.7, top_k, top_p, min_p)
    assert torch.equal((logits >= lowest[:, None]) & (logits > -torch.inf), kept(logits, 0.7, top_k, top_p, min_p))


def test_rows_longer_than_a_block_and_halves() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 5001, generator=generator).to(DEVICE, torch.float16)
    for limits in ((50, 1.0, 0.0), (0, 0.6, 0.0), (300, 0.8, 0.01)):
        expected = kept(logits.float(), 1.3, *limits)
        assert torch.equal(logits.float() >= found(logits, 1.3, *limits)[:, None], expected)


def test_greedy_rows_and_rows_that_keep_all_have_no_floor() -> None:
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert found(logits, 0.0, 3, 0.5, 0.5).tolist() == [-torch.inf] * 2
    assert found(logits, 1.0, 0, 1.0, 0.0).tolist() == [-torch.inf] * 2


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), list(product((0, 6), (1.0, 0.85), (0.0, 0.1))))
def test_draws_follow_the_exact_probabilities(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.tensor([[2.0, 1.5, 1.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.0, -2.0, -4.0, -8.0]], device=DEVICE)
    temperature = 0.8
    allowed = kept(logits, temperature, top_k, top_p, min_p)
    exact = (logits.double() / temperature).masked_fill(~allowed, -torch.inf).softmax(-1)[0].cpu().numpy()
    lowest = found(logits, temperature, top_k, top_p, min_p).expand(NUM_DRAWS).contiguous()
    seeds = torch.arange(NUM_DRAWS, device=DEVICE) * 7919
    rows = logits.expand(NUM_DRAWS, -1).contiguous()
    temperatures = torch.full((NUM_DRAWS,), temperature, device=DEVICE)
    drawn = sample_tokens(rows, temperatures, seeds, seeds % 13, lowest)
    counts = np.bincount(drawn.cpu().numpy(), minlength=len(exact))
    assert counts[exact == 0].sum() == 0
    expected = exact[exact > 0] * NUM_DRAWS
    is_frequent = expected >= 5
    observed = np.append(counts[exact > 0][is_frequent], counts[exact > 0][~is_frequent].sum())
    expected = np.append(expected[is_frequent], expected[~is_frequent].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = max(1, len(expected) - 1)
    # Wilson and Hilferty (1931): the cube root of chi-square is about normal; 4 deviations are one case in 30,000.
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert deviation < 4
