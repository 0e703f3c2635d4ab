"""Products with weights of 8-bit floats against double precision and against torch, one row and several."""

import pytest
import torch
from hopper import compile_for_hopper
from kernel_inputs import DEVICE, DTYPE, LINES, TOLERANCES, assert_near, randn
from layer_parts import norm_of
from torch import Tensor

from worker_svc.core.formats.fp8_channel import FP8, Fp8Channel, round_rows
from worker_svc.core.kernels.linear import fp8_rounding
from worker_svc.core.kernels.linear.activation import silu_mul
from worker_svc.core.kernels.linear.batch_rows import has_batch_rows
from worker_svc.core.kernels.linear.fp8_few_rows import Fp8FewRows
from worker_svc.core.kernels.linear.fp8_one_row import fp8_row_linear
from worker_svc.core.kernels.linear.fp8_sums import Fp8Sums
from worker_svc.core.kernels.linear.product import FP8_W8A8, FP8_W8A16, Kind, Product
from worker_svc.core.kernels.linear.table import Choices, Line
from worker_svc.core.kernels.linear.ways import CUBLAS, Cublas, Fp8BatchTile, Fp8FewRowsTile, Fp8OneRowTile, Way
from worker_svc.core.layers.linear import Linear, Projection
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import StoredRows
from worker_svc.core.operations import fp8_multiplier, triton_operations
from worker_svc.core.operations.fp8_multiplier import Fp8Multiplier
from worker_svc.core.operations.interface import Activation
from worker_svc.core.quantization.spec import Fp8ChannelSpec, QuantizationSpec

KERNELS = "worker_svc.core.kernels.linear"
SIZES = [(64, 256), (192, 512), (128, 448), (320, 1200)]


def packed(outputs: int, inputs: int, *, rounds_inputs: bool) -> Fp8Channel:
    weight, scales = round_rows(randn(outputs, inputs, seed=2, scale=inputs**-0.5, dtype=torch.float32))
    return Fp8Channel(weight, scales, rounds_inputs=rounds_inputs)


def gated(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    activation = torch.nn.functional.gelu(gate, approximate="tanh") if is_gelu else torch.nn.functional.silu(gate)
    return activation * up


def find(kind: Kind, outputs: int, inputs: int, rows: int, dtype: str = FP8_W8A8, *, in_batch: bool = False) -> Way:
    kernels = (Fp8OneRowTile, Fp8FewRowsTile, Cublas)
    choices = Choices(LINES, (*kernels, Fp8BatchTile) if in_batch and has_batch_rows(DEVICE) else kernels)
    return choices.find(Product(kind, outputs, inputs, dtype), rows)


# What rounding to 8 bits does where a number lies between two: kernels and torch norm rows in another order.
NEAR = 4 * TOLERANCES[DTYPE]


@pytest.mark.parametrize("rounds_inputs", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 17, 70, 130, 300])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_are_torch_s(rows: int, outputs: int, inputs: int, *, rounds_inputs: bool) -> None:
    weight, multiplier = packed(outputs, inputs, rounds_inputs=rounds_inputs), Fp8Multiplier(DEVICE, LINES)
    x, bias, residual = randn(rows, inputs, seed=1), randn(outputs, seed=4), randn(rows, outputs, seed=5)
    expected = weight.multiply(x, None)
    assert_near(multiplier.multiply(x, weight, None), expected)
    assert_near(multiplier.multiply(x, weight, bias), expected + bias)
    assert_near(multiplier.add(x, weight, bias, residual.clone()), expected + bias + residual)
    norm = norm_of(inputs)
    normed = weight.multiply(norm.normalize(x), bias)
    found = multiplier.of_normed(x, norm, weight, bias)
    dtype = FP8_W8A8 if rounds_inputs else FP8_W8A16
    has_way = find("normed" if rows == 1 else "biased", outputs, inputs, rows, dtype, in_batch=True) != CUBLAS
    assert (found is not None) == (has_way or rounds_inputs)
    if found is not None:
        assert_near(found, normed, NEAR)
    for is_gelu in (False, True):
        of_gates = multiplier.gated(x, norm, weight, None, is_gelu=is_gelu)
        way = find("gated", outputs, inputs, rows, dtype, in_batch=not is_gelu)
        assert (of_gates is not None) == (way != CUBLAS)
        if of_gates is not None:
            assert_near(of_gates, gated(weight.multiply(norm.normalize(x), None), is_gelu=is_gelu), NEAR)


