"""The tuner: it measures whatever fits and is right, and writes a table of what is better, for the next worker."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DEVICE, DTYPE, LINES, assert_near, randn
from told_measure import INPUTS, OUTPUTS, FakeMeasure
from torch import Tensor

from contract.domain.errors import ErrorCode, PenstockError
from penstock.launcher.layout import BUNDLED_MODEL
from worker_svc import tuner as module
from worker_svc.core.formats.dense import Dense
from worker_svc.core.kernels.linear.candidates import candidates
from worker_svc.core.kernels.linear.few_rows import FewRows
from worker_svc.core.kernels.linear.product import FP8_FORMS, FP8_W8A8, INT4, Kind, Product
from worker_svc.core.kernels.linear.table import Choices, Line, Table, read_table, write_table
from worker_svc.core.kernels.linear.ways import (
    CUBLAS,
    BatchTile,
    Cublas,
    FewRowsTile,
    Fp8BatchTile,
    Fp8FewRowsTile,
    Fp8OneRowTile,
    Int4StreamTile,
    Int4Tile,
    ManyRowsTile,
    OneRowTile,
    RowStreamTile,
    Way,
)
from worker_svc.measure import GraphMeasure, Measured, summarize
from worker_svc.tuner import ROWS, Finding, Tuner, TuningOptions, tune_model
from worker_svc.tuning import card_of, find_lines

DTYPE_NAME = str(DTYPE).removeprefix("torch.")
RUNNABLE = (OneRowTile, FewRowsTile, Cublas)
TILE = FewRowsTile(64, 64, 2, 4)
OTHERS = Cublas(lt=True), FewRowsTile(32, 64, 1, 4)


def product(kind: Kind, outputs: int = OUTPUTS, inputs: int = INPUTS) -> Product:
    return Product(kind, outputs, inputs, DTYPE_NAME)


def tuner(measure: FakeMeasure, lines: tuple[Line, ...] = ()) -> Tuner:
    return Tuner(DEVICE, lines, None, measure)


@given(
    st.builds(
        Product,
        st.sampled_from(get_args(Kind)),
        st.integers(1, 500).map(lambda n: 64 * n),
        st.integers(1, 200).map(lambda n: 64 * n),
        st.sampled_from(["bfloat16", "float16", INT4, *FP8_FORMS]),
        st.sampled_from([None, 32, 128]),
    ),
    st.sampled_from(ROWS),
)
def test_candidates_fit_and_stand_there_once_and_cublas_is_the_first(product: Product, rows: int) -> None:
    ways = candidates(product, rows)
    assert ways[0] == CUBLAS
    assert len(set(ways)) == len(ways)
    assert all(way.fits(product, rows) for way in ways)


@pytest.mark.parametrize(
    ("outputs", "rows", "found"),
    [
        (20480, 256, {112, 160, 176}),  # 107 tiles of 192 outputs in two turns of 66 clusters, 128 of 160
        (28672, 256, {112, 160}),
        (28672, 512, set[int]()),
        (24576, 256, set[int]()),
        (24576, 2048, set[int]()),
        (20480, 128, set[int]()),
    ],
)
def test_gates_have_tiles_that_take_their_multiprocessors_fewer_turns(outputs: int, rows: int, found: set[int]) -> None:
    ways = [way for way in candidates(Product("gated", outputs, 4096), rows) if isinstance(way, ManyRowsTile)]
    assert {way.outputs for way in ways if way.takes_turns} == {128, 192} | found


@pytest.mark.parametrize(
    ("kind", "rows", "kernels"),
    [
        ("normed", 1, {OneRowTile, RowStreamTile}),
        ("plain", 8, {FewRowsTile}),
        ("plain", 32, {FewRowsTile, BatchTile}),
        ("added", 64, {FewRowsTile, BatchTile, ManyRowsTile}),
        ("added", 128, {BatchTile, ManyRowsTile}),
        ("gated", 2048, {ManyRowsTile}),
    ],
)
def test_there_are_candidates_of_every_kernel(kind: Kind, rows: int, kernels: set[type]) -> None:
    assert {type(way) for way in candidates(Product(kind, 6144, 4096), rows)} == {Cublas, *kernels}
    of_rows = {2048: {Int4StreamTile}, 256: {Int4Tile, Int4StreamTile}}
    of_int4 = candidates(Product(kind, 6144, 4096, INT4, 128), rows)
    assert {type(way) for way in of_int4} == {Cublas, *of_rows.get(rows, {Int4Tile})}
    of_fp8 = {1: {Fp8OneRowTile, Fp8FewRowsTile}, 2048: set[type]()}.get(rows, {Fp8FewRowsTile})
    for form in FP8_FORMS:
        others = {Fp8BatchTile} if 1 < rows <= 128 else {RowStreamTile} if rows == 1 else set[type]()
        of_rounded = others if form == FP8_W8A8 else set[type]()
        of_form = candidates(Product(kind, 6144, 4096, form, 128), rows)
        assert {type(way) for way in of_form} == {Cublas, *of_fp8, *of_rounded}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("normed", 1), ("added", 1), ("gated", 1), ("plain", 3), ("added", 20), ("plain", 64), ("gated", 3)],
)
def test_each_candidate_computes_the_right_product(kind: Kind, rows: int) -> None:
    measure = FakeMeasure()
    [finding] = tuner(measure).tune([product(kind)], [rows])
    # The interpreter runs kernels in Triton alone; a GPU runs all but those that ask for more than it has.
    is_gpu = DEVICE.type == "cuda"
    everything = {way for way in candidates(product(kind), rows) if is_gpu or isinstance(way, RUNNABLE)}
    assert measure.asked[0] <= everything if is_gpu else measure.asked == [everything]
    assert len(measure.asked[0]) > (1 if kind != "gated" or rows == 1 else 0)
    assert not finding.is_better


@pytest.mark.parametrize(("rows", "norms"), [(1, 0), (2, 1)])
def test_products_of_several_rows_are_measured_after_a_kernel_of_ours(
    rows: int, norms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a step: cuBLAS waits for that kernel's end. Of one row all kernels are ours."""
    normed: list[int] = []

    class Calling(FakeMeasure):
        def __call__(self, calls: Mapping[Way, Callable[[int], Tensor]], copies: int) -> dict[Way, Measured]:
            for call in calls.values():
                normed.clear()
                call(0)
                assert normed == [rows] * norms
            return super().__call__(calls, copies)

    measure = Calling()
    monkeypatch.setattr(module, "rms_norm", lambda x, *_: normed.append(len(x)))
    list(tuner(measure).tune([product("added")], [rows]))
    assert measure.asked


