"""Products of a few rows against double precision: rows that fill no tile, splits, residuals."""

import pytest
from kernel_inputs import assert_near, randn

from worker_svc.core.kernels.linear.few_rows import FewRows, Tiling, tiling


@pytest.mark.parametrize("rows", [2, 16, 19, 32, 50, 64])
@pytest.mark.parametrize("cut", [Tiling(64, 64, 1, 3), Tiling(32, 128, 2, 4), Tiling(64, 64, 8, 2)])
def test_any_tiling_gives_the_product(rows: int, cut: Tiling) -> None:
    x, weight, residual = randn(rows, 512, seed=1), randn(128, 512, seed=2, scale=0.05), randn(rows, 128, seed=3)
    product, few = x.double() @ weight.double().t(), FewRows()
    for _ in range(2):  # the second finds the counters that the first left
        assert_near(few.multiply(x, weight, cut), product)
        assert_near(few.multiply(x, weight, cut, residual), product + residual.double())


def test_small_weights_are_cut_along_their_inputs_and_large_ones_are_not() -> None:
    assert tiling(1024, 2048, 32) == Tiling(32, 128, 4, 6)
    assert tiling(6144, 1024, 32) == Tiling(64, 128, 1, 4)
    assert tiling(4096, 4096, 32) == Tiling(64, 128, 2, 4)
    assert tiling(24576, 4096, 32) is None
    assert tiling(1000, 1024, 32) is None
    assert tiling(1024, 96, 32) is None


def test_more_rows_have_wide_tiles() -> None:
    assert tiling(4096, 1024, 33) == Tiling(64, 128, 1, 5)
    assert tiling(1024, 3072, 64) == Tiling(64, 128, 4, 5)
    assert tiling(24576, 4096, 64) is None
