"""Products of a few rows against double precision: rows that fill no tile, splits, residuals."""

import pytest
from kernel_inputs import assert_near, randn

from worker_svc.core.kernels.linear.few_rows import FewRows
from worker_svc.core.kernels.linear.ways import FewRowsTile


@pytest.mark.parametrize("rows", [2, 16, 19, 32, 50, 64])
@pytest.mark.parametrize("tile", [FewRowsTile(64, 64, 1, 3), FewRowsTile(32, 128, 2, 4), FewRowsTile(64, 64, 8, 2)])
def test_any_tile_gives_the_product_of_a_few_rows(rows: int, tile: FewRowsTile) -> None:
    x, weight, residual = randn(rows, 512, seed=1), randn(128, 512, seed=2, scale=0.05), randn(rows, 128, seed=3)
    product, few = x.double() @ weight.double().t(), FewRows()
    for _ in range(2):  # the second finds the counters that the first left
        assert_near(few.multiply(x, weight, tile), product)
        assert_near(few.multiply(x, weight, tile, residual), product + residual.double())
        assert_near(few.multiply(x, weight, tile, residual[:1].expand(rows, -1)), product + residual[:1].double())
