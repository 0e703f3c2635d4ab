"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts in every layer."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, block_sparse_experts, decoder, pre_norm
from worker_svc.core.models.spec import DecoderSpec, SublayerSpec


def mixtral(fields: ConfigFields) -> DecoderSpec:
    """The weights of the chosen experts sum to one."""

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        attend = attention(fields, number, window=fields.window(number))
        return pre_norm(fields, number, attend, block_sparse_experts(fields, number, renormalizes=True))

    return decoder(fields, layer)
