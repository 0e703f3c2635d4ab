"""Mistral (Jiang et al., 2023): Llama whose layers may all attend within a window."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, pre_norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def mistral(fields: ConfigFields) -> DecoderSpec:
    """Later versions have no window."""

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(fields, number, window=fields.window(number))
        return pre_norm(fields, number, attend, gated_mlp(fields, number))

    return decoder(fields, layer)
