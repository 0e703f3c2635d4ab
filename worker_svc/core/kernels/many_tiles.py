"""How products of many rows are cut into tiles, as measured best on an H200."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program multiplies at a time."""

    rows: int
    outputs: int  # of a gated product half of them are gates, half ups
    cluster: tuple[int, int]  # programs along the rows and the outputs
    takes_turns: bool  # its warps multiply two tiles, one while the other ends


_WIDE = Tile(128, 192, (2, 1), takes_turns=True)
_SQUARE = Tile(128, 128, (1, 2), takes_turns=True)
_NARROW = Tile(128, 96, (2, 1), takes_turns=False)
TILES: tuple[Tile, ...] = ()
GATED_TILES = (_WIDE, _SQUARE, _NARROW)

_FEW_ROWS, _SOME_ROWS = 216, 256  # for few, cuBLAS has tiles as wide as the rows
_MANY_ROWS, _MANY_ROWS_OF_SMALL = 1024, 1280
_LARGE_WEIGHT = 1 << 24  # elements
_FEWEST_INPUTS = 1024

ALIGNMENT = 128  # of outputs and inputs

# Numbers of rows and their tiles, by outputs and inputs.
_MEASURED: dict[tuple[int, int], tuple[tuple[range, Tile], ...]] = {}


def find_tile(outputs: int, inputs: int, rows: int) -> Tile | None:
    """Of a product; None: others are better at it."""
    return next((tile for some, tile in _MEASURED.get((outputs, inputs), ()) if rows in some), None)


def find_gated_tile(outputs: int, inputs: int, rows: int) -> Tile | None:
    """Of a gated product, whose weight has `outputs` gates and ups; None: others are better at it."""
    if inputs < _FEWEST_INPUTS or outputs % ALIGNMENT or inputs % ALIGNMENT or rows <= _FEW_ROWS:
        return None
    is_large = outputs * inputs >= _LARGE_WEIGHT
    if rows <= _SOME_ROWS:
        return _WIDE if is_large else _NARROW
    if rows < _MANY_ROWS:
        # What a cluster's tiles have too much is a large part of so few rows.
        return _WIDE if is_large and rows % (_WIDE.rows * _WIDE.cluster[0]) == 0 else None
    return _SQUARE if is_large or rows >= _MANY_ROWS_OF_SMALL else None