def test_a_machine_that_computes_nothing_rightly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuner, "_is_right", lambda *_: False)
    with pytest.raises(PenstockError, match="no way of 1 computes") as caught:
        list(tuner(FakeMeasure()).tune([product("gated")], [2]))
    assert caught.value.code == ErrorCode.INTERNAL
    assert "driver" in str(caught.value)


def test_a_way_that_computes_something_else_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FewRows.multiply

    def multiply(self: FewRows, x: Tensor, weight: Tensor, tile: FewRowsTile, residual: Tensor | None = None) -> Tensor:
        if tile == FewRowsTile(32, 64, 1, 4):
            raise RuntimeError("out of resource: shared memory")
        return right(self, x, weight, tile, residual) * (1.1 if tile == TILE else 1.0)

    monkeypatch.setattr(FewRows, "multiply", multiply)
    measure = FakeMeasure({TILE: 1.0})
    [finding] = tuner(measure).tune([product("plain")], [8])
    assert TILE not in measure.asked[0]
    assert FewRowsTile(32, 64, 1, 4) not in measure.asked[0]
    assert FewRowsTile(32, 64, 2, 4) in measure.asked[0]
    assert not finding.is_better


def test_what_stands_and_is_wrong_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FewRows, "multiply", lambda _self, x, weight, *_: x.new_zeros(len(x), len(weight)))
    standing = tuner(FakeMeasure(), (Line(("plain",), (2, 8), (TILE,)),))
    [finding] = standing.tune([product("plain")], [8])
    assert finding.is_better
    assert not isinstance(finding.best, FewRowsTile)


def test_the_least_is_found_for_the_rows_after_those_before() -> None:
    kept = tuner(FakeMeasure({TILE: 7.0}))
    [finding] = kept.tune([product("plain")], [24])
    assert (finding.standing, finding.best, finding.rows) == (CUBLAS, TILE, range(17, 25))
    [line] = kept.lines()
    found = Choices([line], RUNNABLE)
    assert [found.find(product("plain"), rows) == TILE for rows in (16, 17, 24, 25)] == [False, True, True, False]
    assert found.find(product("plain", 2 * OUTPUTS), 24) == found.find(product("added"), 24) == CUBLAS
    assert "7.00 us at 24 rows" in line.why


@pytest.mark.parametrize(("spread_us", "lines"), [(1.4, 1), (1.6, 0)])
def test_what_is_not_better_by_more_than_the_noise_is_left(spread_us: float, lines: int) -> None:
    kept = tuner(FakeMeasure({TILE: 7.0}, spread_us))
    assert len(list(kept.tune([product("plain")], [8, 16]))) == 2
    assert len(kept.lines()) == 2 * lines


def test_on_a_card_with_a_table_a_line_must_be_better_than_what_that_says() -> None:
    standing = (Line(("plain",), (2, 64), (FewRowsTile(32, 64, 1, 4),)),)
    [worse] = tuner(FakeMeasure({TILE: 7.0, FewRowsTile(32, 64, 1, 4): 6.9}), standing).tune([product("plain")], [8])
    assert not worse.is_better
    back = tuner(FakeMeasure({CUBLAS: 5.0}), standing)
    [finding] = back.tune([product("plain")], [8])
    assert (finding.best, finding.is_better) == (CUBLAS, True)
    assert Choices((*back.lines(), *standing), RUNNABLE).find(product("plain"), 8) == CUBLAS


