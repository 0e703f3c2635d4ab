"""Products with experts' weights as they are stored, in 8 and 4 bits, against what these stand for."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import triton.language as tl
from kernel_inputs import DEVICE, DTYPE, assert_near, randn
from published_experts import of_qwen
from torch import Tensor

from worker_svc.core.formats.fp8_channel import FP8, round_rows
from worker_svc.core.formats.int4 import INT4_BITS, Integers
from worker_svc.core.formats.integers import IntFormat
from worker_svc.core.formats.interface import Tensors
from worker_svc.core.formats.stacked.fp4 import GROUP, StackedFp4, pack_fp4
from worker_svc.core.formats.stacked.fp8 import StackedFp8
from worker_svc.core.formats.stacked.int4 import StackedInt4, StackedInt4Format, pack_int4
from worker_svc.core.formats.stacked.interface import StackedWeight
from worker_svc.core.formats.stacked.together import TOGETHER
from worker_svc.core.formats.words import BLOCK, WORDS
from worker_svc.core.kernels import words
from worker_svc.core.kernels.experts import weights as kernel_weights
from worker_svc.core.kernels.experts import widening
from worker_svc.core.kernels.experts.routing import Routed
from worker_svc.core.kernels.experts.rows import add_rows, gate_rows, takes_rows
from worker_svc.core.kernels.experts.sorting import sort_pairs
from worker_svc.core.kernels.experts.tiles import add_tiles, gate_tiles
from worker_svc.core.kernels.experts.tuning import Tile
from worker_svc.core.kernels.experts.weights import FLOATS, ExpertWeights
from worker_svc.core.kernels.experts.weights import FP8 as FP8_FORM
from worker_svc.core.kernels.experts.widening import takes_floats, widen
from worker_svc.core.kernels.launch import INTERPRETED
from worker_svc.core.operations.torch_experts import gated
from worker_svc.core.operations.triton_experts import weights_of
from worker_svc.core.quantization.spec import IntSpec

EXPERTS, TOP_K = 5, 2
INT4_GROUPS = {"int4": None, **{f"int4_{group}": group for group in (16, 32, 64, 128, 256)}}
EXPERT_KERNELS = "worker_svc.core.kernels.experts"
TILES, WORD_ROWS, FLOAT_ROWS = (f"{EXPERT_KERNELS}.{name}" for name in ("tiles", "word_rows", "float_rows"))


def four_bits(outputs: int, inputs: int, seed: int, powers: int = 6) -> StackedFp4:
    generator = torch.Generator().manual_seed(seed)
    packed = [
        torch.randint(256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8) for _ in range(EXPERTS)
    ]
    # Of each expert another range, so that outputs have scales.
    scales = [
        torch.randint(118 + expert - powers, 118 + expert, (outputs, -(-inputs // GROUP)), generator=generator).to(
            torch.uint8
        )
        for expert in range(EXPERTS)
    ]
    found = [pack_fp4(*each) for each in zip(packed, scales, strict=True)]
    numbers, exponents, of_outputs = (torch.stack([each[name] for each in found]).to(DEVICE) for name in found[0])
    return StackedFp4(numbers, exponents, of_outputs, inputs)


def eight_bits(outputs: int, inputs: int, seed: int, group: int | None) -> StackedFp8:
    weight = randn(EXPERTS, outputs, inputs, seed=seed, scale=inputs**-0.5, dtype=torch.float32)
    if group is None:
        numbers, scales = round_rows(weight)
        return StackedFp8(numbers, scales, None)
    scales = randn(EXPERTS, outputs, -(-inputs // group), seed=seed + 1, dtype=torch.float32).abs() * inputs**-0.5
    return StackedFp8(randn(EXPERTS, outputs, inputs, seed=seed, dtype=torch.float32).to(FP8), scales, group)


@dataclass(frozen=True)
class Drawn(IntFormat):
    """Gives integers that are there."""

    integers: Integers

    def read(self, _tensors: Tensors) -> Integers:
        return self.integers


def integers(outputs: int, inputs: int, seed: int, group: int | None) -> StackedInt4:
    """Any numbers and zeros; scales as checkpoints have them, in half precision."""
    draw = torch.Generator().manual_seed(seed)
    groups, found = 1 if group is None else -(-inputs // group), []
    for _ in range(EXPERTS):
        numbers, zeros = (
            torch.randint(0, 16, (outputs, count), generator=draw, dtype=torch.int32) for count in (inputs, groups)
        )
        scales = ((torch.rand(outputs, groups, generator=draw) + 0.5) * 0.2 * inputs**-0.5).half().float()
        spec = IntSpec(INT4_BITS, is_packed=True, group=group, has_zeros=True, has_order=False)
        found.append(pack_int4(Drawn(spec, Integers(numbers, zeros, scales)), {}))
    tensors = {name: torch.stack([each[name] for each in found]).to(DEVICE) for name in found[0]}
    return StackedInt4Format(group).stack(tensors, inputs)


def weights(form: str, outputs: int, inputs: int, seed: int) -> StackedWeight:
    if form == "fp4":
        return four_bits(outputs, inputs, seed)
    if form.startswith("int4"):
        return integers(outputs, inputs, seed, INT4_GROUPS[form])
    return eight_bits(outputs, inputs, seed, {"fp8": None, "fp8_groups": 64, "fp8_few": 32}[form])


def floats(weight: StackedWeight) -> Tensor:
    return torch.stack([weight.of(expert).double() for expert in range(weight.count)])


@dataclass(frozen=True)
class Products:
    """Rows of some experts, and what both products with these are by double precision."""

    to: Routed
    x: Tensor
    residual: Tensor
    bias: Tensor
    up: StackedWeight
    down: StackedWeight

    def gates(self) -> Tensor:
        ids = self.to.ids.flatten().long()
        rows = self.x.double().repeat_interleave(TOP_K, 0)
        product = torch.einsum("pk,pnk->pn", rows, floats(self.up)[ids]) + self.bias.double()[ids]
        return gated(*product.chunk(2, 1), "clamped_silu")

    def sums(self, between: Tensor) -> Tensor:
        product = torch.einsum("pk,pnk->pn", between.double(), floats(self.down)[self.to.ids.flatten().long()])
        given = product * self.to.weights.double().reshape(-1, 1)
        return self.residual.double() + given.unflatten(0, (-1, TOP_K)).sum(1)


def products(rows: int, up: StackedWeight, down: StackedWeight) -> Products:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(rows)])
    to = Routed(ids.to(DEVICE, torch.int32).contiguous(), randn(rows, TOP_K, seed=9, dtype=torch.float32).abs())
    x, residual = randn(rows, up.inputs, seed=1), randn(rows, down.outputs, seed=2)
    return Products(to, x, residual, randn(EXPERTS, up.outputs, seed=5), up, down)


@pytest.mark.parametrize("form", ["fp4", "fp8", "fp8_groups", "fp8_few", *INT4_GROUPS])
@pytest.mark.parametrize("rows", [3, 9, 70])
@pytest.mark.parametrize(("size", "hidden"), [(64, 192), (96, 160), (80, 176)])
def test_products_are_those_of_what_weights_stand_for(form: str, rows: int, size: int, hidden: int) -> None:
    wanted = products(rows, weights(form, 2 * size, hidden, 1), weights(form, hidden, size, 3))
    to, residual, pairs = wanted.to, wanted.residual.clone(), sort_pairs(wanted.to.ids, EXPERTS)
    between = gate_tiles(wanted.x, weights_of(wanted.up), wanted.bias, to, pairs, activation="clamped_silu")
    assert_near(between, wanted.gates())
    add_tiles(between, weights_of(wanted.down), None, to, pairs, residual)
    assert_near(residual, wanted.sums(between))


@pytest.mark.parametrize("form", ["fp4", "fp8", "fp8_groups", "fp8_few", *INT4_GROUPS])
@pytest.mark.parametrize(("size", "hidden"), [(64, 192), (96, 160), (80, 176)])
def test_products_of_a_few_rows_are_those_of_what_weights_stand_for(form: str, size: int, hidden: int) -> None:
    """Of few outputs, as programs are many and alike; the last ones of what is added have no tile of their own."""
    wanted = products(3, weights(form, 2 * 10, hidden, 1), weights(form, 18, size, 3))
    up, down, residual = weights_of(wanted.up), weights_of(wanted.down), wanted.residual.clone()
    assert takes_rows(up, 3 * TOP_K)
    assert_near(gate_rows(wanted.x, up, wanted.bias, wanted.to, activation="clamped_silu"), wanted.gates())
    between = randn(3 * TOP_K, size, seed=7)
    add_rows(between, down, None, wanted.to, residual)
    assert_near(residual, wanted.sums(between))


@pytest.mark.parametrize("form", ["fp4", "fp8", "fp8_groups", "int4", "int4_16", "int4_128"])
@pytest.mark.parametrize(
    "unrolled",
    [pytest.param(1, marks=pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel keeps its own number")), 8],
)
def test_sums_of_a_few_rows_go_over_all_steps(form: str, unrolled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more inputs than are read at a time, and of which the last block is not full."""
    for module in (WORD_ROWS, FLOAT_ROWS):
        monkeypatch.setattr(f"{module}._UNROLLED", tl.constexpr(unrolled))
    up, down = weights(form, 16, 2208, 1), weights(form, 18, 1184, 3)
    ids = torch.tensor([[3, 0, 4]])
    to = Routed(ids.to(DEVICE, torch.int32), randn(1, 3, seed=9, dtype=torch.float32).abs())
    x, between, residual = randn(1, 2208, seed=1), randn(3, 1184, seed=2), randn(1, 18, seed=3)
    product = torch.einsum("k,pnk->pn", x[0].double(), floats(up)[ids[0]])
    assert_near(gate_rows(x, weights_of(up), None, to, activation="silu"), gated(*product.chunk(2, 1), "silu"))
    given = torch.einsum("pk,pnk,p->n", between.double(), floats(down)[ids[0]], to.weights[0].double())
    expected = residual.double() + given
    add_rows(between, weights_of(down), None, to, residual)
    assert_near(residual, expected)


