"""Mixtures of experts by plain torch: the reference."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.core.kernels.experts.bounds import CLAMP, CLAMPED_SLOPE
from worker_svc.core.operations.interface import Activation, ExpertsLayer, RouterLayer, StackedLayer

_TINY = 1e-20  # beside the sum that weights are divided by


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up."""
    if activation == "clamped_silu":
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return gate * torch.sigmoid(CLAMPED_SLOPE * gate) * (up + 1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def add_experts(x: Tensor, scores: Tensor, experts: ExpertsLayer, residual: Tensor) -> Tensor:
    """See `Operations.experts_add`; one expert after the other, summed in fp32."""
    ids, weights = choose_experts(scores.sum(0), experts.router)
    up, down = experts.input, experts.output
    total = torch.zeros(residual.shape, dtype=torch.float32, device=residual.device)
    for expert in sorted({*ids.flatten().tolist()}):
        rows, places = (ids == expert).nonzero(as_tuple=True)
        inputs, weight = x[rows], weights[rows, places, None]
        if experts.router.spec.weighs_inputs:
            inputs, weight = (inputs * weight).to(x.dtype), torch.ones_like(weight)
        gates, ups = _multiply(inputs, up, expert).chunk(2, dim=-1)
        given = _multiply(gated(gates, ups, experts.activation), down, expert)
        total.index_add_(0, rows, given.float() * weight)
    return residual + total.to(residual.dtype)


def score_experts(x: Tensor, router: RouterLayer) -> Tensor:
    """x [tokens, hidden_size] -> the scores of `Operations.norm_score`, f32[1, tokens, experts]."""
    bias = None if router.bias is None else router.bias.float()
    return F.linear(x.float(), router.weight.float(), bias).unsqueeze(0)


def choose_experts(logits: Tensor, router: RouterLayer) -> tuple[Tensor, Tensor]:
    """logits f32[tokens, experts] -> the experts of each row, i64[tokens, top_k], and their weights, f32[tokens,
    top_k].
    """
    spec = router.spec
    scores = logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()
    choice = logits if spec.is_by_logits else scores if router.correction is None else scores + router.correction
    if spec.num_groups > 1:
        groups = choice.view(len(choice), spec.num_groups, choice.shape[1] // spec.num_groups)
        best = groups.topk(spec.num_group_scores).values.sum(-1).topk(spec.num_chosen_groups).indices
        is_chosen = torch.zeros(groups.shape[:2], dtype=torch.bool, device=groups.device).scatter_(1, best, value=True)
        choice = groups.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.topk(spec.top_k).indices
    weights = scores.gather(1, ids)
    if spec.renormalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return ids, weights * spec.scale


def _multiply(x: Tensor, layer: StackedLayer, expert: int) -> Tensor:
    return F.linear(x, layer.weight.of(expert).to(x.dtype), None if layer.bias is None else layer.bias[expert])