def test_kinds_are_measured_with_the_rows_that_they_have() -> None:
    kinds: tuple[Kind, ...] = ("plain", "normed", "added", "gated")
    findings = tuner(FakeMeasure()).tune([product(kind, 64, 64) for kind in kinds], [1, 2])
    measured = [(each.product.kind, each.rows[-1]) for each in findings]
    assert measured == [("plain", 2), ("normed", 1), ("added", 1), ("added", 2), ("gated", 1), ("gated", 2)]


@pytest.fixture
def _two_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few candidates: a model has many products."""

    def few(product: Product, rows: int) -> list[Way]:
        return [way for way in (CUBLAS, *OTHERS) if way.fits(product, rows)]

    monkeypatch.setattr(module, "candidates", few)


def tune(path: Path, times: Mapping[Way, float], model: Path = BUNDLED_MODEL, dtype: str = DTYPE_NAME) -> list[str]:
    said: list[str] = []
    options = TuningOptions(str(model), dtype=dtype, sizes=(4,), out=path)
    tune_model(options, DEVICE, lambda _device: FakeMeasure(times), said.append)
    return said


@pytest.mark.parametrize(
    ("kind", "best", "kinds"),
    [
        ("plain", FewRowsTile(64, 64, 2, 4), ("plain", "biased")),
        ("plain", ManyRowsTile(128, 128, (2, 1)), ("plain",)),  # takes no bias along
        ("added", FewRowsTile(64, 64, 2, 4), ("added",)),
    ],
)
def test_what_is_found_of_a_plain_product_holds_with_a_bias_where_the_kernel_takes_one(
    kind: Kind, best: Way, kinds: tuple[Kind, ...]
) -> None:
    assert Finding(Product(kind, 4096, 4096), range(33, 65), CUBLAS, best, {}).line().kinds == kinds


@pytest.mark.usefixtures("_two_others")
def test_a_table_is_written_and_the_next_worker_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "mine.json"
    best = OTHERS[0]
    said = tune(path, {best: 1.0})
    table = read_table(path.read_bytes())
    assert table.card == card_of(DEVICE)
    assert len(table.lines) > 1
    assert said[-1] == f"{len(table.lines)} lines of this model's products in {path}"
    plain = next(line for line in table.lines if line.kinds == ("plain", "biased"))
    of_table = Product("plain", plain.outputs[0], plain.inputs[0], DTYPE_NAME)
    assert Choices(find_lines(DEVICE, str(path)), RUNNABLE).find(of_table, 3) == best
    assert Choices(LINES, RUNNABLE).find(of_table, 3) != best


@pytest.mark.usefixtures("_two_others")
def test_what_a_table_says_of_other_products_stays(tmp_path: Path) -> None:
    path, other = tmp_path / "mine.json", Line(("plain",), (2, 8), (TILE,), outputs=(192, 192), inputs=(4096, 4096))
    path.write_bytes(write_table(Table(card_of(DEVICE), (other,))))
    for way in OTHERS:
        tune(path, {way: 1.0})
        lines = read_table(path.read_bytes()).lines
        assert lines[-1] == other
        assert {line.ways for line in lines[:-1]} == {(way,)}


def test_a_file_that_is_no_table_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk")
    with pytest.raises(PenstockError, match=r"is no table for this card.*give another --out") as caught:
        tune(path, {})
    assert caught.value.code is ErrorCode.INTERNAL
    assert path.read_text() == "remember the milk"


def test_weights_in_full_precision_have_no_tables(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="weights are float32") as caught:
        tune(tmp_path / "mine.json", {}, dtype="float32")
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_calls_are_measured_as_graphs_over_all_copies() -> None:
    measure = GraphMeasure(DEVICE)
    weights = [randn(512, 512, seed=seed) for seed in range(3)]
    read: list[int] = []

    def call(copy: int) -> None:
        read.append(copy)
        weights[copy] @ weights[copy]

    call(0)  # cuBLAS cannot be loaded while a graph is recorded
    times = measure({CUBLAS: call, TILE: call}, len(weights))
    assert times.keys() == {CUBLAS, TILE}
    assert all(each.median_us > 0 for each in times.values())
    assert set(read) == {0, 1, 2}
    assert measure.copies(1 << 20) * (1 << 20) > torch.cuda.get_device_properties(DEVICE).L2_cache_size


def test_times_are_told_as_their_median_and_the_distance_of_their_quartiles() -> None:
    assert summarize([3.0, 1.0, 2.0, 100.0, 4.0]) == Measured(3.0, 2.0)


def test_a_product_of_one_row_is_that_of_its_norm() -> None:
    # What the tuner compares ways with is not what a way computes.
    x, weight = randn(1, 64, seed=1), randn(64, 64, seed=2)
    normed = Tuner(DEVICE, (), None, FakeMeasure())._expected(product("normed", 64, 64), x, x, Dense(weight))
    assert_near(normed, x.double() @ weight.double().t() / (x.double().square().mean() + 1e-6).sqrt(), 1e-3)
    assert normed.dtype is torch.float32
