"""What top-k, top-p and min-p keep is what the reference keeps, ties included; draws follow the exact probabilities."""

from itertools import product

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE

from worker_svc.core.kernels.sampling.draw import sample_tokens
from worker_svc.core.kernels.sampling.truncation import Cutoffs, cutoffs
from worker_svc.core.sampler import Truncation, _truncate

TOP_K, TOP_P, MIN_P = (0, 5, 40), (1.0, 0.6), (0.0, 0.05)
NUM_DRAWS = 200_000 if DEVICE.type == "cuda" else 300


def divided(differences: torch.Tensor, temperature: float) -> torch.Tensor:
    """Correctly rounded: by a number that is none of the device's, CUDA multiplies with its inverse."""
    return differences / torch.full_like(differences, temperature)


def kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """bool[rows, columns] by the reference, in torch."""
    scaled = divided(logits - logits.amax(-1, keepdim=True), temperature)
    rows = torch.arange(len(logits), device=logits.device)
    if top_k or top_p < 1:
        limits = torch.full_like(rows, top_k), torch.full((len(rows),), top_p, device=logits.device)
        _truncate(scaled, Truncation(rows, *limits, longest=None))
    return (scaled > -torch.inf) & (scaled >= torch.tensor(min_p).log())


def found(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Cutoffs:
    def each(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((len(logits),), value, dtype=dtype, device=logits.device)

    return cutoffs(logits, each(temperature), each(top_k, torch.int64), each(top_p), each(min_p))


def left(logits: torch.Tensor, temperature: float, cut: Cutoffs) -> torch.Tensor:
    """bool[rows, columns] by what `Cutoffs` says of itself."""
    lowest = cut.lowest[:, None]
    is_left = (lowest == -torch.inf) | (divided(logits.float() - cut.most[:, None], temperature) >= lowest)
    return is_left & (logits > -torch.inf)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), list(product(TOP_K, TOP_P, MIN_P)))
def test_what_is_kept_is_what_the_reference_keeps(top_k: int, top_p: float, min_p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(4, 97, generator=generator) * 2).to(DEVICE)
    logits[1] = logits[1].round()  # many are as likely as the last one kept
    logits[2, 5:] = -torch.inf
    logits[3] += 100.0
    cut = found(logits, 0.7, top_k, top_p, min_p)
    assert torch.equal(left(logits, 0.7, cut), kept(logits, 0.7, top_k, top_p, min_p))


@pytest.mark.parametrize("columns", [97, 5001])
@pytest.mark.parametrize("top_p", [1e-50, 1e-40, 1e-9])
def test_the_likeliest_is_left_however_small_top_p_is(columns: int, top_p: float) -> None:
    logits = (torch.randn(4, columns, generator=torch.Generator().manual_seed(8)) * 3).to(DEVICE)
    for top_k in (0, 5):
        is_left = left(logits, 1.0, found(logits, 1.0, top_k, top_p, 0.0))
        assert torch.equal(is_left, logits == logits.amax(-1, keepdim=True))


