"""Ways of products as a benchmark tells them."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest
import torch

from bench.ways import describe, parse_product, tell
from worker_svc.core.kernels.linear.product import Product
from worker_svc.core.kernels.linear.ways import CUBLAS, OneRowTile, Way
from worker_svc.measure import Measured
from worker_svc.tuner import Finding

PRODUCT = Product("added", 4352, 16896)
SLOW, FAST = OneRowTile(1, 1024, 4), OneRowTile(2, 2048, 4)

W = TypeVar("W")


class SlowerAndSlower:
    """Implement `Measure`: each call takes a microsecond more than the one before."""

    def copies(self, weight_bytes: int) -> int:
        return 2

    def __call__(self, calls: Mapping[W, Callable[[int], object]], copies: int) -> dict[W, Measured]:
        return {way: Measured(float(number), 0.1) for number, way in enumerate(calls, 1)}


def test_a_product_is_its_kind_and_its_outputs_and_inputs() -> None:
    assert parse_product("added:4352x16896") == PRODUCT


@pytest.mark.parametrize("text", ["added", "added:4352", "biased:64x64", "added:4352x16896 ", "added:-1x64"])
def test_what_is_no_product_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="KIND:OUTPUTSxINPUTS"):
        parse_product(text)


def test_the_fastest_ways_come_first_beside_what_tables_choose() -> None:
    times: dict[Way, Measured] = {CUBLAS: Measured(40.0, 0.1), SLOW: Measured(38.5, 0.1), FAST: Measured(35.0, 0.1)}
    finding = Finding(PRODUCT, range(1, 2), SLOW, FAST, times)
    chosen, *ways = describe(finding, 2)
    assert chosen == f"added:4352x16896, rows: 1; 38.50 us by {SLOW}"
    assert [line.split() for line in ways] == [
        ["35.00", "1.000", *str(FAST).split()],
        ["38.50", "1.100", *str(SLOW).split()],
    ]


def test_a_choice_that_computes_wrong_is_told() -> None:
    finding = Finding(PRODUCT, range(1, 2), SLOW, FAST, {FAST: Measured(35.0, 0.1)})
    assert next(describe(finding, 8)).startswith("added:4352x16896, rows: 1; wrong or not there by ")


def test_products_are_measured_with_the_rows_that_they_can_have() -> None:
    small = Product("added", 64, 128), Product("normed", 64, 128)
    lines = list(tell(torch.device("cpu"), SlowerAndSlower(), small, (1, 3), 2))
    assert [line for line in lines if line.startswith(("added", "normed"))] == [lines[0], lines[3], lines[6]]
    assert [line.split("; ")[0] for line in lines if ";" in line] == [
        "added:64x128, rows: 1",
        "added:64x128, rows: 3",
        "normed:64x128, rows: 1",
    ]
    assert all(line.split()[:2] == ["1.00", "1.000"] for line in lines[1::3])


def test_that_a_product_never_has_so_many_rows_is_told() -> None:
    [line] = tell(torch.device("cpu"), SlowerAndSlower(), [Product("normed", 64, 128)], (3,), 2)
    assert line.startswith("normed products have none of these numbers of rows")
