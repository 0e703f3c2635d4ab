"""Norm, gate and matrix-vector kernels, and the operations made of them, against double precision."""

import pytest
import torch
from hopper import compile_for_hopper
from kernel_inputs import DEVICE, DTYPE, LINES, assert_near, gelu_gated, normed, randn, silu_gated
from torch import Tensor

from worker_svc.core.formats.dense import Dense
from worker_svc.core.kernels.linear.activation import silu_mul
from worker_svc.core.kernels.linear.cublas import add_product
from worker_svc.core.kernels.linear.norm import rms_norm, row_scales, scale_rows
from worker_svc.core.kernels.linear.one_row import row_linear
from worker_svc.core.kernels.linear.product import Kind, Product
from worker_svc.core.kernels.linear.table import Choices
from worker_svc.core.kernels.linear.unscaled import Unscaled
from worker_svc.core.kernels.linear.ways import Cublas, OneRowTile
from worker_svc.core.layers.linear import Linear, Projection
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import NormSpec, StoredRows
from worker_svc.core.operations.torch_operations import TorchOperations
from worker_svc.core.operations.triton_operations import TritonOperations


def whole(name: str, outputs: int) -> Projection:
    """A projection that is stored alone, of which this rank has all."""
    return Projection(StoredRows(name), outputs, slice(0, outputs))


def weight_of(linear: Linear) -> Tensor:
    """Of dense ones."""
    assert isinstance(linear.packed, Dense)
    return linear.packed.weight


def one_row_tiles(kind: Kind, outputs: int, inputs: int) -> list[OneRowTile]:
    """That which the H200 has for it."""
    way = Choices(LINES, [OneRowTile]).find(Product(kind, outputs, inputs), 1)
    return [way] if isinstance(way, OneRowTile) else []


@pytest.mark.parametrize("size", [64, 96, 1000])
def test_rms_norm(size: int) -> None:
    x, weight = randn(5, size, seed=1), randn(size, seed=2)
    assert_near(rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5))


@pytest.mark.parametrize("size", [8, 1024, 1500])
def test_silu_mul(size: int) -> None:
    x = randn(3, 2 * size, seed=1)
    assert_near(silu_mul(x), silu_gated(x.double()))


@pytest.mark.parametrize("hidden_size", [96, 1024, 1500])
def test_silu_mul_of_rows_that_are_scaled_by_their_hidden_states(hidden_size: int) -> None:
    x, unscaled = randn(3, 2 * 1500, seed=1), Unscaled(randn(3, hidden_size, seed=2, scale=3.0), 1e-5)
    assert_near(silu_mul(x, unscaled), silu_gated(x.double() * unscaled.scales()))


def test_rows_are_scaled_in_place_by_the_first_hidden_states() -> None:
    x, hidden = randn(3, 2500, seed=1), randn(5, 1500, seed=2, scale=3.0)
    expected = x.double() * Unscaled(hidden[:3], 1e-5).scales()
    scale_rows(x, Unscaled(hidden, 1e-5))
    assert_near(x, expected)


@pytest.mark.parametrize(("rows", "size"), [(3, 1500), (1030, 96)])
def test_the_scales_of_rows(rows: int, size: int) -> None:
    hidden = randn(rows, size, seed=2, scale=3.0)
    assert_near(row_scales(hidden, 1e-5), Unscaled(hidden, 1e-5).scales()[:, 0], 1e-5)


@pytest.mark.parametrize(("rows", "size"), [(65, 4100), (128, 8192), (512, 4100), (512, 1100)])
def test_silu_mul_of_many_rows(rows: int, size: int) -> None:
    x, unscaled = randn(rows, 2 * size, seed=1), Unscaled(randn(rows, 96, seed=2, scale=3.0), 1e-5)
    assert_near(silu_mul(x, unscaled), silu_gated(x.double() * unscaled.scales()))


