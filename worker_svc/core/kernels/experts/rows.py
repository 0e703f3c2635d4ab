"""Products of a few pairs of rows and experts, without tensor cores: at about the speed at which the weights can be
read, where tiles would be almost empty. Each pair reads its expert's weights by itself.
"""

import torch
from torch import Tensor

from worker_svc.core.kernels.experts.float_rows import add_float_rows, gate_float_rows
from worker_svc.core.kernels.experts.routing import Routed
from worker_svc.core.kernels.experts.tuning import (
    ADD_ROWS,
    FEW_ROW_PAIRS,
    FEWEST_EXPERTS_OF_A_PAIR,
    GATE_ROWS,
    MOST_ROW_PAIRS,
)
from worker_svc.core.kernels.experts.weights import FP4, INT4, ExpertWeights
from worker_svc.core.kernels.experts.word_rows import add_word_rows, gate_word_rows

_IN_WORDS = (FP4, INT4)


def takes_rows(weight: ExpertWeights, num_pairs: int) -> bool:
    """Return whether products of so many pairs are computed here; not of many that are of a few experts, whose weights
    would be read several times.
    """
    is_few = num_pairs <= FEW_ROW_PAIRS or num_pairs * FEWEST_EXPERTS_OF_A_PAIR <= weight.count
    return is_few and num_pairs <= MOST_ROW_PAIRS[weight.form]


def gate_rows(
    x: Tensor, weight: ExpertWeights, bias: Tensor | None, routed: Routed, *, activation: str, weighs: bool = False
) -> Tensor:
    """As `gate_tiles`."""
    out = torch.empty(routed.ids.numel(), weight.outputs // 2, dtype=x.dtype, device=x.device)
    multiply = gate_word_rows if weight.form in _IN_WORDS else gate_float_rows
    multiply(x, weight, bias, routed, out, GATE_ROWS[weight.form], activation=activation, weighs=weighs)
    return out


def add_rows(
    x: Tensor, weight: ExpertWeights, bias: Tensor | None, routed: Routed, residual: Tensor, *, weighs: bool = True
) -> None:
    """As `add_tiles`; routed: by kernels before the last."""
    add = add_word_rows if weight.form in _IN_WORDS else add_float_rows
    add(x, weight, bias, routed, residual, ADD_ROWS[weight.form], weighs=weighs)
