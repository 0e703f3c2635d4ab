"""Mistral (Jiang et al., 2023): Llama whose layers may all attend within a window. Ministral 3 (2025), whose queries
grow with their position.
"""

from typing import Any

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, pre_norm
from worker_svc.core.models.rope_fields import SCALING_BETA
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def mistral(fields: ConfigFields) -> DecoderSpec:
    """Later versions have no window."""
    return _decoder(fields)


def ministral3(fields: ConfigFields) -> DecoderSpec:
    """Beyond the context of the first training, as its rotation is stretched."""
    return _decoder(fields, rope=fields.rope(also=(SCALING_BETA,)), temperature=fields.temperature())


def _decoder(fields: ConfigFields, **of_attention: Any) -> DecoderSpec:
    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(fields, number, window=fields.window(number), **of_attention)
        return pre_norm(fields, number, attend, gated_mlp(fields, number))

    return decoder(fields, layer)
