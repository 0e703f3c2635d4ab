"""All ways worth measuring of a product: every kernel, with those tiles that fit."""

from collections.abc import Iterator
from itertools import product as combinations
from typing import TypeVar

from msgspec.structs import replace

from worker_svc.core.kernels.linear.product import FP8_FORMS, INT4, Product
from worker_svc.core.kernels.linear.ways import (
    CUBLAS,
    MOST_BATCH_SPLITS,
    STREAMED_INT4_ROWS,
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

_Tile = TypeVar("_Tile", BatchTile, Fp8BatchTile)
_THREAD_WEIGHTS = range(8, 129)  # of a tile, that a thread of `OneRowTile` holds at once
_STREAMED_STEPS = range(32, 97)  # of 2 KiB, that programs of a multiprocessor have on their way by `RowStreamTile`
_FP8_THREAD_WEIGHTS = range(16, 129)  # as above, of `Fp8OneRowTile`
# Tiles have this many rows: for fewer than some they would be mostly empty.
_BATCH_ROWS, _FEWEST_BATCH_ROWS, _FEWEST_MANY_ROWS = (64, 128), 9, 33
_MOST_BATCH_STAGES = 12
_PIECES = (1024, 2048, 4096)
# Of an output, which are asked for ahead: of tiles of 64 outputs 64 KiB, which reading takes some 2 us for, of as many
# programs as there are multiprocessors.
_AHEAD_BYTES = 1024
_INT4_ROWS = (16, 32, 64, 128)
_MOST_PAIRED_INT4_ROWS = 32  # of which steps of two blocks have room
_MOST_INT4_ROWS = 512  # for more, a widened weight is little beside the product
# Of a tile of gates and ups, of more rows than one tile has, where multiprocessors then have that much less to compute.
_GATES_OUTPUTS, _MOST_OF_OTHERS = range(112, 209, 16), 0.97
_MANY_TILES = (
    *(ManyRowsTile(128, outputs, (2, 1)) for outputs in (96, 128, 192, 256)),
    *(ManyRowsTile(128, outputs, (2, 1), takes_turns=True) for outputs in (128, 192)),
    *(ManyRowsTile(128, outputs, (1, 2), is_early=True) for outputs in (64, 96, 128, 192)),
    *(
        ManyRowsTile(128, 64, (1, programs), is_early=True, is_swapped=True, splits=splits)
        for programs, splits in combinations((1, 2, 4), (1, 2))
    ),
)


def candidates(product: Product, rows: int) -> list[Way]:
    """Of so many rows of a product, each once; cuBLAS's own choice is the first."""
    if product.dtype == INT4:
        return [CUBLAS, *(way for way in (*_int4_rows(rows), *_int4_stream(rows)) if way.fits(product, rows))]
    if product.dtype in FP8_FORMS:
        of_fp8: list[Way] = [CUBLAS, *_fp8_one_row(), *_row_stream(product, 2048), *_fp8_few_rows()]
        if rows > 1:
            of_fp8 += _batch_rows(Fp8BatchTile, rows, (128, 256))
        return [way for way in of_fp8 if way.fits(product, rows)]
    ways: list[Way] = [CUBLAS, *_cublas(product, rows), *_one_row(product), *_row_stream(product, 1024), *_few_rows()]
    if rows >= _FEWEST_BATCH_ROWS:
        tiles = list(_batch_rows(BatchTile, rows, (64, 128)))
        ways += tiles
        ways += (replace(tile, stream_k=True) for tile in tiles if tile.splits == 1 and not tile.narrow)
    if rows >= _FEWEST_MANY_ROWS:
        ways += _MANY_TILES
        if product.kind == "gated" and rows > _BATCH_ROWS[-1]:
            ways += _gates_in_fewer_turns(product, rows)
    return [way for way in ways if way.fits(product, rows)]


def _cublas(product: Product, rows: int) -> Iterator[Way]:
    """Others of cuBLAS; what is normed or gated has a plain product in it, with lines of its own."""
    if product.kind in ("plain", "biased", "added"):
        yield Cublas(lt=True)
        for size in _PIECES:
            if size < rows:
                yield Cublas(rows=size)
                yield Cublas(lt=True, rows=size)


def _one_row(product: Product) -> Iterator[Way]:
    # (in_thread, late): a scale that is multiplied last is worth it where sums stay within threads.
    flags = [(False, False), (True, False)] + ([(True, True)] if product.kind in ("normed", "gated") else [])
    for outputs, inputs, warps in combinations((1, 2, 4, 8, 16, 32), (256, 512, 1024, 2048, 4096), (4, 8)):
        # Larger ones than the weight would be the same as smaller ones.
        divides = product.outputs % outputs == 0 and OneRowTile(outputs, inputs, warps).step(product.inputs) == inputs
        if divides and outputs * inputs // (32 * warps) in _THREAD_WEIGHTS:
            yield from (OneRowTile(outputs, inputs, warps, *each) for each in flags)


def _few_rows() -> Iterator[Way]:
    for outputs, inputs, splits, stages in combinations((32, 64), (64, 128), (1, 2, 4, 8), (4, 6)):
        for ahead in (0, _AHEAD_BYTES // 2):
            yield FewRowsTile(outputs, inputs, splits, stages, ahead)


def _fp8_one_row() -> Iterator[Way]:
    for outputs, inputs, warps in combinations((1, 2, 4, 8, 16), (256, 512, 1024, 2048, 4096), (4, 8)):
        if outputs * inputs // (32 * warps) in _FP8_THREAD_WEIGHTS:
            yield Fp8OneRowTile(outputs, inputs, warps)


def _row_stream(product: Product, inputs: int) -> Iterator[Way]:
    """Of steps of 2 and 4 KiB of a row of the weight, of which a multiprocessor asks for 64 to 192 KiB at once."""
    for rows, times, programs in combinations((2, 4, 8), (1, 2), (2, 3, 4, 6)):
        outputs = rows // 2 if product.kind == "gated" else rows
        for stages, early in ((2, 1), (3, 1), (3, 2), (4, 2), (6, 3)):
            if programs * stages * rows * times in _STREAMED_STEPS:
                yield RowStreamTile(outputs, times * inputs, 4, programs, stages, early)


def _fp8_few_rows() -> Iterator[Way]:
    for inputs, splits, stages in combinations((64, 128, 256), (1, 2, 4, 8), (3, 4, 6)):
        for ahead in (0, _AHEAD_BYTES):
            yield Fp8FewRowsTile(64, inputs, splits, stages, ahead=ahead)
            yield Fp8FewRowsTile(128, inputs, splits, stages, 8, ahead)


def _int4_rows(rows: int) -> Iterator[Way]:
    """Of tiles of all rows, or of half of many."""
    if rows > _MOST_INT4_ROWS:
        return
    of_all = next((each for each in _INT4_ROWS if each >= rows), _INT4_ROWS[-1])
    for (outputs, warps), splits, scaled in combinations(((64, 4), (128, 8)), (1, 2, 4, 8), (False, True)):
        if of_all <= _MOST_PAIRED_INT4_ROWS:
            for (blocks, stages), ahead in combinations(((1, 4), (2, 3)), (0, 4)):
                yield Int4Tile(outputs, of_all, splits, stages, warps, blocks, scaled, ahead)
        else:
            yield from (Int4Tile(outputs, each, splits, 3, warps, 1, scaled) for each in (of_all // 2, of_all))


def _int4_stream(rows: int) -> Iterator[Way]:
    if rows > _INT4_ROWS[-1]:
        yield from (Int4StreamTile(*each) for each in combinations(STREAMED_INT4_ROWS, (False, True)))


def _gates_in_fewer_turns(product: Product, rows: int) -> Iterator[Way]:
    """Of tiles of which multiprocessors compute fewer outputs, in all their turns, than of those of `_MANY_TILES`."""

    def outputs_in_turns(tile: ManyRowsTile) -> int:
        return tile.turns(rows, product.outputs) * tile.outputs

    fewest = min(outputs_in_turns(tile) for tile in _MANY_TILES if tile.takes_turns)
    for outputs in _GATES_OUTPUTS:
        tile = ManyRowsTile(128, outputs, (2, 1), takes_turns=True)
        if outputs_in_turns(tile) < _MOST_OF_OTHERS * fewest:
            yield tile


def _batch_rows(kernel: type[_Tile], rows: int, steps: tuple[int, int]) -> Iterator[_Tile]:
    """Of tiles of the fewest rows that are enough, with as many stages as there is room for."""
    of_all = next((each for each in _BATCH_ROWS if each >= rows), _BATCH_ROWS[-1])
    for (wide, narrow), inputs, splits in combinations(
        ((64, 0), (128, 0), (128, 64)), steps, range(1, MOST_BATCH_SPLITS + 1)
    ):
        for stages in range(_MOST_BATCH_STAGES, 1, -1):
            try:
                yield kernel(of_all, wide, narrow, inputs, splits, stages)
            except ValueError:  # no room for so many
                continue
            break
