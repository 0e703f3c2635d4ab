"""Mixtures of experts by Triton's kernels: rows are sorted by expert."""

import torch
from torch import Tensor

from worker_svc.core.formats.stacked.floats import StackedFloats
from worker_svc.core.formats.stacked.fp4 import StackedFp4
from worker_svc.core.formats.stacked.fp8 import StackedFp8
from worker_svc.core.formats.stacked.int4 import StackedInt4
from worker_svc.core.formats.stacked.interface import StackedWeight
from worker_svc.core.kernels.experts.routing import (
    Choosing,
    choose_experts,
    score_experts,
    score_rows,
    scores_singly,
)
from worker_svc.core.kernels.experts.rows import add_rows, gate_rows, takes_rows
from worker_svc.core.kernels.experts.sorting import sort_pairs
from worker_svc.core.kernels.experts.tile_stream import add_streamed, can_stream
from worker_svc.core.kernels.experts.tiles import add_tiles, gate_tiles
from worker_svc.core.kernels.experts.weights import FLOATS, FP4, FP8, INT4, ExpertWeights
from worker_svc.core.kernels.experts.widening import takes_floats, widen
from worker_svc.core.kernels.linear.norm import rms_norm
from worker_svc.core.models.spec import RouterSpec
from worker_svc.core.operations.interface import ExpertsLayer, Norm, RouterLayer


def norm_score(hidden: Tensor, norm: Norm | None, router: RouterLayer) -> tuple[Tensor, Tensor]:
    """See `Operations.norm_score`."""
    if norm is not None and scores_singly(*hidden.shape):
        return score_rows(hidden, (norm.weight, norm.eps), router.weight, router.bias)
    x = hidden if norm is None else rms_norm(hidden, norm.weight, norm.eps)
    return x, score_experts(x, router.weight, router.bias)


def add_experts(x: Tensor, scores: Tensor, experts: ExpertsLayer, residual: Tensor) -> Tensor:
    """See `Operations.experts_add`; in place."""
    router, up, down = experts.router, experts.input, experts.output
    routed = choose_experts(scores, router.correction, choosing_of(router.spec))
    of_inputs, num_pairs = router.spec.weighs_inputs, routed.ids.numel()
    first, second = weights_of(up.weight), weights_of(down.weight)
    if takes_rows(first, num_pairs):
        gated = gate_rows(x, first, up.bias, routed, activation=experts.activation, weighs=of_inputs)
        add_rows(gated, second, down.bias, routed, residual, weighs=not of_inputs)
        return residual
    pairs = sort_pairs(routed.ids, first.count)
    if takes_floats(first, num_pairs):
        first, second = widen(first, x.dtype), widen(second, x.dtype)
    streams = down.bias is None and not of_inputs and can_stream(x, second, num_pairs)
    gated = gate_tiles(x, first, up.bias, routed, pairs, activation=experts.activation, weighs=of_inputs, sorts=streams)
    if streams:
        add_streamed(gated, second, routed, pairs, residual)
    else:
        add_tiles(gated, second, down.bias, routed, pairs, residual, weighs=not of_inputs)
    return residual


def weights_of(weight: StackedWeight) -> ExpertWeights:
    """Those of all experts, as kernels take them."""
    if isinstance(weight, StackedFp4):
        exponents = weight.exponents.view(torch.int32).squeeze(-1)
        return ExpertWeights(FP4, weight.numbers, weight.inputs, exponents, weight.scales)
    if isinstance(weight, StackedInt4):
        scales = weight.scales.view(torch.int32)
        return ExpertWeights(INT4, weight.numbers, weight.inputs, scales=scales, group=weight.group or 0)
    if isinstance(weight, StackedFp8):
        return ExpertWeights(FP8, weight.numbers, weight.inputs, scales=weight.scales, group=weight.group or 0)
    assert isinstance(weight, StackedFloats), "a form without kernels"
    return ExpertWeights(FLOATS, weight.weight, weight.inputs)


def choosing_of(spec: RouterSpec) -> Choosing:
    """The rules of a router, as kernels take them."""
    return Choosing(
        top_k=spec.top_k,
        is_sigmoid=spec.score == "sigmoid",
        renormalizes=spec.renormalizes,
        scale=spec.scale,
        num_groups=spec.num_groups,
        num_chosen_groups=spec.num_chosen_groups,
        num_group_scores=spec.num_group_scores,
        is_by_logits=spec.is_by_logits,
    )
