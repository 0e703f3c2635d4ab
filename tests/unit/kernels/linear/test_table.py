"""What tables say of products: which way is found, what the H200's has, what is refused."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import H200, LINES

from worker_svc.core.kernels.linear.product import FP8_W8A8, FP8_W8A16, Kind, Product
from worker_svc.core.kernels.linear.table import Card, Choices, Line, Table, many_rows_tiles, read_table, write_table
from worker_svc.core.kernels.linear.ways import (
    CUBLAS,
    BatchTile,
    Cublas,
    FewRowsTile,
    Fp8OneRowTile,
    ManyRowsTile,
    OneRowTile,
    RowStreamTile,
    Way,
)
from worker_svc.tuning import packaged_lines

ALL: list[type] = [OneRowTile, FewRowsTile, BatchTile, ManyRowsTile, Cublas]
KINDS: tuple[Kind, ...] = get_args(Kind)
OWN, SINGLE = (
    ManyRowsTile(128, 64, (1, 4), is_early=True, is_swapped=True),
    ManyRowsTile(128, 192, (1, 2), is_early=True),
)
SPLIT = ManyRowsTile(128, 64, (1, 2), is_early=True, is_swapped=True, splits=2)
SINGLE = ManyRowsTile(128, 192, (1, 2), is_early=True)
WIDE, NARROW = ManyRowsTile(128, 192, (2, 1), takes_turns=True), ManyRowsTile(128, 96, (2, 1))

products = st.builds(
    Product,
    st.sampled_from(KINDS),
    st.integers(1, 2000).map(lambda n: 64 * n) | st.integers(1, 200000),
    st.integers(1, 300).map(lambda n: 64 * n) | st.integers(1, 20000),
    st.sampled_from(["bfloat16", "float16"]),
)


def found(kind: Kind, outputs: int, inputs: int, rows: int, *, without: type | None = None) -> Way:
    """What the H200 has."""
    return Choices(LINES, [each for each in ALL if each is not without]).find(Product(kind, outputs, inputs), rows)


def test_one_row_goes_through_tiles_that_suit_the_weight() -> None:
    in_thread = {"in_thread": True}
    late = {"in_thread": True, "late": True}
    assert found("normed", 1152, 896, 1) == found("normed", 151936, 2048, 1) == OneRowTile(8, 1024, 4, **late)
    assert found("added", 896, 896, 1) == found("added", 1024, 3072, 1) == OneRowTile(4, 1024, 8, **in_thread)
    assert found("normed", 4096, 1024, 1) == OneRowTile(32, 1024, 8)
    assert found("gated", 6144, 1024, 1) == OneRowTile(8, 512, 4, **late)
    assert found("normed", 151936, 1024, 1) == OneRowTile(16, 512, 4, **in_thread)
    assert found("gated", 17920, 1536, 1) == OneRowTile(8, 256, 4, **late)
    assert found("added", 1024, 2048, 1) == OneRowTile(8, 2048, 8)
    assert found("added", 2560, 2048, 1) == OneRowTile(2, 1024, 4, **in_thread)
    assert found("normed", 5120, 2048, 1) == OneRowTile(4, 1024, 4, **late)
    assert found("normed", 4096, 2560, 1) == OneRowTile(8, 2048, 4, **late)
    assert found("added", 1536, 1536, 1) == found("added", 3072, 3072, 1) == OneRowTile(4, 1024, 4)
    assert found("added", 2560, 2560, 1) == OneRowTile(8, 2048, 4)
    assert found("gated", 12288, 1792, 1) == OneRowTile(8, 1024, 4, **late)
    assert found("gated", 19712, 3072, 1) == found("normed", 7680, 6400, 1) == OneRowTile(4, 1024, 4, **late)
    assert found("gated", 20480, 2560, 1) == found("normed", 7680, 5632, 1) == OneRowTile(1, 2048, 4, **late)
    assert found("added", 2048, 4096, 1) == OneRowTile(2, 2048, 4)
    assert found("added", 1152, 6912, 1) == OneRowTile(1, 2048, 4)
    assert found("added", 2560, 6400, 1) == OneRowTile(2, 4096, 8)
    assert found("added", 2048, 8192, 1) == found("added", 4864, 14592, 1) == OneRowTile(1, 1024, 4)
    assert found("added", 1536, 8960, 1) == found("added", 3072, 9856, 1) == OneRowTile(1, 1024, 4, **in_thread)
    assert found("plain", 2560, 10240, 1) == found("added", 3584, 14336, 1) == OneRowTile(2, 2048, 4, **in_thread)
    assert found("added", 2048, 5632, 1) == found("added", 4352, 16896, 1) == OneRowTile(2, 2048, 4, **in_thread)
    assert found("added", 3584, 18944, 1) == OneRowTile(2, 4096, 4, **in_thread)
    assert found("added", 5120, 17408, 1) == OneRowTile(4, 1024, 4, **in_thread)
    assert found("added", 3584, 3584, 1) == OneRowTile(4, 2048, 8)
    assert found("added", 4352, 4352, 1) == OneRowTile(2, 2048, 4, **in_thread)
    assert found("added", 5120, 4096, 1) == found("added", 5120, 5120, 1) == OneRowTile(1, 1024, 4, **in_thread)
    assert found("added", 7168, 7168, 1) == OneRowTile(1, 2048, 4, **in_thread)
    assert found("added", 8192, 8192, 1) == OneRowTile(4, 2048, 4, **in_thread)
    assert found("normed", 6144, 4096, 1) == found("normed", 4608, 3584, 1) == OneRowTile(4, 2048, 4, **late)
    assert found("normed", 151936, 4096, 1) == OneRowTile(8, 1024, 4, **late)
    assert found("added", 4096, 4096, 1) == found("plain", 151936, 4096, 1) == OneRowTile(8, 1024, 4)
    assert found("gated", 24576, 4096, 1) == OneRowTile(1, 2048, 8, **late)
    assert found("gated", 33792, 4352, 1) == OneRowTile(2, 4096, 4, **late)
    assert found("gated", 30720, 5632, 1) == found("gated", 57344, 8192, 1) == OneRowTile(2, 2048, 4, **late)
    assert found("added", 4096, 12288, 1) == OneRowTile(1, 2048, 8)
    assert found("plain", 4096, 1024, 1) == found("biased", 4096, 1024, 1) == OneRowTile(32, 1024, 8)
    assert found("normed", 4096, 96, 1) == found("plain", 4096, 96, 1) == CUBLAS


def test_one_row_of_a_large_model_goes_through_programs_that_stay_where_they_run() -> None:
    def streamed(kind: Kind, outputs: int, inputs: int, dtype: str = "bfloat16") -> Way:
        kernels = [*ALL, Fp8OneRowTile, RowStreamTile]
        return Choices(LINES, kernels).find(Product(kind, outputs, inputs, dtype), 1)

    attention, narrow = RowStreamTile(4, 1024, 4, 6, 3, 2), RowStreamTile(4, 2048, 4, 4, 2, 1)
    assert streamed("normed", 6144, 4096) == streamed("normed", 4608, 3584, "float16") == attention
    assert streamed("added", 4096, 4096) == streamed("added", 2048, 8192) == attention
    assert streamed("added", 4096, 12288) == RowStreamTile(4, 1024, 4, 6, 4, 2)
    assert streamed("normed", 5120, 2048) == RowStreamTile(4, 2048, 4, 5, 2, 1)
    # Heads, gates, and what is small or too large for it are as they were.
    for product in (
        ("normed", 151936, 4096),
        ("gated", 24576, 4096),
        ("normed", 4096, 2048),
        ("added", 4352, 16896),
        ("normed", 7168, 5120),
        ("added", 8192, 8192),
    ):
        assert streamed(*product) == found(*product, 1)  # type: ignore[arg-type]
    assert streamed("gated", 24576, 4096, FP8_W8A8) == RowStreamTile(2, 2048, 4, 6, 3, 2)
    of_fp8_attention = RowStreamTile(4, 2048, 4, 6, 2, 1)
    assert streamed("normed", 6144, 4096, FP8_W8A8) == streamed("added", 4096, 4096, FP8_W8A8) == of_fp8_attention
    assert streamed("added", 4096, 12288, FP8_W8A8) == RowStreamTile(8, 4096, 8, 2, 3, 2)
    assert streamed("added", 3584, 3584, FP8_W8A8) == streamed("added", 2048, 8192, FP8_W8A8) == narrow
    assert (
        streamed("added", 4096, 14336, FP8_W8A8)
        == streamed("added", 3584, 18944, FP8_W8A8)
        == RowStreamTile(4, 2048, 4, 3, 4, 2)
    )
    assert isinstance(streamed("gated", 24576, 4096, FP8_W8A16), Fp8OneRowTile)


def test_a_step_of_one_row_is_that_of_the_tile_unless_inputs_are_fewer() -> None:
    steps = [OneRowTile(4, 1024, 8).step(inputs) for inputs in (4096, 2560, 18944, 2880, 896, 512, 96)]
    assert steps == [1024, 1024, 1024, 1024, 1024, 512, 128]


def test_small_weights_of_a_few_rows_are_cut_along_their_inputs_and_large_ones_are_not() -> None:
    assert found("plain", 1024, 2048, 32) == FewRowsTile(32, 128, 4, 6)
    assert found("added", 6144, 1024, 32) == FewRowsTile(64, 128, 1, 4)
    assert found("plain", 4096, 2048, 8) == FewRowsTile(32, 128, 1, 6)
    assert found("plain", 4096, 4096, 16, without=BatchTile) == FewRowsTile(64, 128, 2, 4)
    assert found("plain", 4096, 1024, 33) == found("biased", 4096, 1024, 33) == FewRowsTile(64, 128, 1, 5)
    assert found("plain", 1024, 3072, 64, without=BatchTile) == FewRowsTile(64, 128, 4, 5)
    assert found("plain", 24576, 4096, 16) == Cublas(lt=True)
    assert found("plain", 1000, 1024, 32) == found("plain", 1024, 96, 32) == CUBLAS


def test_products_of_some_rows_are_cut_for_nearly_all_multiprocessors() -> None:
    assert found("plain", 4096, 4096, 64) == found("biased", 4096, 4096, 64) == BatchTile(64, 128, 0, 64, 4, 8)
    assert found("plain", 6144, 4096, 33) == BatchTile(64, 64, 0, 64, 1, 12)
    assert found("added", 1024, 3072, 96) == BatchTile(128, 64, 0, 64, 8, 4)
    assert found("added", 4096, 12288, 100, without=ManyRowsTile) == BatchTile(128, 128, 0, 64, 4, 6)
    assert found("gated", 24576, 4096, 17) == BatchTile(64, 128, 64, 128, 1, 3)
    assert found("gated", 6144, 1024, 33) == BatchTile(64, 64, 0, 64, 1, 9)
    assert found("gated", 24576, 4096, 128, without=ManyRowsTile) == BatchTile(128, 128, 64, 64, 1, 5)


def test_large_weights_of_fewer_rows_have_few_programs_with_long_steps() -> None:
    narrow, halved = BatchTile(64, 64, 0, 128, 1, 7), BatchTile(64, 64, 0, 128, 2, 7)
    assert found("plain", 4096, 4096, 2) == found("added", 4352, 4352, 32) == narrow
    assert found("biased", 4608, 3584, 17) == found("added", 4352, 16896, 64) == narrow
    assert (
        found("added", 4096, 12288, 32) == found("added", 3072, 9856, 16) == found("added", 3584, 18944, 33) == halved
    )
    assert found("added", 2560, 6400, 64) == found("added", 4096, 12288, 33) == halved
    assert found("plain", 1536, 12288, 32) == BatchTile(64, 64, 0, 128, 3, 7)
    assert found("biased", 4096, 4096, 16) == Cublas(lt=True), "a bias was not measured"
    assert found("gated", 12800, 2560, 32) == found("gated", 33792, 4352, 64) == BatchTile(64, 128, 0, 128, 1, 4)


def test_small_weights_of_9_to_64_rows_have_tiles_of_64_outputs_for_many_multiprocessors_or_are_cublas_s() -> None:
    halved = FewRowsTile(64, 128, 2, 6)
    assert found("plain", 3584, 2560, 16) == found("added", 3328, 3328, 32) == found("plain", 3072, 3072, 64) == halved
    assert found("plain", 4608, 3584, 32) == FewRowsTile(64, 128, 1, 6)
    assert found("added", 2048, 2048, 9) == FewRowsTile(64, 128, 4, 6)
    assert found("added", 3584, 3584, 33) == CUBLAS


def test_gates_whose_tiles_leave_many_multiprocessors_idle_at_the_end_have_even_shares() -> None:
    even = BatchTile(64, 128, 0, 128, 1, 4, stream_k=True)
    assert found("gated", 34816, 5120, 64) == found("gated", 37888, 3584, 9) == found("gated", 20480, 3328, 32) == even
    assert found("gated", 20480, 3328, 33) == found("gated", 22016, 4096, 32) == CUBLAS
    assert found("gated", 34816, 5120, 8) == CUBLAS


@pytest.mark.parametrize("rows", [16, 65, 129])
def test_where_others_are_better_they_are_left_to_them(rows: int) -> None:
    assert not isinstance(found("plain", 2048, 4096, rows), BatchTile)
    assert isinstance(found("plain", 4096, 4096, rows), BatchTile) == (rows == 16)
    assert (found("gated", 24576, 4096, rows) == CUBLAS) == (rows > 16)


def test_weights_that_do_not_divide_have_no_tiles_of_a_batch() -> None:
    assert found("plain", 151936, 4096, 64) == Cublas(lt=True)
    assert found("plain", 4096 + 64, 4096, 65) == Cublas(lt=True)
    assert found("gated", 24576 + 64, 4096, 64) == CUBLAS


def test_gates_of_many_rows_are_left_to_the_package_and_fewer_to_others() -> None:
    rows = (80, 96, 128, 144, 208, 224, 256, 320, 512, 640, 1024, 2048, 4096)
    large = [found("gated", 24576, 4096, each, without=BatchTile) for each in rows]
    assert large == [CUBLAS, SINGLE, SINGLE, CUBLAS, CUBLAS, WIDE, WIDE, CUBLAS, WIDE, CUBLAS, WIDE, WIDE, WIDE]
    small = [found("gated", 6144, 1024, each) for each in (208, 224, 256, 512, 1024, 1280, 8192)]
    assert small == [CUBLAS, NARROW, NARROW, CUBLAS, CUBLAS, WIDE, WIDE]
    assert found("gated", 6144, 896, 4096) == found("gated", 34816, 5120, 96) == CUBLAS


@pytest.mark.parametrize(("kind", "weight", "tile"), [("plain", (6144, 4096), OWN), ("added", (4096, 12288), SPLIT)])
def test_products_of_some_rows_are_left_to_the_package(kind: Kind, weight: tuple[int, int], tile: ManyRowsTile) -> None:
    ways = [found(kind, *weight, rows, without=BatchTile) for rows in (64, 80, 81, 96, 128, 129, 256, 2048)]
    assert [way == tile for way in ways] == [False, False, True, True, True, False, False, False]
    assert found("added" if kind == "plain" else "plain", *weight, 96) != tile


def test_what_is_added_to_a_residual_goes_to_cublas_in_pieces_where_inputs_are_many() -> None:
    assert found("added", 4096, 4096, 300) == Cublas(lt=True, rows=2048)
    assert found("added", 2048, 4096, 300) == Cublas(rows=2048)
    assert found("added", 6144, 4096, 300) == found("biased", 4096, 4096, 300) == Cublas(lt=True)
    assert found("added", 1024, 2048, 300) == CUBLAS


def test_a_model_has_the_tiles_of_its_own_products_only() -> None:
    def tiles(*of: Product) -> dict[Kind, list[ManyRowsTile]]:
        return many_rows_tiles(LINES, of)

    large = Product("plain", 6144, 4096), Product("added", 4096, 12288), Product("gated", 24576, 4096)
    assert tiles(Product("added", 4096, 4096), *large) == {"plain": [OWN], "added": [SPLIT], "gated": [SINGLE, WIDE]}
    assert tiles(Product("plain", 4096, 1024), Product("gated", 6144, 1024)) == {"gated": [NARROW, WIDE]}
    assert tiles(Product("plain", 6144, 5120), Product("gated", 34816, 5120)) == {"gated": [WIDE]}
    assert tiles(Product("gated", 256, 64), Product("gated", 24576, 4096, "float16")) == {}


@given(products, st.integers(1, 5000))
def test_whatever_is_found_fits_and_can_run(product: Product, rows: int) -> None:
    for runnable in (ALL, [OneRowTile, Cublas]):
        way = Choices(LINES, runnable).find(product, rows)
        assert way.fits(product, rows)
        assert type(way) in runnable


@given(products, st.integers(1, 5000))
def test_on_a_card_that_nobody_measured_all_is_as_cublas_chooses(product: Product, rows: int) -> None:
    for card in (Card((8, 0), 108, "NVIDIA A100-SXM4-80GB"), Card((9, 0), 114), Card((10, 0), 148)):
        assert Choices(packaged_lines(card), ALL).find(product, rows) == CUBLAS


def test_the_first_line_counts_and_of_its_ways_the_first_that_fits() -> None:
    wide, narrow = FewRowsTile(128, 64, 1, 3), FewRowsTile(64, 64, 1, 3)
    lines = [
        Line(("plain",), (2, 8), (wide, narrow), outputs=(0, 256)),
        Line(("plain", "added"), (4, None), (narrow,), dtypes=("float16",)),
    ]

    def find(kind: Kind, outputs: int, rows: int, dtype: str = "float16") -> Way:
        return Choices(lines, ALL).find(Product(kind, outputs, 64, dtype), rows)

    assert find("plain", 256, 8) == wide
    assert find("plain", 192, 8) == find("plain", 320, 8) == find("plain", 256, 9) == find("added", 256, 4) == narrow
    assert find("plain", 256, 1) == find("added", 256, 3) == find("plain", 320, 8, "bfloat16") == CUBLAS


def test_a_table_is_read_back_as_it_was_written() -> None:
    table = Table(H200, (*LINES, Line(("plain",), (2, 4), (CUBLAS,), why='say "why": because, and so on')))
    assert read_table(write_table(table)) == table


def lines(text: str) -> bytes:
    return f'{{"card": {{"capability": [9, 0], "multiprocessors": 132}}, "lines": [{text}]}}'.encode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "truncated"),
        (lines('{"kinds": ["plain"], "rows": [1, 2], "ways": [{"kernel": "wmma"}]}'), "Invalid value 'wmma'"),
        (lines('{"kinds": ["plain"], "rows": [1, 2], "ways": [], "speed": 3}'), "unknown field `speed`"),
        (lines('{"kinds": ["square"], "rows": [1, 2], "ways": []}'), "Invalid enum value 'square'"),
        (lines('{"kinds": ["plain"], "rows": [0, 2], "ways": []}'), "one row or more"),
        (
            lines('{"kinds": ["plain"], "rows": [1, 2], "ways": [{"kernel": "cublas"}], "programs": [1, 2]}'),
            "few_rows, batch_rows, fp8_few_rows, fp8_batch_rows, int4_rows and int4_stream only",
        ),
        (
            lines(
                '{"kinds": ["plain"], "rows": [2, 8], "outputs": [96, 96], "inputs": [64, 64], "ways": '
                '[{"kernel": "few_rows", "outputs": 64, "inputs": 64, "splits": 1, "stages": 3}]}'
            ),
            "does not fit a plain product of 96 outputs and 64 inputs, of 2 to 8 rows",
        ),
        (
            lines(
                '{"kinds": ["gated"], "rows": [1, 65], "outputs": [128, 128], "inputs": [64, 64], "ways": [{"kernel": '
                '"batch_rows", "rows": 64, "wide": 128, "narrow": 0, "inputs": 64, "splits": 1, "stages": 3}]}'
            ),
            "of 1 to 65 rows",
        ),
    ],
)
def test_what_is_no_table_is_refused_with_where_and_why(text: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_table(text)


def test_tiles_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(ValueError, match="outputs of a tile must be a power of two, not 48"):
        FewRowsTile(48, 64, 1, 3)
    with pytest.raises(ValueError, match="64 or 128 rows"):
        BatchTile(32, 64, 0, 64, 1, 4)
    with pytest.raises(ValueError, match="no shared memory for 9 stages"):
        BatchTile(64, 128, 64, 64, 1, 9)
    with pytest.raises(ValueError, match="1 to 8 splits"):
        BatchTile(64, 64, 0, 64, 9, 4)
    with pytest.raises(ValueError, match="neither splits nor a narrow part"):
        BatchTile(64, 64, 0, 64, 2, 4, stream_k=True)
    assert not BatchTile(64, 64, 0, 64, 4, 4).fits(Product("plain", 64 * 34, 1024), 40)
    of_seven = BatchTile(64, 128, 0, 128, 7, 4)
    fitting = [
        of_seven.fits(Product("plain", 128 * tiles, steps * 128), 40) for tiles, steps in ((18, 7), (18, 6), (19, 8))
    ]
    assert fitting == [True, False, False], "a step of each split at least, and all at once"
    assert not ManyRowsTile(128, 64, (1, 1), splits=2).fits(Product("plain", 131072, 4096), 128)
    assert not Cublas(rows=0).fits(Product("added", 64, 64), 4)
    assert not Cublas(rows=8).fits(Product("plain", 64, 64), 4)
