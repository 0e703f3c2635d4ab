"""Tiles of the products of experts, as values: measured by hand, of floats on an H200, of the shapes of Qwen3-30B-A3B
and Mixtral, and on an H100, of those of Qwen3-30B-A3B and DeepSeek-V2-Lite, up to 24 pairs of an expert, and what is
added from 32 on, and of all three up to 32 pairs without tensor cores; of stored numbers on an H100, of those of
Qwen3-30B-A3B (8 bits) and gpt-oss-20b (4 bits); of integers of 4 bits, in groups of 128, on an H200, of those of
Qwen3-30B-A3B; of stored numbers without tensor cores, of the shapes of their models, on an H200.
"""

from dataclasses import dataclass

from worker_svc.core.kernels.experts.weights import FLOATS, FP4, FP8, INT4

_FEWEST_HALVED_PAIRS = 128  # of a tile, which then has a smaller one beside it


@dataclass(frozen=True, slots=True)
class Tile:
    """Of a program on tensor cores."""

    pairs: int
    outputs: int
    inputs: int  # of a step of the loop; of weights with scales for groups of inputs, no more than share one
    warps: int
    stages: int
    scaled: bool = False  # INT4: scales of whole blocks are multiplied with numbers; their sums take registers, too

    @property
    def short(self) -> int:
        """Pairs up to which an expert's last tile has room for but so many; 0: it is as the others are."""
        return self.pairs // 2 if self.pairs >= _FEWEST_HALVED_PAIRS else 0


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
    FP4: {8: Tile(16, 64, 128, 4, 4), 48: Tile(32, 128, 128, 4, 3), 160: Tile(64, 128, 128, 4, 3)},
    INT4: {8: Tile(16, 64, 128, 4, 4), 48: Tile(32, 128, 128, 4, 3)},
}
# Of products that are added, where those of gates and ups have others.
_ADD_TILES = {
    FLOATS: _TILES[FLOATS] | {80: Tile(64, 128, 64, 4, 4)},
    FP4: {8: Tile(16, 128, 128, 4, 4), 96: Tile(32, 128, 128, 4, 3), 320: Tile(64, 128, 128, 4, 3)},
    INT4: {16: Tile(16, 128, 128, 4, 4), 96: Tile(32, 128, 128, 4, 3)},
}
_LARGEST = {
    FLOATS: Tile(128, 128, 64, 8, 4),
    FP8: Tile(64, 64, 128, 4, 3),
    FP4: Tile(128, 128, 128, 8, 4),
    INT4: Tile(128, 64, 128, 4, 3, scaled=True),
}
_LARGEST_ADD = {FLOATS: Tile(128, 256, 64, 8, 4)}
FEWEST_STREAMED_PAIRS = 256  # of an expert, in the mean, from which on `tile_stream` adds them, on an H100
# Pairs up to which rows are multiplied without tensor cores, and pairs of an expert, in the mean, from which on weights
# are widened first; of FP4 it paid neither with 512 nor with 1,024, where both were close, and more were not measured.
MOST_ROW_PAIRS = {FLOATS: 16, FP8: 32, FP4: 8, INT4: 32}
FEW_ROW_PAIRS, FEWEST_EXPERTS_OF_A_PAIR = 8, 4  # more pairs than the first only where there are so many experts to each
FEWEST_WIDENED_PAIRS = {FP8: 512, FP4: 2048, INT4: 512}
GATE_ROWS = {
    FLOATS: RowsTile(1, 2048, 4),
    FP8: RowsTile(2, 2048, 2),
    FP4: RowsTile(2, 1024, 1),
    INT4: RowsTile(2, 1024, 1),
}
ADD_ROWS = {
    FLOATS: RowsTile(4, 2048, 2),
    FP8: RowsTile(4, 1024, 2),
    FP4: RowsTile(4, 2048, 2),
    INT4: RowsTile(4, 2048, 4),
}


def tile_for(num_pairs: int, num_experts: int, form: int = FLOATS, *, is_added: bool = False) -> Tile:
    """The tile whose pairs are filled about, if all experts have as many: of gates and ups, or of what is added."""
    tiles, largest = _TILES[form], _LARGEST[form]
    if is_added:
        tiles, largest = _ADD_TILES.get(form, tiles), _LARGEST_ADD.get(form, largest)
    found = (tile for most, tile in tiles.items() if num_pairs <= most * num_experts)
    return next(found, largest)
