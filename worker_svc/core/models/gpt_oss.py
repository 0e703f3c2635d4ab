"""gpt-oss (OpenAI, 2025): experts with biases and a gate within bounds, every other layer with a window, and sinks."""

from contract.domain.errors import unimplemented
from worker_svc.core.models.config_fields import SLIDING, ConfigFields
from worker_svc.core.models.parts import attention, decoder, experts, pre_norm
from worker_svc.core.models.spec import DecoderSpec, GatedMLPSpec, StoredRows, SublayerSpec

_GATE = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # of all that were published


def gpt_oss(fields: ConfigFields) -> DecoderSpec:
    """Experts are stored as [experts, inputs, outputs], gates and ups in turns."""
    for name, value in _GATE.items():
        if fields.positive(name, value) != value:
            raise unimplemented(f"{name} other than {value}")
    has_bias, rope = fields.flag("attention_bias", default=True), fields.rope(head_dim=fields.head_dim)
    count, size = fields.count("num_local_experts"), fields.count("intermediate_size")
    for name in ("experts_per_token", "initial_context_length"):
        fields.get(name)  # say again what others do

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        name = f"model.layers.{number}"
        is_local = fields.layer_type(number, lambda each: each % 2 == 0) == SLIDING
        attend = attention(
            fields,
            number,
            rope=rope,
            has_bias=has_bias,
            has_output_bias=has_bias,
            window=fields.window(number, is_used=is_local),
            sinks=f"{name}.self_attn.sinks",
        )
        both, down = f"{name}.mlp.experts.gate_up_proj", StoredRows(f"{name}.mlp.experts.down_proj")
        gate, up = (StoredRows(both, first, 2 * size, every=2) for first in range(2))
        each = GatedMLPSpec(size, gate, up, down, has_bias=True, activation="clamped_silu")
        router = {"name": f"{name}.mlp.router", "renormalizes": True, "has_bias": True}
        mixture = experts(fields, number, count=count, size=size, router=router, each=each, layout="transposed")
        return pre_norm(fields, number, attend, mixture)

    return decoder(fields, layer)