@pytest.mark.parametrize("rows", [1, 17, 64, 300])
def test_sums_of_one_sign_are_as_near_as_others(rows: int) -> None:
    """Matrix units that add 8-bit floats up by themselves keep too few bits for that (ADR 30)."""
    outputs, inputs = 64, 6144
    numbers, scales = round_rows(randn(outputs, inputs, seed=2, dtype=torch.float32).abs())
    x = randn(rows, inputs, seed=1).abs()
    rounded, row_scales = round_rows(x)
    expected = (rounded.double() * row_scales) @ (numbers.double() * scales).t()
    weight, multiplier = Fp8Channel(numbers, scales, rounds_inputs=True), Fp8Multiplier(DEVICE, LINES)
    assert_near(multiplier.multiply(x, weight, None), expected)
    assert_near(multiplier.add(x, weight, None, torch.zeros(rows, outputs, dtype=DTYPE, device=DEVICE)), expected)


HAS_SUMS = pytest.mark.skipif(not Fp8Sums(DEVICE).is_there, reason="needs a Hopper GPU and CUDA 12.9")


@HAS_SUMS
@pytest.mark.parametrize("rows", [257, 300, 2048])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (4096, 1536)])
def test_many_rows_are_added_by_the_library(outputs: int, inputs: int, rows: int) -> None:
    weight, x = packed(outputs, inputs, rounds_inputs=True), randn(rows, inputs, seed=1, dtype=torch.bfloat16)
    residual = randn(rows, outputs, seed=5, dtype=torch.bfloat16)
    rounded, scales = fp8_rounding.round_rows(x)
    exact = (rounded.double() * scales) @ (weight.weight.double() * weight.scales).t() + residual.double()
    found = Fp8Sums(DEVICE).add(residual, rounded, scales, weight.weight, weight.scales)
    assert found is residual
    # Two roundings to bfloat16 leave 2.15e-3 to 2.19e-3, one would leave 1.66e-3.
    assert_near(found, exact, 2.5e-3)


@HAS_SUMS
def test_a_graph_adds_many_rows_each_time() -> None:
    weight, x = packed(256, 512, rounds_inputs=True), randn(400, 512, seed=1, dtype=torch.bfloat16)
    (rounded, scales), sums = fp8_rounding.round_rows(x), Fp8Sums(DEVICE)
    residual = torch.zeros(400, 256, dtype=torch.bfloat16, device=DEVICE)
    arguments = rounded, scales, weight.weight, weight.scales
    once = sums.add(torch.zeros_like(residual), *arguments)
    assert once is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums.add(residual, *arguments)
    for times in (1, 2):
        graph.replay()
        assert_near(residual, once * times)


def test_what_the_library_cannot_add_torch_adds() -> None:
    """It takes pointers to be aligned, sizes to be multiples of 16, and sums to be bfloat16."""
    rows = 300
    weight, multiplier = packed(64, 256, rounds_inputs=True), Fp8Multiplier(DEVICE, LINES)
    x, room = randn(rows, 256, seed=1), randn(rows * 64 + 8, seed=5)
    residual = room[8:].view(rows, 64)
    expected = weight.multiply(x, None) + residual
    assert_near(multiplier.add(x, weight, None, residual), expected)
    odd = packed(72, 264, rounds_inputs=True)
    x, residual = randn(rows, 264, seed=1), randn(rows, 72, seed=5)
    expected = odd.multiply(x, None) + residual
    assert_near(multiplier.add(x, odd, None, residual), expected)
    assert Fp8Sums(DEVICE).add(residual, *fp8_rounding.round_rows(x), odd.weight, odd.scales) is None


@pytest.mark.skipif(not has_batch_rows(DEVICE), reason="needs a Hopper GPU")
@pytest.mark.parametrize("rows", [2, 33, 64])
@pytest.mark.parametrize("splits", [1, 4])
def test_products_of_a_batch_are_torch_s(splits: int, rows: int) -> None:
    """With what goes along with them, and without what cannot."""
    tile = Fp8BatchTile(64, 64, 0, 256, splits, 7)
    line = Line(kinds=("plain", "biased", "added", "gated"), rows=(2, 64), ways=(tile,))
    weight, multiplier, norm = packed(384, 2048, rounds_inputs=True), Fp8Multiplier(DEVICE, [line]), norm_of(2048)
    x, bias, residual = randn(rows, 2048, seed=1), randn(384, seed=4), randn(rows, 384, seed=5)
    expected = weight.multiply(x, None)
    assert_near(multiplier.multiply(x, weight, None), expected)
    assert_near(multiplier.multiply(x, weight, bias), expected + bias)
    assert_near(multiplier.add(x, weight, None, residual.clone()), expected + residual)
    assert_near(multiplier.add(x, weight, bias, residual.clone()), expected + bias + residual)
    normed = weight.multiply(norm.normalize(x), None)
    of_normed = multiplier.of_normed(x, norm, weight, None)
    assert of_normed is not None
    assert_near(of_normed, normed, NEAR)
    of_gates = multiplier.gated(x, norm, weight, None)
    assert (of_gates is not None) == (splits == 1)
    if of_gates is not None:
        assert_near(of_gates, gated(normed, is_gelu=False), NEAR)
    assert multiplier.gated(x, norm, weight, None, is_gelu=True) is None
    assert multiplier.gated(x, norm, weight, bias) is None


