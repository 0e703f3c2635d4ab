"""GLM-4.5 and 4.6 (Zhipu, 2025): small experts that are chosen by sigmoids with a correction, and a shared one."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, expert_groups, experts, gated_mlp, head_norms, pre_norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def glm4_moe(fields: ConfigFields) -> DecoderSpec:
    """The first layers are dense. Layers that predict further tokens are left out."""
    has_bias, has_head_norms = fields.flag("attention_bias"), fields.flag("use_qk_norm")
    num_dense = fields.get("first_k_dense_replace")
    num_layers, num_ahead = fields.count("num_hidden_layers"), fields.get("num_nextn_predict_layers") or 0
    count, size = fields.count("n_routed_experts"), fields.count("moe_intermediate_size")
    shared_size = size * fields.count("n_shared_experts", 1)
    router = {
        "score": "sigmoid",
        "renormalizes": fields.flag("norm_topk_prob", default=True),
        "scale": fields.positive("routed_scaling_factor", 1.0),
        **expert_groups(fields, count),
    }
    rope = fields.rope(partial_rotary_factor=0.5)

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        norms = head_norms(fields, number) if has_head_norms else {}
        attend = attention(fields, number, rope=rope, has_bias=has_bias, **norms)
        dense = gated_mlp(fields, number)
        if number < (1 if num_dense is None else num_dense):
            return pre_norm(fields, number, attend, dense)
        correction = f"model.layers.{number}.mlp.gate.e_score_correction_bias"
        shared = gated_mlp(fields, number, at="mlp.shared_experts", size=shared_size)
        of_layer = {**router, "correction": correction}
        mixture = experts(fields, number, count=count, size=size, router=of_layer, shared=shared)
        return pre_norm(fields, number, attend, mixture)

    ahead = tuple(f"model.layers.{num_layers + each}." for each in range(num_ahead))
    return decoder(fields, layer, unused_prefixes=ahead)
