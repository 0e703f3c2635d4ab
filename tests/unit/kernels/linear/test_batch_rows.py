"""Products of a batch's rows against double precision, on a Hopper; that they compile for one, anywhere."""

import pytest
import torch
from hopper import compile_for_hopper
from kernel_inputs import DEVICE, assert_near, assert_replays_alike, randn

from worker_svc.core.kernels.linear.batch_cut import ProductCut, find_cut, find_gated_cut
from worker_svc.core.kernels.linear.batch_rows import BatchLinear, has_batch_linear
from worker_svc.core.kernels.linear.unscaled import Unscaled

needs_hopper = pytest.mark.skipif(not has_batch_linear(DEVICE), reason="needs a Hopper GPU")
INPUTS = 1024
CUTS = [
    ProductCut(64, 128, 64, 64, 1, 7),
    ProductCut(64, 128, 64, 128, 1, 3),
    ProductCut(64, 128, 64, 64, 4, 4),
    ProductCut(64, 64, 0, 64, 8, 3),
    ProductCut(64, 128, 0, 64, 2, 8),
    ProductCut(128, 128, 64, 64, 1, 5),
    ProductCut(128, 128, 0, 64, 4, 6),
]


@needs_hopper
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_any_cut_gives_the_product(cut: ProductCut) -> None:
    batch = BatchLinear()
    weight = randn(5 * cut.outputs, INPUTS, seed=2, scale=0.05)
    for rows in (1, 17, cut.rows - 1, cut.rows):  # launched again and again: splits' counters go on
        x, residual = randn(rows, INPUTS, seed=rows), randn(rows, len(weight), seed=3)
        product = x.double() @ weight.double().t()
        assert_near(batch.multiply(x, weight, cut), product)
        assert_near(batch.multiply(x, weight, cut, residual), product + residual.double())


@needs_hopper
@pytest.mark.parametrize("cut", [each for each in CUTS if each.splits == 1], ids=str)
@pytest.mark.parametrize("tiles", [3, 140])
def test_gates_are_those_of_normed_rows(cut: ProductCut, tiles: int) -> None:
    weight = randn(tiles * cut.outputs, INPUTS, seed=2, scale=0.05)
    for rows in (1, 17, cut.rows):
        hidden = randn(rows, INPUTS, seed=rows, scale=3.0)
        gate, up = (hidden.double() @ weight.double().t() * Unscaled(hidden, 1e-5).scales()).chunk(2, 1)
        assert_near(BatchLinear().gate(hidden, weight, cut, 1e-5), torch.nn.functional.silu(gate) * up)


@needs_hopper
def test_a_chain_of_products_in_a_graph_gives_what_it_gives_launched_one_by_one() -> None:
    batch, hidden = BatchLinear(), randn(60, INPUTS, seed=1)
    up, down = randn(6 * 192, INPUTS, seed=2, scale=0.05), randn(INPUTS, 3 * 192, seed=3, scale=0.05)

    def chain() -> torch.Tensor:
        out = hidden
        for _ in range(4):
            gated = batch.gate(out, up, ProductCut(64, 128, 64, 64, 1, 7), 1e-6)
            out = batch.multiply(gated, down, ProductCut(64, 128, 0, 64, 4, 2), out)
        return out

    assert_replays_alike(chain, times=3)


def test_products_of_some_rows_are_cut_for_nearly_all_multiprocessors() -> None:
    assert find_cut(4096, 4096, 64) == ProductCut(64, 128, 0, 64, 4, 8)
    assert find_cut(6144, 4096, 33) == ProductCut(64, 64, 0, 64, 1, 12)
    assert find_cut(1024, 3072, 96) == ProductCut(128, 64, 0, 64, 8, 4)
    assert find_gated_cut(24576, 4096, 17) == ProductCut(64, 128, 64, 128, 1, 3)
    assert find_gated_cut(6144, 1024, 33) == ProductCut(64, 64, 0, 64, 1, 9)
    assert find_gated_cut(24576, 4096, 128) == ProductCut(128, 128, 64, 64, 1, 5)


@pytest.mark.parametrize("rows", [16, 65, 129])
def test_where_others_are_better_they_are_left_to_them(rows: int) -> None:
    assert find_cut(4096, 4096, rows) is None
    assert find_gated_cut(24576, 4096, rows) is None


def test_small_weights_are_left_to_others_up_to_more_rows() -> None:
    assert find_cut(1024, 3072, 32) is None
    assert find_gated_cut(6144, 1024, 32) is None


def test_weights_that_do_not_divide_have_no_cut() -> None:
    assert find_cut(151936, 4096, 64) is None
    assert find_cut(4096 + 64, 4096, 64) is None
    assert find_gated_cut(24576 + 64, 4096, 64) is None


def launch_products() -> None:
    x, weight = torch.zeros(50, 1024, dtype=torch.bfloat16), torch.zeros(384, 1024, dtype=torch.bfloat16)
    batch = BatchLinear()
    batch.multiply(x, weight, ProductCut(64, 128, 64, 64, 4, 4), torch.zeros(50, 384, dtype=torch.bfloat16))
    batch.gate(x, weight, ProductCut(128, 128, 64, 64, 1, 4), 1e-6)


def test_the_kernel_compiles_for_a_hopper_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = "worker_svc.core.kernels.linear.batch_rows._batch_linear"
    compile_for_hopper(monkeypatch, kernel, "wgmma", launch_products)
