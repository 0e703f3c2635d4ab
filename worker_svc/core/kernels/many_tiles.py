"""How products of many rows are cut into tiles, as measured best on an H200."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program multiplies at a time."""

    rows: int
    outputs: int  # of a gated product half of them are gates, half ups
    cluster: tuple[int, int]  # programs along the rows and the outputs
    takes_turns: bool = False  # its warps multiply two tiles, one while the other ends
    is_early: bool = False  # the weight's first tiles are asked for before the kernel ahead has ended
    is_swapped: bool = False  # outputs take the matrix units' long side, so that rows may be any multiple of 16
    splits: int = 1  # of the inputs


_SINGLE = Tile(128, 192, (1, 2), is_early=True)
_WIDE = Tile(128, 192, (2, 1), takes_turns=True)
_NARROW = Tile(128, 96, (2, 1))
GATED_TILES = (_SINGLE, _WIDE, _NARROW)

_ALL_ROWS = range(81, 129)  # that one tile has
_FEW_ROWS, _SOME_ROWS = 216, 256  # for few, cuBLAS has tiles as wide as the rows
_MANY_ROWS, _MANY_ROWS_OF_SMALL = 1024, 1280
_LARGE_WEIGHT = 1 << 24  # elements
_FEWEST_INPUTS = 1024

ALIGNMENT = 128  # of outputs and inputs

# Tiles for numbers of rows, by outputs and inputs: Qwen3-8B's, as compared within decode steps.
_Table = dict[tuple[int, int], tuple[tuple[range, Tile], ...]]
_PLAIN: _Table = {
    (6144, 4096): ((_ALL_ROWS, Tile(128, 64, (1, 4), is_early=True, is_swapped=True)),),
}
_ADDED: _Table = {
    (4096, 12288): ((_ALL_ROWS, Tile(128, 64, (1, 2), is_early=True, is_swapped=True, splits=2)),),
}
PLAIN_TILES, ADDED_TILES = (
    tuple(dict.fromkeys(tile for some in table.values() for _, tile in some)) for table in (_PLAIN, _ADDED)
)


def find_tile(outputs: int, inputs: int, rows: int, *, is_added: bool) -> Tile | None:
    """Of a product, `is_added` to a residual; None: others are better at it."""
    table = _ADDED if is_added else _PLAIN
    return next((tile for some, tile in table.get((outputs, inputs), ()) if rows in some), None)


def find_gated_tile(outputs: int, inputs: int, rows: int) -> Tile | None:
    """Of a gated product, whose weight has `outputs` gates and ups; None: others are better at it."""
    is_large = outputs * inputs >= _LARGE_WEIGHT
    if inputs < _FEWEST_INPUTS or outputs % ALIGNMENT or inputs % ALIGNMENT:
        return None
    if is_large and rows in _ALL_ROWS:
        return _SINGLE
    if rows <= _FEW_ROWS:
        return None
    if rows <= _SOME_ROWS:
        return _WIDE if is_large else _NARROW
    if rows < _MANY_ROWS:
        # What a cluster's tiles have too much is a large part of so few rows.
        return _WIDE if is_large and rows % (_WIDE.rows * _WIDE.cluster[0]) == 0 else None
    return _WIDE if is_large or rows >= _MANY_ROWS_OF_SMALL else None
