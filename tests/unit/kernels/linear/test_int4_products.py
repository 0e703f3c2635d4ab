"""Products with integers of 4 bits against double precision and against torch, one row and several, split and not."""

import pytest
import torch
from hopper import compile_for_hopper
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_inputs import DEVICE, DTYPE, GATED_TOLERANCE, LINES, assert_near, randn
from layer_parts import OfARank, norm_of
from torch import Tensor
from torch.nn.functional import silu

from worker_svc.core.formats.int4 import Int4, Int4Format, Integers, pack_integers
from worker_svc.core.kernels.linear.int4_rows import Int4Rows
from worker_svc.core.kernels.linear.int4_widening import can_widen, widen
from worker_svc.core.kernels.linear.product import INT4, Kind, Product
from worker_svc.core.kernels.linear.table import Choices
from worker_svc.core.kernels.linear.ways import CUBLAS, Cublas, Int4Tile, Way
from worker_svc.core.operations.dense_multiplier import DenseMultiplier
from worker_svc.core.operations.grouped_multiplier import GroupedMultiplier
from worker_svc.core.operations.int4_kernels import Int4Kernels
from worker_svc.core.operations.triton_operations import TritonOperations

KERNELS = "worker_svc.core.kernels.linear"
GROUPS = (16, 32, 64, 128, 256, None)


def packed(outputs: int, inputs: int, group: int | None = 128) -> Int4:
    """Any numbers and zeros; scales as checkpoints have them, in half precision."""
    draw = torch.Generator().manual_seed(outputs + inputs)
    groups = 1 if group is None else -(-inputs // group)
    numbers = torch.randint(0, 16, (outputs, inputs), generator=draw, dtype=torch.int32)
    zeros = torch.randint(0, 16, (outputs, groups), generator=draw, dtype=torch.int32)
    scales = ((torch.rand(outputs, groups, generator=draw) + 0.5) * 0.2 * inputs**-0.5).half().float()
    scales *= torch.where(torch.rand(outputs, groups, generator=draw) < 0.1, -1.0, 1.0)
    return pack_integers(Integers(*(each.to(DEVICE) for each in (numbers, zeros, scales))), inputs, group)


def multiplier() -> GroupedMultiplier:
    return GroupedMultiplier(Int4Kernels(DEVICE), DenseMultiplier(DEVICE, LINES), LINES)


def product(x: Tensor, weight: Int4) -> Tensor:
    return x.double() @ weight.widen(torch.float64).t()


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


def find(kind: Kind, outputs: int, inputs: int, rows: int, group: int | None = 128) -> Way:
    return Choices(LINES, (Int4Tile, Cublas)).find(Product(kind, outputs, inputs, INT4, group), rows)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 5, 40, 260])
def test_products_are_torch_s(rows: int, group: int | None) -> None:
    outputs, inputs = 128, 512
    weight, kernels = packed(outputs, inputs, group), multiplier()
    x, bias, residual = randn(rows, inputs, seed=1), randn(outputs, seed=4), randn(rows, outputs, seed=5)
    expected = product(x, weight)
    assert_near(weight.multiply(x, bias), expected + bias)
    assert_near(kernels.multiply(x, weight, None), expected)
    assert_near(kernels.multiply(x, weight, bias), expected + bias)
    assert_near(kernels.add(x, weight, None, residual.clone()), expected + residual)
    assert_near(kernels.add(x, weight, bias, residual.clone()), expected + bias + residual)
    norm = norm_of(inputs)
    normed = product(norm.normalize(x), weight)
    found = kernels.gated(x, norm, weight, None)
    assert (found is None) == (rows > 128)  # of more rows gates are a kernel of their own
    if found is not None:
        assert_near(found, gated(normed), GATED_TOLERANCE)
    plain = kernels.gated(norm.normalize(x), None, weight, None)
    assert plain is None or assert_near(plain, gated(normed), GATED_TOLERANCE) is None
    assert kernels.gated(x, norm, weight, bias) is None
    assert kernels.gated(x, norm, weight, None, is_gelu=True) is None


