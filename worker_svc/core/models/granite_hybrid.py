"""Granite 4 (IBM, 2025) where all layers attend: Granite, dense or with a mixture of experts beside a shared block."""

from contract.domain.errors import unimplemented
from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.granite import granite_decoder
from worker_svc.core.models.granite_moe import granite_mixture
from worker_svc.core.models.spec import DecoderSpec, ExpertsSpec, GatedMLPSpec, StoredRows

_ATTENTION = ("attention", "full_attention")
# Fields that mean nothing where no layer has state, no layer rotates, and no experts are.
_OF_STATE = (
    *("mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand"),
    *("mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit", "time_step_min", "time_step_max"),
)
_OF_ROTATION = ("rope_parameters", "rope_scaling", "rope_theta")
_OF_EXPERTS = ("intermediate_size", "num_experts_per_tok")


def granite_hybrid(fields: ConfigFields) -> DecoderSpec:
    """Layers with state are refused."""
    types = fields.get("layer_types") or fields.get("layers_block_type") or ["mamba"]
    for each in types:
        if each not in _ATTENTION:
            raise unimplemented(f"layers of type (layer_types) {each!r}")
    for field in (*_OF_STATE, *_OF_ROTATION, *_OF_EXPERTS, "layers_block_type"):
        fields.get(field)
    fields.must_be("hidden_act", "activation function", "silu")
    fields.must_be("position_embedding_type", "positions", "rope", "nope")
    fields.must_be("normalization_function", "norms", "rmsnorm")
    size, has_experts = fields.count("shared_intermediate_size"), bool(fields.get("num_local_experts"))

    def mlp(number: int) -> GatedMLPSpec | ExpertsSpec:
        name = f"model.layers.{number}.shared_mlp"
        both, down = f"{name}.input_linear", StoredRows(f"{name}.output_linear")
        shared = GatedMLPSpec(size, StoredRows(both, 0, 2 * size), StoredRows(both, size, 2 * size), down)
        return granite_mixture(fields, number, shared=shared) if has_experts else shared

    is_rotated = fields.get("position_embedding_type") == "rope"
    return granite_decoder(fields, mlp, **({} if is_rotated else {"rope": None}))
