"""The cut of products of a batch's rows into tiles, as measured best on an H200."""

from dataclasses import dataclass

MULTIPROCESSORS = 132  # a program each
_FEWEST_PROGRAMS = 90
_SOME_ROWS, _MORE_ROWS, _MOST_ROWS = 64, 96, 128
_LARGE_WEIGHT = 1 << 24  # elements
_MANY_INPUTS, _VERY_MANY_INPUTS = 2048, 8192


@dataclass(frozen=True, slots=True)
class ProductCut:
    """Tiles of all rows; a program does one, or the splits of one are done by as many programs."""

    rows: int  # that there is room for: 64 or 128
    wide: int  # outputs of a tile; of a gated product half of them are gates, half ups
    narrow: int  # and so many more: with 128 and 64 outputs of 192
    inputs: int  # of a step
    splits: int  # of the inputs: power of two
    stages: int  # steps whose tiles are on their way at once

    @property
    def outputs(self) -> int:
        """Of a tile."""
        return self.wide + self.narrow

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return whether a weight divides into such tiles, for as many programs as can run at once or nearly."""
        programs = outputs // self.outputs * self.splits
        divides = outputs % self.outputs == 0 and inputs % (self.splits * self.inputs) == 0
        return divides and _FEWEST_PROGRAMS <= programs <= MULTIPROCESSORS


def find_cut(outputs: int, inputs: int, rows: int) -> ProductCut | None:
    """Of a product; None: others are better at it, or it has none.

    Qwen3-8B's were compared within decode steps, 0.6B's alone. Fewer rows are left to the kernels for few rows and
    cuBLAS, more to cuBLAS, whose programs share what they read, but for small outputs (0.6B's) and very many inputs.
    """
    if inputs < _MANY_INPUTS or not _fewest_rows(outputs, inputs) < rows <= _MOST_ROWS:
        return None
    if rows <= _SOME_ROWS:
        cuts = [ProductCut(64, 64, 0, 64, 1, 12), ProductCut(64, 128, 0, 64, 4, 8), ProductCut(64, 64, 0, 64, 8, 4)]
    elif inputs >= _VERY_MANY_INPUTS:
        cuts = [ProductCut(128, 128, 0, 64, 4, 6)] if rows > _MORE_ROWS else []
    else:
        cuts = [ProductCut(128, 64, 0, 64, 8, 4)]
    return next((each for each in cuts if each.fits(outputs, inputs)), None)


def find_gated_cut(outputs: int, inputs: int, rows: int) -> ProductCut | None:
    """Of a gated product, whose weight has `outputs` gates and ups; None: others are better at it, or it has none.

    What is saved is a kernel for the gate, and up to 64 rows one for the norm.
    """
    if not _fewest_rows(outputs, inputs) < rows <= _MOST_ROWS:
        return None
    if rows <= _SOME_ROWS:
        cuts = [ProductCut(64, 128, 64, 128, 1, 3), ProductCut(64, 64, 0, 64, 1, 9)]
    else:
        cuts = [ProductCut(128, 128, 64, 64, 1, 5)] if rows > _MORE_ROWS else []
    return next((each for each in cuts if each.fits(outputs, inputs)), None)


def _fewest_rows(outputs: int, inputs: int) -> int:
    """Up to which a weight is others'."""
    return 16 if outputs * inputs >= _LARGE_WEIGHT else 32
