"""The cut of products of many rows into tiles, as measured best on an H200."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile that a program multiplies at a time."""

    rows: int
    outputs: int  # of a gated product half of them are gates, half ups
    cluster: tuple[int, int]  # programs along the rows and the outputs
    takes_turns: bool = False  # its warps multiply two tiles, one while the other ends
    is_early: bool = False  # the weight's first tiles are asked for before the kernel ahead has ended
    is_swapped: bool = False  # the weight is the product's first operand: outputs take the matrix units' long side
    splits: int = 1  # of the inputs


_SINGLE = Tile(128, 192, (1, 2), is_early=True)
_WIDE = Tile(128, 192, (2, 1), takes_turns=True)
_NARROW = Tile(128, 96, (2, 1))

_ALL_ROWS = range(81, 129)  # that one tile has
_FEW_ROWS, _SOME_ROWS = 216, 256  # for few, cuBLAS has tiles as wide as the rows
_MANY_ROWS, _MANY_ROWS_OF_SMALL = 1024, 1280
_LARGE_WEIGHT = 1 << 24  # elements
_FEWEST_INPUTS = 1024
_ALIGNMENT = 128  # of outputs and inputs

# For rows that one tile has, by outputs and inputs: Qwen3-8B's, for it is how many tiles there are for how many
# multiprocessors that decides.
_PLAIN = {(6144, 4096): Tile(128, 64, (1, 4), is_early=True, is_swapped=True)}
_ADDED = {(4096, 12288): Tile(128, 64, (1, 2), is_early=True, is_swapped=True, splits=2)}
_GATED = {(24576, 4096): _SINGLE}


@dataclass(frozen=True, slots=True)
class Products:
    """Of a model's layers, each by its outputs and inputs."""

    plain: tuple[tuple[int, int], ...]
    added: tuple[tuple[int, int], ...]  # to a residual
    gated: tuple[tuple[int, int], ...]  # the outputs are gates and ups


@dataclass(frozen=True, slots=True)
class Tiles:
    """By what they are for."""

    plain: tuple[Tile, ...]
    added: tuple[Tile, ...]
    gated: tuple[Tile, ...]


ALL_TILES = Tiles(tuple(_PLAIN.values()), tuple(_ADDED.values()), (_SINGLE, _WIDE, _NARROW))


def tiles_for(products: Products) -> Tiles:
    """All that may be found for these, whatever the number of rows."""
    counts = range(1, _MANY_ROWS_OF_SMALL + 1)
    found = (
        {find_tile(*each, rows, is_added=False) for each in products.plain for rows in counts},
        {find_tile(*each, rows, is_added=True) for each in products.added for rows in counts},
        {find_gated_tile(*each, rows) for each in products.gated for rows in counts},
    )
    every = ALL_TILES.plain, ALL_TILES.added, ALL_TILES.gated
    return Tiles(*(tuple(tile for tile in all_ if tile in some) for all_, some in zip(every, found, strict=True)))


def find_tile(outputs: int, inputs: int, rows: int, *, is_added: bool) -> Tile | None:
    """Of a product, `is_added` to a residual; None: others are better at it."""
    return (_ADDED if is_added else _PLAIN).get((outputs, inputs)) if rows in _ALL_ROWS else None


def find_gated_tile(outputs: int, inputs: int, rows: int) -> Tile | None:
    """Of a gated product, whose weight has `outputs` gates and ups; None: others are better at it."""
    is_large = outputs * inputs >= _LARGE_WEIGHT
    if inputs < _FEWEST_INPUTS or outputs % _ALIGNMENT or inputs % _ALIGNMENT:
        return None
    if rows in _ALL_ROWS:
        return _GATED.get((outputs, inputs))
    if rows <= _FEW_ROWS:
        return None
    if rows <= _SOME_ROWS:
        return _WIDE if is_large else _NARROW
    if rows < _MANY_ROWS:
        # What a cluster's tiles have too much is a large part of so few rows.
        return _WIDE if is_large and rows % (_WIDE.rows * _WIDE.cluster[0]) == 0 else None
    return _WIDE if is_large or rows >= _MANY_ROWS_OF_SMALL else None
