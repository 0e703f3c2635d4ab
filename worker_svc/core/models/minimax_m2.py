"""MiniMax-M2 (MiniMax, 2025): small experts that are chosen by sigmoids with a correction; queries and keys are
normalised over all heads, and half of a head is rotated.
"""

from contract.domain.errors import unimplemented
from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, block_sparse_experts, decoder, head_norms, pre_norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def minimax_m2(fields: ConfigFields) -> DecoderSpec:
    """All layers alike. Modules that predict further tokens are left out."""
    _refuse_others(fields)
    num_layers, num_ahead = fields.count("num_hidden_layers"), fields.get("num_mtp_modules") or 0
    factor = fields.count("rotary_dim", fields.head_dim) / fields.head_dim
    rope = fields.rope(theta=5e6, partial_rotary_factor=factor)

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(fields, number, rope=rope, norms_all_heads=True, **head_norms(fields, number))
        correction = f"model.layers.{number}.block_sparse_moe.e_score_correction_bias"
        router = {"score": "sigmoid", "renormalizes": True, "correction": correction}
        return pre_norm(fields, number, attend, block_sparse_experts(fields, number, **router))

    ahead = tuple(f"model.layers.{num_layers + each}." for each in range(num_ahead))
    return decoder(fields, layer, unused_prefixes=ahead)


def _refuse_others(fields: ConfigFields) -> None:
    """What is not as in the models that were published, in which all layers attend to the whole context."""
    fields.must_be("scoring_func", "scores of experts", "sigmoid")
    fields.must_be("use_routing_bias", "routers without a correction", True)
    fields.must_be("use_qk_norm", "queries and keys that are not normalised", True)
    fields.must_be("qk_norm_type", "norms of queries and keys", "per_layer")
    fields.must_be("shared_intermediate_size", "shared experts of the size", 0)
    fields.must_be("sliding_window", "windows")
    if set(fields.get("attn_type_list") or [1]) != {1}:
        raise unimplemented("attn_type_list with other layers than 1, which attend to the whole context")
    for name in ("use_mtp", "mtp_transformer_layers"):
        fields.get(name)  # of what is left out
