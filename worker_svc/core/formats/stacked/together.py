"""Outputs of experts' weights that stand side by side."""

import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)
from torch import Tensor

from worker_svc.core.formats.interface import Dim
from worker_svc.core.formats.words import BLOCK

TOGETHER = 16  # outputs of which a block stands side by side: memory is read in longer stretches by whoever reads some
TILE = (Dim("out", TOGETHER), Dim("in", BLOCK), Dim("none", TOGETHER))


def together(of_outputs: Tensor) -> Tensor:
    """[outputs, blocks, n] -> [outputs / TOGETHER, blocks, TOGETHER, n], filled up with noughts."""
    outputs, blocks, size = of_outputs.shape
    filled = F.pad(of_outputs, (0, 0, 0, 0, 0, -outputs % TOGETHER))
    return filled.view(-1, TOGETHER, blocks, size).transpose(1, 2)


def by_output(tiles: Tensor, outputs: int) -> Tensor:
    """Undo `together`."""
    return tiles.transpose(1, 2).flatten(0, 1)[:outputs]
