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

from worker_svc.core.attention import torch_latents
from worker_svc.core.kernels.attention.latent_heads import make_heads, make_values
from worker_svc.core.kernels.attention.latent_shape import LatentShape
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import LatentAttentionSpec, NormSpec, RopeSpec, StoredRows

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
    return LatentShape(spec.plain_dims, spec.value_dims, spec.rank, spec.rotated_dims, spec.has_paired_dims)


def make_all_values(attended: Tensor, layer: Layer) -> Tensor:
    out = attended.new_full((len(attended), len(layer.up) * layer.spec.value_dims), torch.nan)
    make_values(attended, layer.up, shape_of(layer.spec), out)
    return out


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
    assert_near(make_all_values(attended, layer), expected)


@pytest.mark.parametrize(("rows", "wanted"), [(40, 0), (40, 7), (70, 64), (70, 65), (70, 1 << 31)])
def test_of_rows_that_are_not_wanted_keys_alone_are_made(rows: int, wanted: int) -> None:
    layer = make_layer(heads=3, plain=24, values=20, rank=32, rotated=16, is_paired=False)
    spec, norm, count = layer.spec, (layer.norm.weight, layer.norm.eps), torch.tensor([wanted], device=DEVICE)
    queries, down = randn(rows, 3 * spec.query_dims, seed=3), randn(rows, spec.head_dim, seed=4)
    queries[wanted:] = torch.nan
    heads = make_heads(queries, down, norm, layer.up, shape_of(spec), count).view(rows, 4, -1)
    expected = torch_latents.make_heads(queries.double(), down.double(), doubled(layer)).view(rows, 4, -1)
    assert_near(heads[:, 3], expected[:, 3])
    if wanted:
        assert_near(heads[:wanted], expected[:wanted])
    attended, out = randn(rows, 3 * spec.head_dim, seed=5), torch.full((rows, 3 * 20), 7.0, dtype=DTYPE, device=DEVICE)
    make_values(attended, layer.up, shape_of(spec), out, count)
    if wanted:
        assert_near(out[:wanted], make_all_values(attended, layer)[:wanted])
    assert bool((out[wanted:] == 7).all())


def launch(function: Any) -> None:
    shape, count = LatentShape(128, 128, 512, 64, is_paired=True), torch.zeros(1, dtype=torch.int64)
    up, norm = torch.zeros(16, 256, 512, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.bfloat16)
    for rows in (1, 32, 64, 2048):
        both = torch.zeros(rows, 16 * 192 + 576, dtype=torch.bfloat16)
        attended, out = (torch.zeros(rows, 16 * dims, dtype=torch.bfloat16) for dims in (576, 128))
        for num_absorbed in (None, count):
            if function is make_heads:
                make_heads(*both.split([16 * 192, 576], dim=1), (norm, 1e-6), up, shape, num_absorbed)
            else:
                make_values(attended, up, shape, out, num_absorbed)


@pytest.mark.parametrize(("kernel", "function"), [("_make_heads", make_heads), ("_make_values", make_values)])
def test_kernels_fit_a_hopper(monkeypatch: pytest.MonkeyPatch, kernel: str, function: Any) -> None:
    compile_for_hopper(monkeypatch, f"{MODULE}.{kernel}", "mma", launch, function)
