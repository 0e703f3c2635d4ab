"""Seed-OSS (ByteDance, 2025): Llama with biases of queries, keys and values."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, pre_norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec

_HEAD_DIM = 128  # where the configuration leaves it out


def seed_oss(fields: ConfigFields) -> DecoderSpec:
    """Each kind of biases has a flag of its own."""
    has_bias, has_output_bias = fields.flag("attention_bias", default=True), fields.flag("attention_out_bias")
    head_dim, mlp_has_bias = fields.count("head_dim", _HEAD_DIM), fields.flag("mlp_bias")

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(fields, number, head_dim=head_dim, has_bias=has_bias, has_output_bias=has_output_bias)
        return pre_norm(fields, number, attend, gated_mlp(fields, number, has_bias=mlp_has_bias))

    return decoder(fields, layer)
