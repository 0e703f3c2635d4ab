"""Products with weights of 8-bit floats that have scales for groups of inputs, against double precision and torch."""

import pytest
import torch
from hopper import compile_for_hopper
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_inputs import DEVICE, GATED_TOLERANCE, LINES, assert_near, randn
from layer_parts import OfARank, norm_of
from torch import Tensor
from torch.nn.functional import gelu, silu

from worker_svc.core.formats.fp8_channel import FP8
from worker_svc.core.formats.fp8_groups import Fp8Groups, Fp8GroupsFormat
from worker_svc.core.kernels.linear.fp8_few_rows import Fp8FewRows
from worker_svc.core.kernels.linear.fp8_one_row import fp8_row_linear
from worker_svc.core.kernels.linear.fp8_widening import can_widen, widen
from worker_svc.core.kernels.linear.product import FP8_GROUPS, Kind, Product
from worker_svc.core.kernels.linear.table import Choices
from worker_svc.core.kernels.linear.ways import CUBLAS, Cublas, Fp8FewRowsTile, Fp8OneRowTile, Way
from worker_svc.core.operations import triton_operations
from worker_svc.core.operations.dense_multiplier import DenseMultiplier
from worker_svc.core.operations.fp8_group_kernels import Fp8GroupKernels
from worker_svc.core.operations.grouped_multiplier import GroupedMultiplier
from worker_svc.core.operations.triton_operations import TritonOperations

KERNELS = "worker_svc.core.kernels.linear"


def packed(outputs: int, inputs: int, group: int = 128) -> Fp8Groups:
    """Any numbers, and scales that differ from group to group."""
    draw = torch.Generator().manual_seed(outputs + inputs)
    numbers = torch.randn(outputs, inputs, generator=draw).to(FP8)
    scales = (torch.rand(-(-inputs // group), outputs, generator=draw) + 0.1) * inputs**-0.5
    return Fp8Groups(numbers.to(DEVICE), scales.to(DEVICE), group)


def multiplier() -> GroupedMultiplier:
    return GroupedMultiplier(Fp8GroupKernels(), DenseMultiplier(DEVICE, LINES), LINES)


def product(x: Tensor, weight: Fp8Groups) -> Tensor:
    return x.double() @ weight.widen(torch.float64).t()


def gated(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return (gelu(gate, approximate="tanh") if is_gelu else silu(gate)) * up


def find(kind: Kind, outputs: int, inputs: int, rows: int, group: int = 128) -> Way:
    ways = (Fp8OneRowTile, Fp8FewRowsTile, Cublas)
    return Choices(LINES, ways).find(Product(kind, outputs, inputs, FP8_GROUPS, group), rows)


@pytest.mark.parametrize("group", [64, 128, 512])
@pytest.mark.parametrize("rows", [1, 5, 40, 140, 260])
def test_products_are_torch_s(rows: int, group: int) -> None:
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
    found = kernels.of_normed(x, norm, weight, bias)
    assert (found is None) == (rows > 1)  # of more rows the norm is a kernel of its own, and so are gates
    if found is not None:
        assert_near(found, normed + bias, GATED_TOLERANCE)
    for is_gelu in (False, True):
        found = kernels.gated(x, norm, weight, None, is_gelu=is_gelu)
        assert (found is None) == (rows > 1)
        if found is not None:
            assert_near(found, gated(normed, is_gelu=is_gelu), GATED_TOLERANCE)
        plain = kernels.gated(norm.normalize(x), None, weight, bias, is_gelu=is_gelu)
        if plain is not None:
            assert_near(plain, gated(normed + bias, is_gelu=is_gelu), GATED_TOLERANCE)


@pytest.mark.parametrize("rows", [1, 260])
def test_a_rank_s_inputs_are_multiplied_by_kernels_and_summed_over_ranks(rows: int) -> None:
    weight, operations = packed(128, 256), TritonOperations(DEVICE, LINES)
    x, residual = randn(rows, 256, seed=1), randn(rows, 128, seed=2)
    found = operations.linear_add(x, OfARank(weight), residual.clone())
    assert_near(found, residual + 2 * product(x, weight) + 1)


@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 3),
    steps=st.integers(1, 6),
    group=st.sampled_from((16, 64, 128, 192)),
    tile=st.sampled_from(
        (
            Fp8FewRowsTile(64, 64, 1, 2),
            Fp8FewRowsTile(64, 64, 2, 3),
            Fp8FewRowsTile(32, 16, 4, 2),
            Fp8FewRowsTile(64, 128, 1, 4),
            Fp8OneRowTile(4, 256, 4),
            Fp8OneRowTile(8, 64, 4),
        )
    ),
    parts=st.sets(st.sampled_from(("norm", "bias", "residual", "gated"))),
)
@settings(max_examples=40)
def test_every_tile_that_fits_gives_the_product(
    *,
    rows: int,
    outputs: int,
    steps: int,
    group: int,
    tile: Fp8FewRowsTile | Fp8OneRowTile,
    parts: set[str],
) -> None:
    """Splits may begin within a group, and the last group may have fewer inputs."""
    is_gated, inputs = "gated" in parts, steps * 64
    rows = 1 if isinstance(tile, Fp8OneRowTile) else rows
    all_outputs = outputs * 64 * (2 if is_gated else 1)
    assume(tile.fits(Product("gated" if is_gated else "plain", all_outputs, inputs, FP8_GROUPS, group), rows))
    weight = packed(all_outputs, inputs, group)
    x, norm, kernels = randn(rows, inputs, seed=1), norm_of(inputs), Fp8GroupKernels()
    bias = randn(all_outputs, seed=4) if "bias" in parts else None
    residual = randn(rows, outputs * 64, seed=5) if "residual" in parts else None
    expected = product(norm.normalize(x) if "norm" in parts else x, weight)
    expected = expected if bias is None else expected + bias
    expected = gated(expected, is_gelu=False) if is_gated else expected
    expected = expected if residual is None else expected + residual
    for _ in range(2):  # counters are as they were
        found = kernels.multiply(
            x,
            weight,
            tile,
            norm=norm if "norm" in parts else None,
            bias=bias,
            residual=residual,
            is_gated=is_gated,
        )
        assert_near(found, expected, GATED_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(192, 640, 128), (100, 320, 64), (40, 200, 48)])
def test_weights_are_widened_as_by_torch_bit_for_bit(outputs: int, inputs: int, group: int, dtype: torch.dtype) -> None:
    weight = packed(outputs, inputs, group)
    assert can_widen(weight)
    if dtype == torch.bfloat16 and DEVICE.type != "cuda":  # which the interpreter does not round as a device
        assert_near(widen(weight, dtype), weight.widen(dtype))
    else:
        assert widen(weight, dtype).equal(weight.widen(dtype))


def test_sizes_without_kernels_are_multiplied_by_torch() -> None:
    weight, kernels = packed(96, 200, 40), multiplier()
    x, residual = randn(3, 200, seed=1), randn(3, 96, seed=2)
    assert not can_widen(weight)
    assert kernels.multiply(x, weight, None).equal(weight.multiply(x, None))
    assert kernels.add(x, weight, None, residual.clone()).equal(residual + weight.multiply(x, None))
    whole = packed(128, 256), randn(3, 256, seed=1, dtype=torch.float32)
    assert kernels.multiply(whole[1], whole[0], None).equal(whole[0].multiply(whole[1], None))
    assert kernels.gated(x, norm_of(200), weight, None) is None


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
        ("gated", 24576, 4096),
        ("added", 3584, 18944),
        ("gated", 37888, 3584),
        ("plain", 64, 128),
    ):
        normed: Kind = "gated" if kind == "gated" else "normed"
        if inputs >= 256:
            assert isinstance(find(normed, outputs, inputs, 1), Fp8OneRowTile)
        for rows in (2, 16, 64, 65, 128, 256):
            way = find(kind, outputs, inputs, rows)  # type: ignore[arg-type]
            if kind == "gated":
                assert way == CUBLAS  # a product, and gates by a kernel after it
                continue
            assert isinstance(way, Fp8FewRowsTile)
            busy = rows > 128 or outputs < 1024
            assert busy or way.programs(Product(kind, outputs, inputs)) >= 128  # type: ignore[arg-type]
    assert find("added", 4096, 12288, 257) == find("plain", 6176, 4096, 8) == find("plain", 6144, 4096, 8, 40) == CUBLAS


