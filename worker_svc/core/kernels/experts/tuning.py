"""Tiles of the products of experts, as values: measured by hand, of floats on an H200, of the shapes of Qwen3-30B-A3B
and Mixtral, and up to 24 pairs of an expert on an H100, of those of Qwen3-30B-A3B and DeepSeek-V2-Lite; of stored
numbers on an H100, of those of Qwen3-30B-A3B and gpt-oss-20b.
"""

from dataclasses import dataclass

from worker_svc.core.kernels.experts.weights import FLOATS, FP4, FP8


@dataclass(frozen=True, slots=True)
class Tile:
    """Of a program on tensor cores."""

    pairs: int
    outputs: int
    inputs: int  # of a step of the loop; of weights with scales for groups of inputs, no more than share one
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class RowsTile:
    """Of a program without tensor cores, at a time."""

    outputs: int
    inputs: int
    warps: int


# By the form of weights, and up to so many pairs that an expert has in the mean. Tiles have room for more than the
# mean, as weights are read again for a second one.
_TILES = {
    FLOATS: {8: Tile(16, 64, 128, 4, 4), 24: Tile(32, 64, 128, 4, 4), 32: Tile(64, 128, 64, 4, 4)},
    FP8: {8: Tile(16, 32, 128, 2, 3), 16: Tile(32, 64, 128, 2, 3)},
    FP4: {8: Tile(16, 64, 128, 4, 4)},
}
_LARGEST = {
    FLOATS: Tile(128, 128, 64, 8, 4),
    FP8: Tile(64, 64, 128, 4, 3),
    FP4: Tile(32, 64, 128, 4, 3),
}
# Pairs up to which rows are multiplied without tensor cores, and pairs of an expert, in the mean, from which on weights
# are widened first; of FP4, where that begins to pay lies between 32, where it does not, and 512, where it does.
MOST_ROW_PAIRS = {FP8: 32, FP4: 6}
FEWEST_WIDENED_PAIRS = {FP8: 512, FP4: 96}
GATE_ROWS = {FP8: RowsTile(4, 2048, 4), FP4: RowsTile(4, 1024, 2)}
ADD_ROWS = {FP8: RowsTile(4, 1024, 4), FP4: RowsTile(4, 1024, 2)}


def tile_for(num_pairs: int, num_experts: int, form: int = FLOATS) -> Tile:
    """The tile whose pairs are filled about, if all experts have as many."""
    found = (tile for most, tile in _TILES[form].items() if num_pairs <= most * num_experts)
    return next(found, _LARGEST[form])
