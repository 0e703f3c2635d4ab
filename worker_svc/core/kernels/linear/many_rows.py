"""Products of many rows by quack-kernels, which comes with flash-attn-4: for Hopper. Programs of a cluster read for
each other, so that it multiplies as fast as cuBLAS, and a tile's end takes along what is a kernel of its own there: the
scale of each row, and the gate.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from worker_svc.core.kernels.linear.norm import row_scales
from worker_svc.core.kernels.linear.product import Kind
from worker_svc.core.kernels.linear.unscaled import Unscaled
from worker_svc.core.kernels.linear.ways import MOST_SPLIT_TILES, MOST_SPLIT_VALUES, ManyRowsTile

_TOLERANCE = 1e-2  # outputs are rounded to 8 bits
VERSION = 1  # of `many_ahead`: kernels on disk are named after it


class ManyRows:
    """Multiplies on one stream, bf16, contiguous; compiles a tile when it is first used, unless it is on disk."""

    name = "quack-kernels"

    def __init__(self, ends: Any, device: torch.device) -> None:
        self._ends = ends
        # Of splits: which have ended, which they reset, and their sum so far.
        self._ended = torch.zeros(MOST_SPLIT_TILES, dtype=torch.int32, device=device)
        self._parts = torch.empty(MOST_SPLIT_VALUES, device=device)

    def multiply(self, x: Tensor, weight: Tensor, tile: ManyRowsTile, residual: Tensor | None = None) -> Tensor:
        """x @ weight.T: x [rows, inputs], weight [outputs, inputs] -> [rows, outputs]; added to `residual`, in place,
        where there is one. Of splits as many whole tiles as have room for their sums.
        """
        out = residual
        if out is None:
            out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        a, b, d = (weight, x, out.t()) if tile.is_swapped else (x, weight, out)
        options = _options(tile)
        if tile.splits > 1:
            a, b, d = a[None], b[None], d[None]
            options |= {"split_k": tile.splits, "split_k_buffers": self._split_buffers(tile, len(x), len(weight))}
        end, c = (self._ends.PLAIN, None) if residual is None else (self._ends.ADDED, d)
        end.gemm(a, b, d, c, epi_args={}, **options)
        return out

    def gate(self, hidden: Tensor, weight: Tensor, tile: ManyRowsTile, eps: float) -> Tensor:
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

    def _split_buffers(self, tile: ManyRowsTile, rows: int, outputs: int) -> tuple[Tensor, Tensor]:
        """As the package wants them, of tiles of whole clusters."""
        by_rows, by_outputs = tile.padded(rows, outputs)
        tiles = (1, by_outputs, by_rows) if tile.is_swapped else (1, by_rows, by_outputs)
        ended = self._ended[: by_rows * by_outputs].view(tiles)
        size = tile.rows * tile.outputs
        return ended, self._parts[: by_rows * by_outputs * size].view(*tiles, size)

    def makes_product(self, tile: ManyRowsTile, device: torch.device) -> bool:
        """Return whether a small one is what it should be: of some tiles that the package takes they are not."""
        x, weight, _ = _samples(device)
        return _is_near(self.multiply(x, weight, tile), x.float() @ weight.float().t())

    def adds_product(self, tile: ManyRowsTile, device: torch.device) -> bool:
        """See `makes_product`."""
        x, weight, residual = _samples(device)
        expected = residual + x.float() @ weight.float().t()
        return _is_near(self.multiply(x, weight, tile, residual), expected)

    def makes_gates(self, tile: ManyRowsTile, device: torch.device) -> bool:
        """See `makes_product`."""
        hidden, weight, _ = _samples(device)
        gate, up = (hidden.float() @ weight.float().t() * Unscaled(hidden, 1.0).scales()).chunk(2, 1)
        return _is_near(self.gate(hidden, weight, tile, eps=1.0), torch.nn.functional.silu(gate) * up)


def make_many_rows(device: torch.device, tiles: Mapping[Kind, Sequence[ManyRowsTile]]) -> ManyRows:
    """With these tiles compiled or read from disk, a second or two each, and found right.

    Raises:
        ImportError: the package is not there.
        RuntimeError: it computes something else.
        Exception: whatever one of another version, or for another machine, raises.
    """
    many_rows = ManyRows(import_module("worker_svc.core.kernels.linear.many_ends"), device)
    makers: tuple[tuple[Kind, Callable[[ManyRowsTile, torch.device], bool]], ...] = (
        ("plain", many_rows.makes_product),
        ("added", many_rows.adds_product),
        ("gated", many_rows.makes_gates),
    )
    for kind, is_right in makers:
        for tile in tiles.get(kind, ()):
            if not is_right(tile, device):
                raise RuntimeError(f"{is_right.__name__}: not what it should be with {tile}")
    return many_rows


def _options(tile: ManyRowsTile) -> dict[str, Any]:
    shape, cluster = (tile.rows, tile.outputs), tile.cluster
    if tile.is_swapped:
        shape, cluster = shape[::-1], cluster[::-1]
    # Of the kernel's class, set before it is compiled.
    attributes = (("weight", "A" if tile.is_swapped else "B"), ("version", VERSION)) if tile.is_early else ()
    return {
        "tile_M": shape[0],
        "tile_N": shape[1],
        "cluster_M": cluster[0],
        "cluster_N": cluster[1],
        "pingpong": tile.takes_turns,
        "post_init_attrs": attributes,
    }


def _samples(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, residual: several tiles, of more inputs than are on their way at once."""
    generator = torch.Generator(device).manual_seed(0)
    rows, outputs, inputs = 384, 384, 3072
    shapes = (rows, inputs), (outputs, inputs), (rows, outputs)
    x, weight, residual = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    return x.bfloat16(), (weight * inputs**-0.5).bfloat16(), residual.bfloat16()


def _is_near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() < _TOLERANCE * expected.norm())
