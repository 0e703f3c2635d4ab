"""DeepSeek-V2 (2024), V3 and R1 (2025), and Kimi-K2 (Moonshot, 2025): latent attention, many small experts beside
shared ones, the first layers dense.
"""

from typing import Any

from contract.domain.errors import unimplemented
from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import (
    decoder,
    expert_groups,
    experts,
    gated_mlp,
    latent_attention,
    pre_norm,
)
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def deepseek_v2(fields: ConfigFields) -> DecoderSpec:
    """Experts by softmax; in the larger model of the groups with the best expert."""
    fields.must_be("scoring_func", "scores of experts", "softmax")
    fields.must_be("topk_method", "choice of experts", "greedy", "group_limited_greedy")
    if fields.flag("norm_topk_prob"):
        raise unimplemented("weights of experts that sum to one (norm_topk_prob) in DeepSeek-V2")
    groups = expert_groups(fields, fields.count("n_routed_experts"))
    if fields.get("topk_method") != "group_limited_greedy":
        groups = {}
    return _deepseek(fields, {**groups, "num_group_scores": 1}, is_paired=True)


def deepseek_v3(fields: ConfigFields) -> DecoderSpec:
    """Experts by sigmoids with a correction. Layers that predict further tokens are left out."""
    fields.must_be("scoring_func", "scores of experts", "sigmoid")
    fields.must_be("topk_method", "choice of experts", "noaux_tc")
    router = {
        "score": "sigmoid",
        "renormalizes": fields.flag("norm_topk_prob", default=True),
        **expert_groups(fields, fields.count("n_routed_experts")),
    }
    return _deepseek(fields, router, is_paired=fields.flag("rope_interleave", default=True), is_corrected=True)


def _deepseek(
    fields: ConfigFields, router: dict[str, Any], *, is_paired: bool, is_corrected: bool = False
) -> DecoderSpec:
    count, size = fields.count("n_routed_experts"), fields.count("moe_intermediate_size")
    shared_size = size * fields.count("n_shared_experts", 1)
    router = {**router, "scale": fields.positive("routed_scaling_factor", 1.0)}
    num_dense, dense_size = fields.get("first_k_dense_replace") or 0, fields.count("intermediate_size")
    fields.must_be("moe_layer_freq", "layers between those with experts", 1)
    num_layers, num_ahead = fields.count("num_hidden_layers"), fields.get("num_nextn_predict_layers") or 0

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = latent_attention(fields, number, is_paired=is_paired)
        if number < num_dense:
            return pre_norm(fields, number, attend, gated_mlp(fields, number, size=dense_size))
        of_layer = dict(router)
        if is_corrected:
            of_layer["correction"] = f"model.layers.{number}.mlp.gate.e_score_correction_bias"
        shared = gated_mlp(fields, number, at="mlp.shared_experts", size=shared_size)
        return pre_norm(
            fields, number, attend, experts(fields, number, count=count, size=size, router=of_layer, shared=shared)
        )

    ahead = tuple(f"model.layers.{num_layers + each}." for each in range(num_ahead))
    return decoder(fields, layer, unused_prefixes=ahead)