def test_one_row_is_normed_with_its_product_if_its_dtype_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are too large for fp16 before they are scaled."""
    weight, kernels, norm = packed(128, 512), multiplier(), norm_of(512)
    x, bias = randn(2, 512, seed=1, dtype=torch.bfloat16), randn(128, seed=4)
    assert kernels.of_normed(x[:1], norm, weight, None) is not None
    assert kernels.of_normed(x, norm, weight, None) is None
    norm.weight *= 4
    large = randn(1, 512, seed=1, dtype=torch.float16, scale=16_000.0)
    assert kernels.of_normed(large, norm, weight, None) is None
    of_gates = kernels.gated(large, norm, weight, None)
    assert of_gates is not None
    normed = product(norm.normalize(large), weight)
    assert_near(of_gates, gated(normed), GATED_TOLERANCE)
    # The interpreter multiplies fp16 alone.
    monkeypatch.setattr(Int4Kernels, "takes_norm", lambda _, rows: len(rows) == 1)
    found = kernels.of_normed(large / 1000, norm, weight, bias)
    assert found is not None
    assert_near(found, normed + bias, GATED_TOLERANCE)
    of_gates = kernels.gated(large / 1000, norm, weight, None)
    assert of_gates is not None
    assert_near(of_gates, gated(normed), GATED_TOLERANCE)


@pytest.mark.parametrize("rows", [1, 260])
def test_a_rank_s_inputs_are_multiplied_by_kernels_and_summed_over_ranks(rows: int) -> None:
    weight, operations = packed(128, 256), TritonOperations(DEVICE, LINES)
    x, residual, after = randn(rows, 256, seed=1), randn(rows, 128, seed=2), norm_of(128)
    total = 2 * product(x, weight) + 1
    assert_near(operations.linear_add(x, OfARank(weight), residual.clone()), residual + total)
    normed = operations.linear_add(x, OfARank(weight), residual.clone(), after)
    assert_near(normed, residual + after.normalize(total.to(DTYPE)), GATED_TOLERANCE)


@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 3),
    blocks=st.integers(1, 7),
    group=st.sampled_from(GROUPS),
    splits=st.sampled_from((1, 2, 4)),
    in_pairs=st.booleans(),
    tile_rows=st.sampled_from((16, 32, 64)),
    scaled=st.booleans(),
    parts=st.sets(st.sampled_from(("norm", "bias", "residual", "gated"))),
)
@settings(max_examples=40)
def test_every_tile_that_fits_gives_the_product(
    *,
    rows: int,
    outputs: int,
    blocks: int,
    group: int | None,
    splits: int,
    in_pairs: bool,
    tile_rows: int,
    scaled: bool,
    parts: set[str],
) -> None:
    """Of weights of any number of blocks, which splits need not divide."""
    is_gated, inputs = "gated" in parts, blocks * 128
    tile = Int4Tile(64, tile_rows, splits, 2, 4, 2 if in_pairs else 1, scaled)
    all_outputs = outputs * 64 * (2 if is_gated else 1)
    assume(tile.fits(Product("gated" if is_gated else "plain", all_outputs, inputs, INT4, group), rows))
    weight = packed(all_outputs, inputs, group)
    x, norm, kernel = randn(rows, inputs, seed=1), norm_of(inputs), Int4Rows()
    bias = randn(outputs * 64, seed=4) if "bias" in parts and not is_gated else None
    residual = randn(rows, outputs * 64, seed=5) if "residual" in parts else None
    expected = product(norm.normalize(x) if "norm" in parts else x, weight)
    expected = gated(expected) if is_gated else expected
    expected = expected if bias is None else expected + bias
    expected = expected if residual is None else expected + residual
    for _ in range(2):  # counters are as they were
        found = kernel.multiply(
            x,
            weight,
            tile,
            norm=(norm.weight, norm.eps) if "norm" in parts else None,
            bias=bias,
            residual=residual,
            is_gated=is_gated,
        )
        assert_near(found, expected, GATED_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", GROUPS)
def test_weights_are_widened_as_by_torch_bit_for_bit(group: int | None, dtype: torch.dtype) -> None:
    weight = packed(192, 640, group)
    assert can_widen(weight, dtype)
    if dtype == torch.bfloat16 and DEVICE.type != "cuda":  # which the interpreter does not round as a device
        assert_near(widen(weight, dtype), weight.widen(dtype))
    else:
        assert widen(weight, dtype).equal(weight.widen(dtype))


def test_sizes_without_kernels_are_multiplied_by_torch() -> None:
    for outputs, inputs, group, dtype in ((96, 256, 128, DTYPE), (64, 200, 128, DTYPE), (64, 256, 128, torch.float32)):
        weight, kernels = packed(outputs, inputs, group), multiplier()
        x = randn(3, inputs, seed=1, dtype=dtype)
        residual = randn(3, outputs, seed=2, dtype=dtype)
        assert not can_widen(weight, dtype)
        assert kernels.multiply(x, weight, None).equal(weight.multiply(x, None))
        assert kernels.add(x, weight, None, residual.clone()).equal(residual + weight.multiply(x, None))
        assert kernels.of_normed(x[:1], norm_of(inputs), weight, None) is None
        assert kernels.gated(x, norm_of(inputs), weight, None) is None


def test_a_row_is_what_it_is_whatever_stands_beside_it() -> None:
    weight, kernels = packed(192, 512), multiplier()
    x = randn(150, 512, seed=1)
    x[5] *= 30
    for rows in (150, 40, 20):
        together = kernels.multiply(x[:rows], weight, None)
        for row in (0, 5, rows - 1):
            assert_near(kernels.multiply(x[row : row + 1], weight, None), together[row : row + 1])


def test_every_product_of_few_rows_has_a_kernel_and_large_ones_are_cut_into_enough_programs() -> None:
    for kind, outputs, inputs in (
        ("plain", 6144, 4096),
        ("biased", 4608, 3584),
        ("added", 4096, 4096),
        ("added", 4096, 12288),
        ("gated", 28672, 4096),
        ("added", 3584, 18944),
        ("gated", 36864, 4096),
        ("normed", 1024, 1024),
        ("plain", 64, 128),
    ):
        for rows in (1, 2, 16, 17, 32, 64, 65, 256):
            for group in (32, 128, None):
                way = find(kind, outputs, inputs, rows, group)  # type: ignore[arg-type]
                if kind == "gated" and rows > 128:
                    assert way == CUBLAS  # a product, and gates by a kernel after it
                    continue
                assert isinstance(way, Int4Tile)
                num_programs = way.programs(Product(kind, outputs, inputs)) * -(-rows // way.rows)  # type: ignore[arg-type]
                assert num_programs >= 128 or outputs <= 1024
    assert find("added", 4096, 12288, 257) == find("plain", 6176, 4096, 8) == find("plain", 64, 160, 1) == CUBLAS
    # A product, and gates by a kernel after it, was faster.
    assert find("gated", 24576, 4096, 64) == find("gated", 37888, 3584, 128) == CUBLAS
    assert find("plain", 64, 256, 1, 96) == CUBLAS  # a group that words would share


def test_no_more_of_a_weight_is_asked_for_than_a_split_has() -> None:
    tile = Int4Tile(64, 16, 2, 3, 4, ahead=4)
    assert tile.fits(Product("plain", 64, 1024, INT4, 128), 1)
    assert not tile.fits(Product("plain", 64, 1024 - 128, INT4, 128), 1)


def test_only_what_kernels_multiply_is_kept() -> None:
    kernels = multiplier()
    assert kernels.multiplies(128, 6144, 4096, torch.bfloat16)
    assert not kernels.multiplies(128, 6144, 4096, torch.float32)
    assert not kernels.multiplies(128, 6144, 4000, torch.bfloat16)
    assert not kernels.multiplies(128, 6100, 4096, torch.bfloat16)
    untuned = GroupedMultiplier(Int4Kernels(DEVICE), DenseMultiplier(DEVICE, ()), ())
    assert not untuned.multiplies(128, 6144, 4096, torch.bfloat16)
    assert TritonOperations(DEVICE, LINES).multiplies(Int4Format(128), 6144, 4096, torch.bfloat16)
    assert not TritonOperations(DEVICE, ()).multiplies(Int4Format(128), 6144, 4096, torch.bfloat16)


def launch_rows(tile: Int4Tile, kind: str) -> None:
    outputs = 24576 if kind == "gated" else 6144
    numbers = torch.zeros(outputs, 32, 16, dtype=torch.int32)
    weight = Int4(numbers, torch.zeros(32, outputs), 4096, 128)
    x = torch.zeros(tile.rows, 4096, dtype=torch.bfloat16)
    norm = (torch.zeros(4096, dtype=torch.bfloat16), 1e-6) if tile.rows == 16 else None
    Int4Rows().multiply(x, weight, tile, norm=norm, is_gated=kind == "gated")


def launch_widening() -> None:
    widen(Int4(torch.zeros(128, 32, 16, dtype=torch.int32), torch.zeros(32, 128), 4096, 128), torch.bfloat16)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_matrix_units_take_decoded_numbers_from_registers(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, rows: int
) -> None:
    way = find(kind, 28672 if kind == "gated" else 6144, 4096, rows)
    # The first operand is four registers and no address of shared memory.
    instruction = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16"
    compile_for_hopper(monkeypatch, f"{KERNELS}.int4_rows._int4_rows", instruction, launch_rows, way, kind)


def test_weights_are_widened_by_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for_hopper(monkeypatch, f"{KERNELS}.int4_widening._widen", "fma.rn.bf16x2", launch_widening)
