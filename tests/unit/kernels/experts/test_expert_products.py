"""Products with experts' weights against double precision, however rows are routed; that they compile for a Hopper."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import triton
from hopper import compile_for_hopper, on_hopper
from kernel_inputs import DEVICE, DTYPE, assert_near, assert_replays_alike, randn
from torch import Tensor

from worker_svc.core.formats.stacked.floats import StackedFloats
from worker_svc.core.formats.stacked.interface import StackedWeight
from worker_svc.core.kernels.compiling import compile_launches
from worker_svc.core.kernels.experts.activation import scale_by_sigmoid
from worker_svc.core.kernels.experts.routing import Routed
from worker_svc.core.kernels.experts.rows import add_rows, gate_rows
from worker_svc.core.kernels.experts.sorting import SortedPairs, sort_pairs
from worker_svc.core.kernels.experts.tiles import add_tiles, gate_tiles, most_tiles
from worker_svc.core.kernels.experts.tuning import tile_for
from worker_svc.core.kernels.experts.weights import FLOATS, ExpertWeights
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import NormSpec, RouterSpec
from worker_svc.core.operations.interface import Activation
from worker_svc.core.operations.torch_experts import gated
from worker_svc.core.operations.triton_experts import add_experts, norm_score

GLM = RouterSpec("router", 4, "sigmoid", renormalizes=True, correction="it", num_groups=2, num_chosen_groups=2)
TOP_K, EXPERTS = 3, 6
NORM = RMSNorm(Placement(torch.device("cpu"), torch.bfloat16), NormSpec("norm", 1e-6), 2048)
KERNELS = "worker_svc.core.kernels.experts"


def routed(rows: int, routing: str) -> Routed:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(rows)])
    if routing == "same":  # all rows have the same experts, some experts have none
        ids = torch.tensor([[4, 0, 5]]).expand(rows, -1)
    if routing == "one":  # so may idle rows
        ids = torch.full((rows, TOP_K), 2)
    return Routed(ids.to(DEVICE, torch.int32).contiguous(), randn(rows, TOP_K, seed=9, dtype=torch.float32).abs())


def floats(weight: Tensor) -> ExpertWeights:
    return ExpertWeights(FLOATS, weight, weight.shape[2])


def expected_gates(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routed, *, activation: Activation
) -> Tensor:
    ids = routing.ids.flatten().long()
    rows = x.double().repeat_interleave(TOP_K, 0)
    product = torch.einsum("pk,pnk->pn", rows, weight.double()[ids])
    gate, up = (product if bias is None else product + bias.double()[ids]).chunk(2, 1)
    return gated(gate, up, activation)


def expected_sums(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routed, residual: Tensor) -> Tensor:
    ids = routing.ids.flatten().long()
    product = torch.einsum("pk,pnk->pn", x.double(), weight.double()[ids])
    product = product if bias is None else product + bias.double()[ids]
    return residual.double() + (product * routing.weights.double().reshape(-1, 1)).unflatten(0, (-1, TOP_K)).sum(1)


@pytest.mark.parametrize("rows", [1, 5, 40, 150])
@pytest.mark.parametrize("routing", ["any", "same", "one"])
@pytest.mark.parametrize(("size", "hidden", "bias"), [(48, 200, False), (64, 64, True)])
def test_tiles_give_the_sum_over_the_chosen_experts(
    rows: int, routing: str, size: int, hidden: int, *, bias: bool
) -> None:
    activation: Activation = {5: "gelu_tanh", 40: "clamped_silu"}.get(rows, "silu")
    scale = 3 if activation == "clamped_silu" else 1  # some are clamped
    to, x, residual = routed(rows, routing), randn(rows, hidden, seed=1), randn(rows, hidden, seed=2)
    up, down = (
        randn(EXPERTS, outputs, inputs, seed=inputs, scale=scale * inputs**-0.5)
        for outputs, inputs in ((2 * size, hidden), (hidden, size))
    )
    up_bias, down_bias = (randn(EXPERTS, each.shape[1], seed=5) if bias else None for each in (up, down))
    expected = expected_gates(x, up, up_bias, to, activation=activation)
    pairs = sort_pairs(to.ids, EXPERTS)
    between = gate_tiles(x, floats(up), up_bias, to, pairs, activation=activation)
    assert_near(between, expected)
    in_order = gate_tiles(x, floats(up), up_bias, to, pairs, activation=activation, sorts=True)
    assert torch.equal(in_order, between[pairs.order.long()])
    sums, by_rows = expected_sums(between, down, down_bias, to, residual), residual.clone()
    add_tiles(between, floats(down), down_bias, to, pairs, residual)
    assert_near(residual, sums)
    if rows < 10:
        assert_near(gate_rows(x, floats(up), up_bias, to, activation=activation), expected)
        add_rows(between, floats(down), down_bias, to, by_rows)
        assert_near(by_rows, sums)


@pytest.mark.parametrize("has_bias", [True, False])
def test_weights_are_those_of_what_experts_are_given_or_of_what_they_give(*, has_bias: bool) -> None:
    to, x = routed(40, "any"), randn(40, 64, seed=1)
    up, down = randn(EXPERTS, 96, 64, seed=2, scale=0.1), randn(EXPERTS, 64, 48, seed=3, scale=0.1)
    bias = randn(EXPERTS, 96, seed=5) if has_bias else None
    pairs, ids = sort_pairs(to.ids, EXPERTS), to.ids.flatten().long()
    between = gate_tiles(x, floats(up), bias, to, pairs, activation="silu", weighs=True)
    rows = x.double().repeat_interleave(TOP_K, 0) * to.weights.double().reshape(-1, 1)
    product = torch.einsum("pk,pnk->pn", rows, up.double()[ids])
    gate, ups = (product if bias is None else product + bias.double()[ids]).chunk(2, 1)
    expected = gated(gate, ups, "silu")
    assert_near(between, expected)
    total = torch.zeros_like(x)
    add_tiles(between, floats(down), None, to, pairs, total, weighs=False)
    given = torch.einsum("pk,pnk->pn", between.double(), down.double()[ids]).unflatten(0, (-1, TOP_K)).sum(1)
    assert_near(total, given)
    few, by_rows = Routed(to.ids[:4], to.weights[:4]), torch.zeros_like(x[:4])
    assert_near(gate_rows(x[:4], floats(up), bias, few, activation="silu", weighs=True), expected[: 4 * TOP_K])
    add_rows(between[: 4 * TOP_K], floats(down), None, few, by_rows, weighs=False)
    assert_near(by_rows, given[:4])


@pytest.mark.parametrize("num_pairs", [1, 5, 6, 100, 1000])
def test_there_are_tiles_for_the_worst_routing(num_pairs: int) -> None:
    tile, used = tile_for(num_pairs, EXPERTS), min(num_pairs, EXPERTS)
    most = 0
    for full in range(num_pairs // tile.pairs + 1):  # tiles of the first expert beside one pair, if all others have one
        rest = num_pairs - used - full * tile.pairs
        if rest >= 0:
            counts = [1 + full * tile.pairs, *[1] * (used - 1)]
            counts[-1] += rest
            most = max(most, sum(-(-count // tile.pairs) for count in counts))
    assert most == most_tiles(num_pairs, EXPERTS, tile)


def test_a_shared_expert_s_rows_are_scaled_by_their_own_sigmoid() -> None:
    values, x, gate = randn(5, 1100, seed=1), randn(5, 1300, seed=2), randn(1300, seed=3, scale=0.05)
    expected = values.double() * torch.sigmoid(x.double() @ gate.double()).unsqueeze(1)
    scale_by_sigmoid(values, x, gate)
    assert_near(values, expected)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_graph_gives_what_it_gives_launched_one_by_one() -> None:
    x, up, down = randn(40, 64, seed=1), randn(EXPERTS, 96, 64, seed=2), randn(EXPERTS, 64, 48, seed=3)
    to = routed(40, "any")

    def compute() -> Tensor:
        total = torch.zeros(40, 64, dtype=DTYPE, device=DEVICE)
        pairs = sort_pairs(to.ids, EXPERTS)
        add_tiles(gate_tiles(x, floats(up), None, to, pairs, activation="silu"), floats(down), None, to, pairs, total)
        return total

    assert_replays_alike(compute, times=3)


def sample(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Routed]:
    """x, gates and ups, downs, total: of Qwen3-30B-A3B, with fewer experts."""
    x, total = (torch.zeros(rows, 2048, dtype=torch.bfloat16) for _ in range(2))
    up, down = torch.zeros(8, 1536, 2048, dtype=torch.bfloat16), torch.zeros(8, 2048, 768, dtype=torch.bfloat16)
    return x, up, down, total, Routed(torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows, 8))


def launch_gates(dtype: torch.dtype) -> None:
    for rows in (8, 64, 256):  # of an expert
        x, up, _, _, to = sample(rows)
        pairs = SortedPairs(torch.zeros(rows * 8, dtype=torch.int32), *torch.zeros(2, 8, dtype=torch.int32))
        gate_tiles(x.to(dtype), floats(up.to(dtype)), None, to, pairs, activation="silu")


def launch_adds(dtype: torch.dtype) -> None:
    vars(importlib.import_module(f"{KERNELS}.tiles"))["_add_up"] = MagicMock()  # another test compiles it
    for rows in (8, 64, 256):  # of an expert
        _, _, down, total, to = sample(rows)
        pairs = SortedPairs(torch.zeros(rows * 8, dtype=torch.int32), *torch.zeros(2, 8, dtype=torch.int32))
        add_tiles(torch.zeros(rows * 8, 768, dtype=dtype), floats(down.to(dtype)), None, to, pairs, total.to(dtype))


def compile_all() -> None:
    compiled: list[str] = []

    def observe(**event: Any) -> None:
        compiled.append(event["src"].name)

    def launch() -> None:
        for rows in (1, 2, 64, 256, 1100, 4096, 8192):
            x, up, down, total, _ = sample(rows)
            mixture = Mixture(up, down)
            add_experts(*norm_score(x, NORM, mixture.router), mixture, total)
            scale_by_sigmoid(x, total, total[0])

    triton.knobs.compilation.listener = observe
    compile_launches(launch, 2)
    assert set(compiled) == {
        *("_score_row", "_score_experts", "_choose_experts", "_scale_by_sigmoid"),
        *("_sort_pairs", "_count_pairs", "_sort_parts"),
        *("_gate_float_rows", "_add_float_rows", "_gate_tiles", "_multiply_tiles", "_add_up", "_rms_norm"),
    }


@dataclass(frozen=True)
class Layer:
    weight: StackedWeight
    bias: Tensor | None = None


@dataclass(frozen=True)
class Scores:
    weight: Tensor
    correction: Tensor
    bias: Tensor | None = None
    spec: RouterSpec = GLM


class Mixture:
    activation: Activation = "silu"

    def __init__(self, up: Tensor, down: Tensor) -> None:
        self.input, self.output = Layer(StackedFloats(up)), Layer(StackedFloats(down))
        self.router = Scores(up[:, 0], correction=torch.zeros(8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_of_floats_fit_a_hopper(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    compile_for_hopper(monkeypatch, f"{KERNELS}.tiles._gate_tiles", "wgmma", launch_gates, dtype)
    compile_for_hopper(monkeypatch, f"{KERNELS}.tiles._multiply_tiles", "wgmma", launch_adds, dtype)


def test_all_that_a_mixture_launches_compiles_for_a_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    on_hopper(monkeypatch, compile_all)