def test_top_p_is_of_what_top_k_had_room_for_not_of_all_that_are_as_likely() -> None:
    logits = torch.tensor([[2.0, *[1.0] * 6, *[0.0] * 30]], device=DEVICE)
    # Of the first two 0.73 and 0.27; of all that are as likely as the second, 0.31 and six times 0.11.
    cut = found(logits, 1.0, 2, 0.7, 0.0)
    assert left(logits, 1.0, cut).sum() == 1
    assert torch.equal(left(logits, 1.0, cut), kept(logits, 1.0, 2, 0.7, 0.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_of_several_programs_in_every_dtype(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 5001, generator=generator).to(DEVICE, dtype)
    for limits in ((50, 1.0, 0.0), (0, 0.6, 0.0), (300, 0.8, 0.01)):
        expected = kept(logits.float(), 1.3, *limits)
        assert torch.equal(left(logits, 1.3, found(logits, 1.3, *limits)), expected)


@pytest.mark.parametrize(
    ("columns", "limits"),
    [
        (9000, (700, 1.0, 0.0)),  # more than are listed, of few groups
        (9000, (700, 0.9, 0.0)),
        (9000, (70, 1.0, 0.0)),  # listed, from more groups than are looked at at once
        (9000, (0, 0.999, 0.0)),
        (9000, (9000, 1.0, 0.0)),  # more than are not -inf
        (9000, (9000, 0.5, 0.0)),
        (40_000, (290, 0.95, 0.0)),  # more groups than are listed from
        (40_000, (0, 0.9, 0.0)),
    ],
)
def test_rows_that_keep_much(columns: int, limits: tuple[int, float, float]) -> None:
    logits = (torch.randn(2, columns, generator=torch.Generator().manual_seed(5)) * 2).to(DEVICE)
    logits[:, ::7] = -torch.inf
    assert torch.equal(left(logits, 0.9, found(logits, 0.9, *limits)), kept(logits, 0.9, *limits))


@pytest.mark.parametrize("num_equal", [6, 700, 5000])
def test_equals_are_left_however_many_and_weigh_as_much_as_top_k_had_room_for(num_equal: int) -> None:
    logits = torch.full((1, 6000), -3.0, device=DEVICE)
    logits[0, 7], logits[0, 11 : 11 + num_equal] = 2.0, 1.0
    for top_k, top_p in ((3, 1.0), (3, 0.57), (3, 0.58), (5, 0.4)):
        cut = found(logits, 1.0, top_k, top_p, 0.0)
        assert left(logits, 1.0, cut).sum() == (1 if (top_k, top_p) in ((3, 0.57), (5, 0.4)) else 1 + num_equal)
        assert torch.equal(left(logits, 1.0, cut), kept(logits, 1.0, top_k, top_p, 0.0))


def test_top_p_is_of_all_that_top_k_left_in_whichever_groups() -> None:
    logits = torch.full((1, 6000), -3.0, device=DEVICE)
    logits[0, 10], logits[0, 5000] = 2.0, 1.0
    assert [int(left(logits, 1.0, found(logits, 1.0, 2, p, 0.0)).sum()) for p in (0.7, 0.8)] == [1, 2]


def test_likely_tokens_side_by_side_are_found_by_what_their_group_weighs() -> None:
    logits = torch.full((1, 6000), -12.0, device=DEVICE)
    logits[0, 256:276] = torch.linspace(1.0, 0.0, 20)
    logits[0, 4000:4300:30] = 0.5
    for top_p in (0.3, 0.5, 0.9, 0.999):
        assert torch.equal(left(logits, 0.7, found(logits, 0.7, 0, top_p, 0.0)), kept(logits, 0.7, 0, top_p, 0.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_both_signs_zeros_and_rows_that_lie_apart(dtype: torch.dtype) -> None:
    wide = torch.linspace(-1.5, 1.5, 3001).repeat(3, 1).to(DEVICE, dtype)
    wide[1] = wide[1].round()
    wide[1, ::2] *= -0.0  # both zeros are one logit
    wide[2] = -(wide[2].abs()) - 2
    logits = wide[:, :2900]
    for limits in ((0, 0.55, 0.0), (20, 0.9, 0.0), (1400, 0.5, 0.0), (1500, 1.0, 0.0)):
        expected = kept(logits.float(), 1.1, *limits)
        assert torch.equal(left(logits, 1.1, found(logits, 1.1, *limits)), expected)


def test_rows_that_ask_for_different_things_do_not_touch_each_other() -> None:
    logits = (torch.randn(6, 2100, generator=torch.Generator().manual_seed(4)) * 2).to(DEVICE)
    asked = [
        (0.0, 3, 0.5, 0.5),
        (1.0, 0, 1.0, 0.0),
        (1.0, 7, 1.0, 0.0),
        (0.8, 0, 0.4, 0.0),
        (1.2, 9, 0.5, 0.0),
        (1.0, 0, 1.0, 0.2),
    ]
    temperatures, top_k, top_p, min_p = (torch.tensor(column, device=DEVICE) for column in zip(*asked, strict=True))
    cut = cutoffs(logits, temperatures, top_k, top_p, min_p)
    for row, limits in enumerate(asked):
        alone = found(logits[row : row + 1], *limits)
        assert (cut.most[row], cut.lowest[row]) == (alone.most[0], alone.lowest[0])


def test_greedy_rows_and_rows_that_keep_all_are_not_cut() -> None:
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert found(logits, 0.0, 3, 0.5, 0.5).lowest.tolist() == [-torch.inf] * 2
    assert found(logits, 1.0, 0, 1.0, 0.0).lowest.tolist() == [-torch.inf] * 2


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), list(product((0, 6), (1.0, 0.85), (0.0, 0.1))))
def test_draws_follow_the_exact_probabilities(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.tensor([[2.0, 1.5, 1.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.0, -2.0, -4.0, -8.0]], device=DEVICE)
    temperature = 0.8
    allowed = kept(logits, temperature, top_k, top_p, min_p)
    exact = (logits.double() / temperature).masked_fill(~allowed, -torch.inf).softmax(-1)[0].cpu().numpy()
    cut = found(logits, temperature, top_k, top_p, min_p)
    cut = Cutoffs(*(column.expand(NUM_DRAWS).contiguous() for column in (cut.most, cut.lowest)))
    seeds = torch.arange(NUM_DRAWS, device=DEVICE) * 7919
    rows = logits.expand(NUM_DRAWS, -1).contiguous()
    temperatures = torch.full((NUM_DRAWS,), temperature, device=DEVICE)
    drawn = sample_tokens(rows, temperatures, seeds, seeds % 13, cut)
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
