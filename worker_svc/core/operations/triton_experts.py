"""Mixtures of experts by Triton's kernels: rows are sorted by expert."""

from torch import Tensor

from worker_svc.core.kernels.experts.routing import Choosing, Routed, choose_experts, score_experts, sort_pairs
from worker_svc.core.kernels.experts.tiles import add_tiles, gate_tiles
from worker_svc.core.models.spec import RouterSpec
from worker_svc.core.operations.interface import ExpertsLayer, RouterLayer


def add_experts(x: Tensor, experts: ExpertsLayer, residual: Tensor) -> Tensor:
    """See `Operations.experts_add`; in place."""
    routed, up, down = _route(x, experts.router), experts.input, experts.output
    pairs, of_inputs = sort_pairs(routed.ids, len(up.weight)), experts.router.spec.weighs_inputs
    gated = gate_tiles(x, up.weight, up.bias, routed, pairs, activation=experts.activation, weighs=of_inputs)
    add_tiles(gated, down.weight, down.bias, routed, pairs, residual, weighs=not of_inputs)
    return residual


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


def _route(x: Tensor, router: RouterLayer) -> Routed:
    return choose_experts(score_experts(x, router.weight, router.bias), router.correction, choosing_of(router.spec))