@pytest.mark.parametrize("form", ["fp4", "fp8", "fp8_groups", "int4", "int4_16", "int4_128"])
def test_weights_are_those_of_what_rows_are_given_or_of_what_they_give(form: str) -> None:
    up, down, x = weights(form, 128, 96, 1), weights(form, 96, 64, 3), randn(2, 96, seed=1)
    to = Routed(
        torch.tensor([[1, 4], [4, 0]], dtype=torch.int32, device=DEVICE), randn(2, 2, dtype=torch.float32).abs()
    )
    pairs, bias = sort_pairs(to.ids, EXPERTS), randn(EXPERTS, 96, seed=4)
    first = gate_rows(x, weights_of(up), None, to, activation="silu", weighs=True)
    assert_near(first, gate_tiles(x, weights_of(up), None, to, pairs, activation="silu", weighs=True).double())
    found, expected = torch.zeros_like(x), torch.zeros_like(x)
    add_rows(first, weights_of(down), bias, to, found, weighs=False)
    add_tiles(first, weights_of(down), bias, to, pairs, expected, weighs=False)
    assert_near(found, expected.double())


@pytest.mark.parametrize("form", ["fp4", "fp8", "fp8_groups", "fp8_few", *INT4_GROUPS])
@pytest.mark.parametrize(("outputs", "inputs"), [(20, 96), (33, 640)])
def test_widened_weights_are_what_they_stand_for(form: str, outputs: int, inputs: int) -> None:
    weight = weights(form, outputs, inputs, 1)
    assert_near(widen(weights_of(weight), DTYPE).numbers, floats(weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [160, 640])
def test_four_bits_are_widened_as_if_rounded_once(inputs: int, dtype: torch.dtype) -> None:
    """Powers that half floats do not have, too, where the scale of outputs makes up for them."""
    weight = four_bits(33, inputs, 1, powers=60)
    weight.scale_outputs(2.0**14)
    assert torch.equal(widen(weights_of(weight), dtype).numbers, floats(weight).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("form", INT4_GROUPS)
def test_integers_are_widened_as_if_rounded_once(form: str, dtype: torch.dtype) -> None:
    weight = weights(form, 33, 640, 1)
    assert torch.equal(widen(weights_of(weight), dtype).numbers, floats(weight).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["int4", "int4_16", "int4_128"])
def test_integers_are_multiplied_in_every_dtype(form: str, dtype: torch.dtype) -> None:
    up, x = weights(form, 2 * 32, 200, 1), randn(2, 200, dtype=dtype)
    to = Routed(torch.tensor([[1, 4], [4, 0]], dtype=torch.int32, device=DEVICE), torch.ones(2, 2, device=DEVICE))
    product = torch.einsum("pk,pnk->pn", x.double().repeat_interleave(2, 0), floats(up)[to.ids.flatten().long()])
    expected, near = gated(*product.chunk(2, 1), "silu"), 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert_near(gate_rows(x, weights_of(up), None, to, activation="silu"), expected, near)
    assert_near(widen(weights_of(up), dtype).numbers, floats(up), near)
    if dtype != torch.bfloat16 or DEVICE.type == "cuda":  # the interpreter's products are not a device's
        found = gate_tiles(x, weights_of(up), None, to, sort_pairs(to.ids, EXPERTS), activation="silu")
        assert_near(found, expected, 1e-2 if DEVICE.type == "cuda" else near)  # of a device's fp32 by tf32


@pytest.mark.parametrize("form", INT4_GROUPS)
def test_scales_are_multiplied_with_numbers_or_with_sums(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles say which: both give what weights stand for."""
    up, down, x = weights(form, 2 * 40, 288, 1), weights(form, 288, 40, 2), randn(7, 288)
    ids = torch.arange(14).view(7, 2) % 3
    to = Routed(ids.to(DEVICE, torch.int32), torch.ones(7, 2, device=DEVICE))
    pairs, flat = sort_pairs(to.ids, EXPERTS), ids.flatten().to(DEVICE)
    product = torch.einsum("pk,pnk->pn", x.double().repeat_interleave(2, 0), floats(up)[flat])
    asked = []
    for scaled in (False, True):
        tile = Tile(16, 64, BLOCK, 4, 3, scaled)
        monkeypatch.setattr(f"{TILES}.tile_for", lambda *_args, tile=tile, **_more: asked.append(tile) or tile)
        between = gate_tiles(x, weights_of(up), None, to, pairs, activation="silu")
        assert_near(between, gated(*product.chunk(2, 1), "silu"))
        added = torch.zeros_like(x)
        add_tiles(between, weights_of(down), None, to, pairs, added)
        given = torch.einsum("pk,pnk->pn", between.double(), floats(down)[flat])
        assert_near(added, given.unflatten(0, (-1, 2)).sum(1))
    assert len(asked) == 4


def test_widening_of_the_largest_experts_has_no_more_programs_along_an_axis_than_cards_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of Kimi-K2: 384 experts of 7,168 outputs."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(widening, "_widen", Kernel())
    numbers, scales = (torch.empty(384, 7168, size, device="meta") for size in (2048, 1))
    widen(ExpertWeights(FP8_FORM, numbers, 2048, scales=scales), torch.bfloat16)
    ((first, *others),) = grids
    assert first < 1 << 31
    assert all(count < 1 << 16 for count in others)


def test_few_pairs_have_rows_and_many_have_floats() -> None:
    fours, eights = weights_of(four_bits(4, 64, 1)), weights_of(eight_bits(4, 64, 1, None))
    assert takes_rows(fours, 8)
    assert takes_rows(eights, 8)
    assert not takes_rows(fours, 9)
    assert not takes_floats(fours, 10_000)
    assert takes_floats(fours, 20_000)
    whole = weights_of(integers(4, 64, 1, 32))
    assert takes_rows(whole, 8)
    assert not takes_rows(whole, 9)
    many = of_qwen(16, 128, 32, experts=128)
    assert takes_rows(many, 32)
    assert not takes_rows(many, 33)
    assert not takes_rows(of_qwen(16, 128, 32, experts=127), 32)
    assert not takes_floats(whole, 2_000)
    assert takes_floats(whole, 10_000)
    dense = ExpertWeights(FLOATS, randn(EXPERTS, 4, 64), 64)
    assert takes_rows(dense, 8)
    assert not takes_rows(dense, 1000)
    assert not takes_floats(dense, 1 << 20)
    assert widen(dense, DTYPE) is dense


def test_kernels_and_formats_have_the_same_blocks() -> None:
    assert (BLOCK, WORDS, TOGETHER) == (words.BLOCK, words.WORDS, kernel_weights.TOGETHER)