def test_only_what_kernels_multiply_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = multiplier()
    assert kernels.multiplies(128, 6144, 4096, torch.bfloat16)
    assert not kernels.multiplies(128, 6144, 4096, torch.float32)
    assert not kernels.multiplies(40, 6144, 4096, torch.bfloat16)
    assert not kernels.multiplies(16, 6144, 4096, torch.bfloat16)  # of which one row alone has a kernel
    form = Fp8GroupsFormat(128)
    assert TritonOperations(DEVICE, LINES).multiplies(form, 6144, 4096, torch.bfloat16)
    assert not TritonOperations(DEVICE, ()).multiplies(form, 6144, 4096, torch.bfloat16)
    monkeypatch.setattr(triton_operations, "kernels_have_fp8", lambda _: False)
    assert not TritonOperations(DEVICE, LINES).multiplies(form, 6144, 4096, torch.bfloat16)


def launch_one() -> None:
    x, norm = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    weight, scales = torch.zeros(6144, 4096).to(FP8), torch.zeros(32, 6144)
    fp8_row_linear(x, weight, scales, Fp8OneRowTile(8, 2048, 8), rounds_inputs=False, group=128, norm=(norm, 1e-6))


def launch_few(rows: int, kind: str) -> None:
    outputs = 24576 if kind == "gated" else 6144
    # No table chooses it of gates, but tuning measures it.
    way = Fp8FewRowsTile(64, 64, 1, 3) if kind == "gated" else find(kind, outputs, 4096, rows)  # type: ignore[arg-type]
    assert isinstance(way, Fp8FewRowsTile)
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16)
    weight, scales = torch.zeros(outputs, 4096).to(FP8), torch.zeros(32, outputs)
    Fp8FewRows().multiply(x, None, weight, scales, way, x.dtype, group=128, is_gated=kind == "gated")


def launch_widening() -> None:
    widen(Fp8Groups(torch.zeros(256, 4096).to(FP8), torch.zeros(32, 256), 128), torch.bfloat16)


def test_one_row_converts_by_a_hopper_s_own_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for_hopper(monkeypatch, f"{KERNELS}.fp8_one_row._fp8_row", "cvt.rn.f16x2.e4m3x2", launch_one)


@pytest.mark.parametrize(("rows", "kind"), [(16, "plain"), (64, "gated"), (128, "plain"), (256, "added")])
def test_several_rows_are_multiplied_by_a_hopper_s_matrix_units(
    monkeypatch: pytest.MonkeyPatch, rows: int, kind: str
) -> None:
    # The first operand is four registers and no address of shared memory.
    instruction = f"wgmma.mma_async.sync.aligned.m64n{min(rows, 128)}k16.f32.bf16.bf16"
    compile_for_hopper(monkeypatch, f"{KERNELS}.fp8_few_rows._fp8_few_rows", instruction, launch_few, rows, kind)


def test_weights_are_widened_by_a_hopper_s_own_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for_hopper(monkeypatch, f"{KERNELS}.fp8_widening._widen", "cvt.rn.f16x2.e4m3x2", launch_widening)