@pytest.mark.parametrize("rows", [1, 3, 200])
def test_where_kernels_have_no_such_floats_torch_multiplies(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(triton_operations, "kernels_have_fp8", lambda _: False)
    monkeypatch.setattr(fp8_multiplier, "round_rows", None)
    monkeypatch.setattr(fp8_multiplier, "fp8_row_linear", None)
    placement = Placement(DEVICE, DTYPE, quantization=QuantizationSpec(Fp8ChannelSpec(rounds_inputs=True)))
    linear = Linear(placement, [Projection(StoredRows("down"), 64, slice(0, 64))], 256)
    weight = packed(64, 256, rounds_inputs=True)
    assert isinstance(linear.packed, Fp8Channel)
    linear.packed.weight.copy_(weight.weight)
    linear.packed.scales.copy_(weight.scales)
    x, residual = randn(rows, 256, seed=1), randn(rows, 64, seed=2)
    found = triton_operations.TritonOperations(DEVICE, LINES).linear_add(x, linear, residual.clone())
    assert_near(found, weight.multiply(x, None) + residual)


@pytest.mark.parametrize("rounds_inputs", [True, False])
def test_a_row_is_what_it_is_whatever_stands_beside_it(*, rounds_inputs: bool) -> None:
    weight, multiplier, norm = packed(192, 512, rounds_inputs=rounds_inputs), Fp8Multiplier(DEVICE, LINES), norm_of(512)
    x = randn(40, 512, seed=1)
    x[5] *= 30
    together = multiplier.of_normed(x, norm, weight, None)
    assert together is not None
    for row in (0, 5, 39):
        alone = multiplier.of_normed(x[row : row + 1], norm, weight, None)
        assert alone is not None
        assert_near(alone, together[row : row + 1])


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("rows", [3, 150])
def test_splits_add_up(splits: int, rows: int) -> None:
    weight, x = packed(128, 512, rounds_inputs=True), randn(rows, 512, seed=1)
    rounded, scales = round_rows(x)
    tile, few = Fp8FewRowsTile(64, 64, splits, 3, ahead=128), Fp8FewRows()
    for _ in range(2):  # counters are as they were
        found = few.multiply(rounded, scales, weight.weight, weight.scales, tile, DTYPE)
        assert_near(found, (rounded.double() * scales) @ (weight.weight.double() * weight.scales).t())


@pytest.mark.parametrize("size", [96, 1024, 20_000])
def test_rows_are_rounded_as_torch_rounds_them(size: int) -> None:
    x = randn(5, size, seed=1)
    x[2] = 0
    found, scales = fp8_rounding.round_rows(x)
    expected, expected_scales = round_rows(x)
    if DEVICE.type == "cpu":
        assert scales.equal(expected_scales)
        assert found.view(torch.uint8).equal(expected.view(torch.uint8))
    else:  # torch multiplies there by the inverse of the largest number
        torch.testing.assert_close(scales, expected_scales)
        assert float((found.view(torch.uint8) != expected.view(torch.uint8)).float().mean()) < 0.01


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("size", [96, 1024, 20_000])
def test_gates_are_rounded_as_if_they_were_written_first(size: int, *, gelu: bool) -> None:
    gate_up = randn(5, 2 * size, seed=1)
    gate_up[2] = 0
    found, scales = fp8_rounding.round_gated(gate_up, gelu=gelu)
    expected, expected_scales = fp8_rounding.round_rows(silu_mul(gate_up, gelu=gelu))
    assert scales.equal(expected_scales)
    assert found.view(torch.uint8).equal(expected.view(torch.uint8))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "rounds_at_once"), [(1, False), (70, True), (140, True)])