def test_rms_norm_of_many_rows() -> None:
    x, weight = randn(1030, 96, seed=1), randn(96, seed=2)
    assert_near(rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5))


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 64), (48, 192), (33, 1024), (64, 3072), (10, 896), (6, 12288), (96, 4096), (3, 18944)]
)
def test_one_row_through_a_weight(outputs: int, inputs: int) -> None:
    x, weight = randn(1, inputs, seed=1), randn(2 * outputs, inputs, seed=2, scale=inputs**-0.5)
    norm, bias, residual = 1 + randn(inputs, seed=3, scale=0.2), randn(outputs, seed=4), randn(1, outputs, seed=5)
    single = weight[:outputs]
    double = single.double()
    [tile] = one_row_tiles("added", outputs, inputs)
    assert_near(row_linear(x, single, tile), x.double() @ double.t())
    assert_near(row_linear(x, single, tile, norm=(norm, 1e-6)), normed(x, norm, 1e-6) @ double.t())
    expected = x.double() @ double.t() + bias.double() + residual.double()
    assert_near(row_linear(x, single, tile, bias=bias, residual=residual), expected)
    [tile] = one_row_tiles("gated", 2 * outputs, inputs)
    gated = row_linear(x, weight, tile, norm=(norm, 1e-6), is_gated=True)
    assert_near(gated, silu_gated(normed(x, norm, 1e-6) @ weight.double().t()))
    gated = row_linear(x, weight, tile, norm=(norm, 1e-6), is_gated=True, is_gelu=True)
    assert_near(gated, gelu_gated(normed(x, norm, 1e-6) @ weight.double().t()))
    ones = torch.ones_like(norm)
    folded = row_linear(x, weight, tile, norm=(ones, 1e-6), is_folded=True, is_gated=True)
    assert_near(folded, silu_gated(normed(x, ones, 1e-6) @ weight.double().t()))


