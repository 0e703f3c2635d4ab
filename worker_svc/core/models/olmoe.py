"""OLMoE (Muennighoff et al., 2024): Llama with small experts; queries and keys are normalised, over all heads."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, experts, head_norms, pre_norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def olmoe(fields: ConfigFields) -> DecoderSpec:
    """Biases are all of a kind or none."""
    has_bias = fields.flag("attention_bias")
    count, size = fields.count("num_experts"), fields.count("intermediate_size")
    router = {"renormalizes": fields.flag("norm_topk_prob")}

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(
            fields,
            number,
            has_bias=has_bias,
            has_output_bias=has_bias,
            norms_all_heads=True,
            **head_norms(fields, number),
        )
        return pre_norm(fields, number, attend, experts(fields, number, count=count, size=size, router=router))

    return decoder(fields, layer)
