"""Products of a few rows against double precision: rows that fill no tile, splits, residuals."""

from collections.abc import Callable

import pytest
import torch
from hopper import compile_for_hopper
from kernel_inputs import DEVICE, assert_near, randn

from worker_svc.core.formats.dense import Dense
from worker_svc.core.kernels.linear import few_rows, fp8_few_rows
from worker_svc.core.kernels.linear.few_rows import FewRows
from worker_svc.core.kernels.linear.fp8_few_rows import Fp8FewRows
from worker_svc.core.kernels.linear.product import FP8_W8A8, Product
from worker_svc.core.kernels.linear.table import Line
from worker_svc.core.kernels.linear.ways import FewRowsTile, Fp8FewRowsTile
from worker_svc.core.operations.dense_multiplier import DenseMultiplier

KERNELS = "worker_svc.core.kernels.linear"
TILES = [
    FewRowsTile(64, 64, 1, 3),
    FewRowsTile(32, 128, 2, 4),
    FewRowsTile(64, 64, 8, 2),
    FewRowsTile(64, 64, 2, 4, ahead=256),
]


@pytest.mark.parametrize("rows", [2, 16, 19, 32, 50, 64])
@pytest.mark.parametrize("tile", TILES)
def test_any_tile_gives_the_product_of_a_few_rows(rows: int, tile: FewRowsTile) -> None:
    x, weight, residual = randn(rows, 512, seed=1), randn(128, 512, seed=2, scale=0.05), randn(rows, 128, seed=3)
    product, few = x.double() @ weight.double().t(), FewRows()
    for _ in range(2):  # the second finds the counters that the first left
        assert_near(few.multiply(x, weight, tile), product)
        assert_near(few.multiply(x, weight, tile, residual), product + residual.double())
        assert_near(few.multiply(x, weight, tile, residual[:1].expand(rows, -1)), product + residual[:1].double())


def test_a_bias_is_added_by_the_kernel_that_a_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dense, "multiply", None)
    table = Line(("biased",), (2, 64), (FewRowsTile(64, 64, 2, 4),))
    x, weight, bias = randn(5, 512, seed=1), randn(128, 512, seed=2, scale=0.05), randn(128, seed=3)
    found = DenseMultiplier(DEVICE, [table]).multiply(x, Dense(weight), bias)
    assert_near(found, x.double() @ weight.double().t() + bias.double())


def test_no_more_is_asked_for_ahead_than_a_split_has_and_in_whole_steps() -> None:
    product, narrow = Product("plain", 1024, 2048), Product("gated", 2048, 2048, FP8_W8A8)
    assert FewRowsTile(64, 128, 4, 4, 512).fits(product, 8)
    assert not FewRowsTile(64, 128, 4, 4, 1024).fits(product, 8)
    assert Fp8FewRowsTile(64, 128, 2, 4, ahead=1024).fits(narrow, 8)
    assert not Fp8FewRowsTile(64, 128, 4, 4, ahead=1024).fits(narrow, 8)
    with pytest.raises(ValueError, match="whole steps of 128 inputs, not 64"):
        FewRowsTile(64, 128, 4, 4, 64)
    with pytest.raises(ValueError, match="whole steps of 256 inputs, not -256"):
        Fp8FewRowsTile(64, 256, 4, 4, ahead=-256)


def launch_few() -> None:
    few_rows.has_dependent_launch = lambda _device: True  # type: ignore[assignment]
    x, weight = (torch.zeros(size, 1024, dtype=torch.bfloat16) for size in (32, 6144))
    FewRows().multiply(x, weight, FewRowsTile(64, 128, 2, 4, ahead=512))


def launch_narrow() -> None:
    fp8_few_rows.has_dependent_launch = lambda _device: True  # type: ignore[assignment]
    x, weight = (torch.zeros(size, 1024).to(torch.float8_e4m3fn) for size in (32, 6144))
    tile, scales = Fp8FewRowsTile(64, 128, 1, 4, ahead=1024), torch.zeros(6144, 1)
    Fp8FewRows().multiply(x, scales[:32], weight, scales, tile, torch.bfloat16, is_gated=True)


@pytest.mark.parametrize(("kernel", "launch"), [("few_rows", launch_few), ("fp8_few_rows", launch_narrow)])
def test_weights_are_asked_for_ahead_by_a_hopper_s_own_instruction(
    monkeypatch: pytest.MonkeyPatch, kernel: str, launch: Callable[[], None]
) -> None:
    compile_for_hopper(monkeypatch, f"{KERNELS}.{kernel}._{kernel}", "cp.async.bulk.prefetch.L2", launch)
