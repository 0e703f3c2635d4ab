"""Products of many rows by quack-kernels, which comes with flash-attn-4: for Hopper. Programs of a cluster read for
each other, so that it multiplies as fast as cuBLAS, and a tile's end takes along what is a kernel of its own there: the
scale of each row, and the gate.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from worker_svc.core.kernels.many_tiles import ALIGNMENT, GATED_TILES, TILES, Tile
from worker_svc.core.kernels.norm import row_scales
from worker_svc.core.operations.interface import Unscaled

_TOLERANCE = 1e-2  # outputs are rounded to 8 bits


class ManyRows:
    """Multiplies on the current stream, bf16, contiguous; compiles a tile when it is first used, unless it is on
    disk.
    """

    name = "quack-kernels"

    def __init__(self, ends: Any) -> None:
        self._ends = ends

    def multiply(self, x: Tensor, weight: Tensor, tile: Tile, residual: Tensor | None = None) -> Tensor:
        """x @ weight.T: x [rows, inputs], weight [outputs, inputs] -> [rows, outputs]; added to `residual`, in place,
        where there is one.
        """
        if residual is not None:
            self._ends.ADDED.gemm(x, weight, residual, residual, epi_args={}, **_options(tile))
            return residual
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        self._ends.PLAIN.gemm(x, weight, out, None, epi_args={}, **_options(tile))
        return out

    def gate(self, hidden: Tensor, weight: Tensor, tile: Tile, eps: float) -> Tensor:
        """silu(gate) * up of hidden / rms(hidden): hidden [rows, inputs], weight [2 * outputs, inputs], gates then ups
        -> [rows, outputs].
        """
        out = torch.empty(len(hidden), len(weight) // 2, dtype=hidden.dtype, device=hidden.device)
        self._ends.GATED.gemm(
            hidden,
            weight,
            None,
            None,
            epi_args={"out": out, "scale": row_scales(hidden, eps)[None]},
            # Read as if ups stood between gates: where they stand, they are half the weight apart.
            concat_layout=("B",),
            **_options(tile),
        )
        return out

    def is_right(self, tile: Tile, device: torch.device, *, is_gated: bool) -> bool:
        """Whether small products are what they should be: of some tiles that the package takes they are not."""
        generator = torch.Generator(device).manual_seed(0)
        shape = 3 * ALIGNMENT, ALIGNMENT
        x, weight = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(2))
        product = x.float() @ weight.float().t()
        if is_gated:
            gate, up = (product * Unscaled(x, 1.0).scales()).chunk(2, 1)
            return _is_near(self.gate(x, weight, tile, eps=1.0), torch.nn.functional.silu(gate) * up)
        residual = torch.randn(product.shape, generator=generator, device=device).bfloat16()
        added = product + residual
        return _is_near(self.multiply(x, weight, tile), product) and _is_near(
            self.multiply(x, weight, tile, residual), added
        )


def make_many_rows(device: torch.device) -> ManyRows:
    """With all its tiles compiled or read from disk.

    Raises:
        ImportError: the package is not there.
        RuntimeError: it computes something else.
        Exception: whatever one of another version, or for another machine, raises.
    """
    many_rows = ManyRows(import_module("worker_svc.core.kernels.many_ends"))
    for tiles, is_gated in ((TILES, False), (GATED_TILES, True)):
        for tile in tiles:
            if not many_rows.is_right(tile, device, is_gated=is_gated):
                raise RuntimeError(f"{'gates and ups' if is_gated else 'products'} are not what they should be: {tile}")
    return many_rows


def _options(tile: Tile) -> dict[str, Any]:
    return {
        "tile_M": tile.rows,
        "tile_N": tile.outputs,
        "cluster_M": tile.cluster[0],
        "cluster_N": tile.cluster[1],
        "pingpong": tile.takes_turns,
    }


def _is_near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() < _TOLERANCE * expected.norm())
