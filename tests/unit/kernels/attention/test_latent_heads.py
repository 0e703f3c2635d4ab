"""Heads of latent attention and values out of them, as the reference makes them in double precision; that they compile
for a Hopper.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hopper import compile_for_hopper
from kernel_inputs import DEVICE, DTYPE, assert_near, randn
from torch import Tensor

from worker_svc.core.kernels.attention.latent_heads import LatentShape, make_heads, make_values
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import LatentAttentionSpec, NormSpec, RopeSpec, StoredRows
from worker_svc.core.operations import torch_latents

ROWS = StoredRows("it")
MODULE = "worker_svc.core.kernels.attention.latent_heads"


@dataclass(frozen=True)
class Layer:
    spec: LatentAttentionSpec
    up: Tensor
    norm: RMSNorm


def make_layer(*, heads: int, plain: int, values: int, rank: int, rotated: int, is_paired: bool) -> Layer:
    norm = NormSpec("norm", 1e-5)
    rope = RopeSpec(10000.0, is_paired=is_paired)
    spec = LatentAttentionSpec(heads, rank, rotated, plain, values, ROWS, ROWS, norm, ROWS, ROWS, rope)
    layer = Layer(
        spec,
        randn(heads, plain + values, rank, seed=1, scale=rank**-0.5),
        RMSNorm(Placement(DEVICE, DTYPE), norm, rank),
    )
    layer.norm.weight.copy_(1 + randn(rank, seed=2, scale=0.3))
    return layer


def doubled(layer: Layer) -> Layer:
    norm = RMSNorm(Placement(DEVICE, torch.float64), NormSpec("norm", 1e-5), layer.spec.rank)
    norm.weight.copy_(layer.norm.weight)
    return replace(layer, up=layer.up.double(), norm=norm)


def shape_of(spec: LatentAttentionSpec) -> LatentShape:
    return LatentShape(
        spec.num_heads, spec.plain_dims, spec.value_dims, spec.rank, spec.rotated_dims, spec.has_paired_dims
    )


@pytest.mark.parametrize("rows", [1, 17, 70, 1030])
@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("sizes", [(24, 20, 32, 16), (128, 128, 512, 64), (40, 33, 320, 12)], ids=str)
def test_heads_and_values_are_those_of_the_reference(
    rows: int, sizes: tuple[int, int, int, int], *, is_paired: bool
) -> None:
    if rows > 100 and sizes[2] > 100:
        rows = 200  # as many as the interpreter does in a few seconds
    plain, values, rank, rotated = sizes
    layer = make_layer(heads=3, plain=plain, values=values, rank=rank, rotated=rotated, is_paired=is_paired)
    spec, norm = layer.spec, (layer.norm.weight, layer.norm.eps)
    # Parts of one product, as most families have them.
    both = randn(rows, 3 * spec.query_dims + spec.head_dim, seed=3)
    queries, down = both.split([3 * spec.query_dims, spec.head_dim], dim=1)
    heads = make_heads(queries, down, norm, layer.up, shape_of(spec))
    assert_near(heads, torch_latents.make_heads(queries.double(), down.double(), doubled(layer)))
    attended = randn(rows, 3 * spec.head_dim, seed=4)
    halves = attended.view(rows, 3, 2, spec.head_dim // 2)
    expected = torch_latents.make_values(attended.double(), doubled(layer))
    halves[..., : rotated // 2] = torch.nan  # nobody writes them
    assert_near(make_values(attended, layer.up, shape_of(spec)), expected)


def launch(function: Any) -> None:
    shape = LatentShape(16, 128, 128, 512, 64, is_paired=True)
    up, norm = torch.zeros(16, 256, 512, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.bfloat16)
    for rows in (1, 32, 64, 2048):
        both = torch.zeros(rows, 16 * 192 + 576, dtype=torch.bfloat16)
        if function is make_heads:
            make_heads(*both.split([16 * 192, 576], dim=1), (norm, 1e-6), up, shape)
        else:
            make_values(torch.zeros(rows, 16 * 576, dtype=torch.bfloat16), up, shape)


@pytest.mark.parametrize(("kernel", "function"), [("_make_heads", make_heads), ("_make_values", make_values)])
def test_kernels_fit_a_hopper(monkeypatch: pytest.MonkeyPatch, kernel: str, function: Any) -> None:
    compile_for_hopper(monkeypatch, f"{MODULE}.{kernel}", "mma", launch, function)