@pytest.mark.parametrize(("in_thread", "late"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("inputs", [1088, 1216, 1472, 192, 448])  # steps of 512 leave 64, 192, 448, all
def test_one_row_through_a_weight_whose_inputs_steps_do_not_divide(inputs: int, *, in_thread: bool, late: bool) -> None:
    tile = OneRowTile(4, 512, 4, in_thread, late)
    x, weight = randn(1, inputs, seed=1), randn(24, inputs, seed=2, scale=inputs**-0.5)
    norm, residual = 1 + randn(inputs, seed=3, scale=0.2), randn(1, 24, seed=4)
    double = weight.double()
    assert_near(row_linear(x, weight, tile, residual=residual), x.double() @ double.t() + residual.double())
    expected = normed(x, norm, 1e-6) @ double.t()
    assert_near(row_linear(x, weight, tile, norm=(norm, 1e-6)), expected)
    assert_near(row_linear(x, weight, tile, norm=(norm, 1e-6), is_gated=True), silu_gated(expected))


def launch_one() -> None:
    tile = OneRowTile(2, 1024, 4, in_thread=True, late=True)
    for inputs in (1024, 2304, 896):  # of full steps; and of a last one that is not; of only such a one
        x, weight = torch.zeros(1, inputs, dtype=torch.bfloat16), torch.zeros(64, inputs, dtype=torch.bfloat16)
        row_linear(x, weight, tile)
        row_linear(x, weight, tile, norm=(x[0], 1e-6), is_gated=True)


def test_one_row_is_multiplied_with_eight_weights_that_are_read_at_once_by_a_hopper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = "worker_svc.core.kernels.linear.one_row._row_linear"
    compile_for_hopper(monkeypatch, kernel, "ld.global.v4.b32", launch_one)


@pytest.mark.parametrize("way", [Cublas(rows=3), Cublas(rows=8), Cublas(rows=9), Cublas(), Cublas(lt=True)], ids=str)
def test_a_product_in_pieces_is_the_product(way: Cublas) -> None:
    x, weight, residual = randn(8, 32, seed=1), randn(16, 32, seed=2), randn(8, 16, seed=3)
    expected = x.double() @ weight.double().t() + residual.double()
    assert_near(add_product(residual, x, weight, way), expected)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [96, 128])
@pytest.mark.parametrize("bias", [True, False])
def test_operations_agree_with_the_reference(rows: int, size: int, *, bias: bool) -> None:
    placement = Placement(DEVICE, DTYPE)
    norm = RMSNorm(placement, NormSpec("norm", 1e-6), size)
    gate_up = Linear(placement, [whole("gate", 64), whole("up", 64)], size, has_bias=bias)
    down = Linear(placement, [whole("down", size)], 64, slice(0, 64), has_bias=bias)
    for seed, shard in enumerate(placement.wanted):
        shard.destination.copy_(randn(*shard.destination.shape, seed=seed, scale=0.3))
    hidden = randn(rows, size, seed=20)
    fused, reference = TritonOperations(DEVICE, LINES), TorchOperations()
    assert_near(fused.norm_linear(hidden, norm, gate_up), reference.norm_linear(hidden, norm, gate_up))
    for activation in ("gelu_tanh", "silu"):
        gated = reference.norm_gated(hidden, norm, gate_up, activation)
        found = fused.norm_gated(hidden, norm, gate_up, activation)
        assert_near(found, gated, 2e-2 if DTYPE is torch.bfloat16 else 4e-3)
    expected = reference.linear_add(gated, down, hidden)
    assert_near(fused.linear_add(gated, down, hidden.clone()), expected)
    after = RMSNorm(placement, NormSpec("after", 1e-6, offset=1.0), size)
    after.weight.copy_(1 + randn(size, seed=21, scale=0.3, dtype=torch.float32))
    expected = reference.linear_add(gated, down, hidden, after)
    assert_near(fused.linear_add(gated, down, hidden.clone(), after), expected)


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("size", [96, 128])
def test_folded_norms_change_nothing_but_who_scales(rows: int, size: int) -> None:
    placement = Placement(DEVICE, DTYPE)
    norm = RMSNorm(placement, NormSpec("norm", 1e-6), size)
    gate_up = Linear(placement, [whole("gate", 64), whole("up", 64)], size, has_bias=False)
    norm.weight.copy_(1 + randn(size, seed=1, scale=0.3))
    weight_of(gate_up).copy_(randn(128, size, seed=2, scale=0.3))
    hidden = randn(rows, size, seed=20)
    operations, reference = TritonOperations(DEVICE, LINES), TorchOperations()
    expected = reference.norm_linear(hidden, norm, gate_up), reference.norm_gated(hidden, norm, gate_up)
    norm.fold(weight_of(gate_up))
    product, unscaled = operations.norm_linear_unscaled(hidden, norm, gate_up)
    tolerance = 2e-2 if DTYPE is torch.bfloat16 else 4e-3
    assert_near(product if unscaled is None else product * unscaled.scales(), expected[0], tolerance)
    assert_near(operations.norm_linear(hidden, norm, gate_up), expected[0], tolerance)
    assert_near(operations.norm_gated(hidden, norm, gate_up), expected[1], tolerance)
    assert_near(reference.norm_gated(hidden, norm, gate_up), expected[1], tolerance)


@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
def test_norms_are_folded_where_nothing_can_overflow_and_no_bias_would_be_scaled(
    dtype: torch.dtype, *, bias: bool
) -> None:
    placement = Placement(DEVICE, dtype)
    norm = RMSNorm(placement, NormSpec("norm", 1e-6), 8)
    linear = Linear(placement, [whole("one", 4)], 8, has_bias=bias)
    norm.weight.fill_(2)
    weight_of(linear).fill_(3)
    TritonOperations(DEVICE, LINES).fold_norm(norm, linear)
    folds = dtype is torch.bfloat16 and not bias
    assert norm.is_folded == folds
    assert weight_of(linear).unique().tolist() == ([6] if folds else [3])
    assert norm.weight.unique().tolist() == ([1] if folds else [2])
