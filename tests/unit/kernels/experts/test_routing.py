"""The choice of experts against torch, with ties and with rows that are no numbers; the order of pairs."""

from dataclasses import dataclass, replace

import pytest
import torch
from kernel_inputs import DEVICE, assert_near, randn
from torch import Tensor

from worker_svc.core.kernels.experts.routing import choose_experts, score_experts, score_rows
from worker_svc.core.kernels.experts.sorting import sort_pairs
from worker_svc.core.models.spec import RouterSpec
from worker_svc.core.operations.torch_experts import choose_experts as expected_experts
from worker_svc.core.operations.torch_experts import score_experts as expected_scores
from worker_svc.core.operations.triton_experts import choosing_of


@dataclass(frozen=True)
class Router:
    spec: RouterSpec
    weight: Tensor
    correction: Tensor | None = None
    bias: Tensor | None = None


SPEC = RouterSpec("router", top_k=3)
GROUPS = RouterSpec(
    "router", 5, "sigmoid", renormalizes=True, scale=2.5, correction="it", num_groups=4, num_chosen_groups=2
)


@pytest.mark.parametrize("rows", [1, 5, 16, 37])
@pytest.mark.parametrize("experts", [4, 60, 128])
@pytest.mark.parametrize(
    "spec",
    [SPEC, replace(SPEC, renormalizes=True, scale=1.5), replace(SPEC, score="sigmoid", correction="it"), GROUPS],
    ids=["softmax", "renormalised", "corrected", "groups"],
)
def test_the_best_experts_and_their_weights_are_those_of_torch(rows: int, experts: int, spec: RouterSpec) -> None:
    if spec.num_groups > 1 and experts < 16:
        experts = 16
    correction = None if spec.correction is None else randn(experts, seed=3, dtype=torch.float32)
    bias = randn(experts, seed=4) if rows in (5, 16) else None
    router = Router(spec, randn(experts, 500, seed=1, scale=0.1), correction, bias)
    x = randn(rows, 500, seed=2)
    logits = score_experts(x, router.weight, router.bias)
    expected = x.double() @ router.weight.double().t()
    assert_near(logits.sum(0), expected if router.bias is None else expected + router.bias.double(), 1e-5)
    routed = choose_experts(logits, correction, choosing_of(spec))
    ids, weights = expected_experts(expected_scores(x, router)[0], router)
    assert routed.ids.long().equal(ids)
    assert_near(routed.weights, weights, 1e-4)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("has_bias", [False, True])
def test_scores_of_few_rows_take_their_norm_along(rows: int, *, has_bias: bool) -> None:
    x, norm, weight = randn(rows, 500, seed=1), 1 + randn(500, seed=2, scale=0.3), randn(13, 500, seed=3, scale=0.1)
    bias = randn(13, seed=4) if has_bias else None
    normed, scores = score_rows(x, (norm, 1e-5), weight, bias)
    wide = x.double()
    assert_near(normed, wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double())
    expected = normed.double() @ weight.double().t()
    assert_near(scores.sum(0), expected if bias is None else expected + bias.double(), 1e-5)


@pytest.mark.parametrize(("rows", "experts"), [(1030, 70), (4100, 20), (8200, 130)])
def test_scores_of_a_chunk_of_a_prompt_are_those_of_torch(rows: int, experts: int) -> None:
    x, weight, bias = randn(rows, 300, seed=1), randn(experts, 300, seed=2, scale=0.1), randn(experts, seed=3)
    expected = x.double() @ weight.double().t()
    assert_near(score_experts(x, weight, None).sum(0), expected, 1e-5)
    assert_near(score_experts(x, weight, bias).sum(0), expected + bias.double(), 1e-5)


def test_of_experts_that_are_as_good_the_first_are_chosen_whatever_rows_stand_beside() -> None:
    logits = torch.zeros(3, 8, device=DEVICE)
    logits[1, 5] = 1.0
    assert choose_experts(logits[None], None, choosing_of(SPEC)).ids.tolist() == [[0, 1, 2], [5, 0, 1], [0, 1, 2]]


def test_numbers_of_either_sign_are_in_order_and_zeros_of_either_are_as_good() -> None:
    by_logits = replace(choosing_of(SPEC), is_by_logits=True)
    rows = [[-0.0, 0.0, -1.0, -0.0], [-3.0, -2.0, -2.0, -5.0], [-1e-40, -float("inf"), 1e-40, 0.0]]
    logits = torch.tensor(rows, device=DEVICE)[None]
    assert choose_experts(logits, None, by_logits).ids.tolist() == [[0, 1, 3], [1, 2, 0], [2, 3, 0]]
    corrected = replace(choosing_of(SPEC), is_sigmoid=True)
    lower = torch.tensor([-2.0, -2.5, -2.0, -1.5], device=DEVICE)  # all scores are below nought then
    assert choose_experts(torch.zeros(1, 1, 4, device=DEVICE), lower, corrected).ids.tolist() == [[3, 0, 2]]


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -0x00400000, -1])
def test_a_score_that_is_no_number_names_experts(bits: int) -> None:
    by_logits = replace(choosing_of(SPEC), is_by_logits=True)
    number = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for place in range(5):
        logits = torch.arange(5, dtype=torch.float32)
        logits[place] = number
        [ids] = choose_experts(logits.to(DEVICE)[None, None], None, by_logits).ids.tolist()
        assert all(0 <= expert < 5 for expert in ids)


def test_of_logits_whose_sigmoids_are_all_one_the_largest_are_chosen() -> None:
    spec = RouterSpec("router", 2, "sigmoid")
    logits = torch.tensor([[30.0, 40.0, -3.0, 50.0]], device=DEVICE)
    router = Router(spec, logits.t())
    ids, weights = expected_experts(logits, router)
    routed = choose_experts(logits[None], None, choosing_of(spec))
    assert routed.ids.tolist() == ids.tolist() == [[3, 1]]
    assert routed.weights.tolist() == weights.tolist() == [[1.0, 1.0]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("spec", [SPEC, GROUPS], ids=["softmax", "groups"])
def test_rows_that_are_no_numbers_still_name_experts(spec: RouterSpec) -> None:
    logits = torch.full((2, 12), torch.nan, device=DEVICE)
    correction = torch.zeros(12, device=DEVICE) if spec.correction is not None else None
    ids = choose_experts(logits[None], correction, choosing_of(spec)).ids
    assert bool(((ids >= 0) & (ids < 12)).all())


@pytest.mark.parametrize("pairs", [(1, 2), (700, 3), (1500, 3), (1366, 3), (2000, 3)])
def test_pairs_are_sorted_by_expert_and_keep_their_order(pairs: tuple[int, int]) -> None:
    ids = torch.randint(0, 9, pairs, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.int32)
    ids[ids == 4] = 7  # nobody's
    found = sort_pairs(ids, 10)
    flat = ids.flatten().long()
    assert found.order.long().equal(flat.argsort(stable=True))
    counts = flat.bincount(minlength=10)
    assert found.counts.long().equal(counts)
    assert found.firsts.long().equal(counts.cumsum(0) - counts)