def test_what_is_gated_and_then_multiplied_is_rounded_at_once(
    monkeypatch: pytest.MonkeyPatch, rows: int, activation: Activation, *, rounds_at_once: bool
) -> None:
    """After its gates, a product of 70 rows has a kernel of ours, one of 140 is torch's."""
    placement = Placement(DEVICE, DTYPE, quantization=QuantizationSpec(Fp8ChannelSpec(rounds_inputs=True)))
    part = slice(0, 192)
    gate_up = Linear(placement, [Projection(StoredRows(name), 192, part) for name in ("gate", "up")], 256)
    down = Linear(placement, [Projection(StoredRows("down"), 256, slice(0, 256))], 192, part, has_bias=True)
    for linear, shape in ((gate_up, (384, 256)), (down, (256, 192))):
        weight = packed(*shape, rounds_inputs=True)
        assert isinstance(linear.packed, Fp8Channel)
        linear.packed.weight.copy_(weight.weight)
        linear.packed.scales.copy_(weight.scales)
    assert down.bias is not None
    down.bias.copy_(randn(256, seed=6))
    hidden, residual, norm = randn(rows, 256, seed=1), randn(rows, 256, seed=2), norm_of(256)
    operations = triton_operations.TritonOperations(DEVICE, LINES)
    gated_first = operations.norm_gated(hidden, norm, gate_up, activation)
    expected = operations.linear_add(gated_first, down, residual.clone())
    if rounds_at_once:
        monkeypatch.setattr(triton_operations, "silu_mul", None)
    found = operations.norm_gated_add(hidden, norm, gate_up, activation, down=down, residual=residual.clone())
    assert_near(found, expected)
    after = norm_of(256)
    monkeypatch.undo()
    expected = residual + after.normalize(down.multiply(gated_first))
    found = operations.norm_gated_add(hidden, norm, gate_up, activation, down=down, residual=residual, after=after)
    assert_near(found, expected, NEAR)


def test_every_product_of_few_rows_has_a_kernel_and_large_ones_are_cut_into_enough_programs() -> None:
    for kind, outputs, inputs in (
        ("normed", 6144, 4096),
        ("added", 4096, 12288),
        ("gated", 24576, 4096),
        ("added", 3584, 18944),
        ("gated", 37888, 3584),
        ("plain", 1024, 1024),
    ):
        assert isinstance(find(kind, outputs, inputs, 1, FP8_W8A16), Fp8OneRowTile)  # type: ignore[arg-type]
        for rows in (2, 32, 64, 128):
            kind_of_several = "plain" if kind == "normed" else kind
            way = find(kind_of_several, outputs, inputs, rows)  # type: ignore[arg-type]
            assert isinstance(way, Fp8FewRowsTile)
            # Splits that wait for each other were slower there.
            is_whole = (kind, inputs) == ("added", 12288) and rows in (32, 64)
            is_busy = outputs <= 1024 or way.programs(Product("plain", outputs, inputs)) >= 96
            assert way.splits == 1 if is_whole else is_busy
    assert find("plain", 6144, 4096, 129) == find("plain", 6100, 4096, 8) == CUBLAS
    assert isinstance(find("plain", 6144, 4096, 8, "bfloat16"), Cublas)


def test_tiles_have_room_for_rows_of_16_bits() -> None:
    """Which take twice the memory of rounded ones."""
    of_rounded, of_others = (Product("plain", 6144, 4096, form) for form in (FP8_W8A8, FP8_W8A16))
    assert Fp8FewRowsTile(64, 128, 2, 6).fits(of_rounded, 128)
    assert not Fp8FewRowsTile(64, 128, 2, 6).fits(of_others, 128)
    assert Fp8FewRowsTile(64, 128, 2, 6).fits(of_others, 64)
    assert not Fp8FewRowsTile(64, 256, 1, 4).fits(of_others, 65)


def launch_others() -> None:
    weight, scales = torch.zeros(6144, 4096).to(FP8), torch.zeros(6144, 1)
    for rows in (64, 128):
        way = find("plain", 6144, 4096, rows, FP8_W8A16)
        assert isinstance(way, Fp8FewRowsTile)
        Fp8FewRows().multiply(torch.zeros(rows, 4096, dtype=torch.bfloat16), None, weight, scales, way, torch.bfloat16)


def launch_one() -> None:
    weight, scales = torch.zeros(6144, 4096).to(FP8), torch.zeros(6144, 1)
    x, norm = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    fp8_row_linear(x, weight, scales, Fp8OneRowTile(8, 2048, 8), rounds_inputs=True, norm=(norm, 1e-6))


def launch_few() -> None:
    weight, scales = torch.zeros(6144, 4096).to(FP8), torch.zeros(6144, 1)
    rows = torch.zeros(32, 4096).to(FP8)
    Fp8FewRows().multiply(rows, torch.zeros(32, 1), weight, scales, Fp8FewRowsTile(64, 256, 2, 4), torch.bfloat16)


def test_one_row_converts_by_a_hopper_s_own_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for_hopper(monkeypatch, f"{KERNELS}.fp8_one_row._fp8_row", "cvt.rn.f16x2.e4m3x2", launch_one)


def test_several_rows_are_multiplied_in_eight_bits_by_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for_hopper(monkeypatch, f"{KERNELS}.fp8_few_rows._fp8_few_rows", ".e4m3.e4m3", launch_few)


def test_rows_that_are_not_rounded_have_room_on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for_hopper(monkeypatch, f"{KERNELS}.fp8_few_rows._fp8_few_rows", ".f32.bf16.bf16", launch_others)
