"""Gates and ups of many rows in one product that takes the scale of each row and the gate along, by quack-kernels,
which comes with flash-attn-4: for Hopper. Programs of a cluster read for each other, so that it multiplies as fast as
cuBLAS, behind which the gate is a pass over memory of its own.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from worker_svc.core.kernels.norm import row_scales
from worker_svc.core.operations.interface import Unscaled


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program multiplies at a time."""

    rows: int
    outputs: int  # gates and ups
    cluster: tuple[int, int]  # programs along the rows and the outputs
    takes_turns: bool  # its warps multiply two tiles, one while the other ends


_WIDE = Tile(128, 192, (2, 1), takes_turns=True)
_SQUARE = Tile(128, 128, (1, 2), takes_turns=True)
_NARROW = Tile(128, 96, (2, 1), takes_turns=False)
TILES = (_WIDE, _SQUARE, _NARROW)

_FEW_ROWS, _SOME_ROWS = 216, 256  # for few, cuBLAS has tiles as wide as the rows
_MANY_ROWS, _MANY_ROWS_OF_SMALL = 1024, 1280
_LARGE_WEIGHT = 1 << 24  # elements
_FEWEST_INPUTS, _ALIGNMENT = 1024, 128

_TOLERANCE = 1e-2  # outputs are rounded to 8 bits


def find_tile(outputs: int, inputs: int, rows: int) -> Tile | None:
    """For a weight of so many gates and ups, as measured best on an H200; None: others are better at it."""
    if inputs < _FEWEST_INPUTS or outputs % _ALIGNMENT or inputs % _ALIGNMENT or rows <= _FEW_ROWS:
        return None
    is_large = outputs * inputs >= _LARGE_WEIGHT
    if rows <= _SOME_ROWS:
        return _WIDE if is_large else _NARROW
    if rows < _MANY_ROWS:
        # What a cluster's tiles have too much is a large part of so few rows.
        return _WIDE if is_large and rows % (_WIDE.rows * _WIDE.cluster[0]) == 0 else None
    return _SQUARE if is_large or rows >= _MANY_ROWS_OF_SMALL else None


class GatedProduct:
    """Multiplies on the current stream; compiles a tile when it is first used, unless it is on disk."""

    name = "quack-kernels"

    def __init__(self, epilogue: Any) -> None:
        self._epilogue = epilogue

    def __call__(self, hidden: Tensor, weight: Tensor, tile: Tile, eps: float) -> Tensor:
        """silu(gate) * up of hidden / rms(hidden): hidden [rows, inputs], weight [2 * outputs, inputs], gates then ups
        -> [rows, outputs]; bf16, contiguous.
        """
        out = torch.empty(len(hidden), len(weight) // 2, dtype=hidden.dtype, device=hidden.device)
        self._epilogue.gemm(
            hidden,
            weight,
            None,
            epi_args={"out": out, "scale": row_scales(hidden, eps)[None]},
            tile_M=tile.rows,
            tile_N=tile.outputs,
            cluster_M=tile.cluster[0],
            cluster_N=tile.cluster[1],
            pingpong=tile.takes_turns,
            # Read as if ups stood between gates: where they stand, they are half the weight apart.
            concat_layout=("B",),
        )
        return out

    def is_right(self, tile: Tile, device: torch.device) -> bool:
        """Whether a small product is what it should be: of some tiles that the package takes it is not."""
        generator = torch.Generator(device).manual_seed(0)
        shape = 3 * _ALIGNMENT, _ALIGNMENT
        hidden, weight = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(2))
        product = hidden.float() @ weight.float().t() * Unscaled(hidden, 1.0).scales()
        gate, up = product.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
        return bool((self(hidden, weight, tile, eps=1.0) - expected).norm() < _TOLERANCE * expected.norm())


def make_gated_product(device: torch.device) -> GatedProduct:
    """With all its tiles compiled or read from disk.

    Raises:
        ImportError: the package is not there.
        RuntimeError: it computes something else.
        Exception: whatever one of another version, or for another machine, raises.
    """
    product = GatedProduct(import_module("worker_svc.core.kernels.gated_epilogue").EPILOGUE)
    for tile in TILES:
        if not product.is_right(tile, device):
            raise RuntimeError(f"gates and ups are not what they should be with {tile}")
    return product
