"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts in every layer."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, experts, pre_norm
from worker_svc.core.models.spec import DecoderSpec, GatedMLPSpec, StoredRows, SublayerSpec


def mixtral(fields: ConfigFields) -> DecoderSpec:
    """The weights of the chosen experts sum to one."""
    count, size = fields.count("num_local_experts"), fields.count("intermediate_size")

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        name = f"model.layers.{number}.block_sparse_moe"
        gate, up, down = (StoredRows(f"{name}.experts.{{expert}}.{each}") for each in ("w1", "w3", "w2"))
        mixture = experts(
            fields,
            number,
            count=count,
            size=size,
            router={"name": f"{name}.gate", "renormalizes": True},
            each=GatedMLPSpec(size, gate, up, down),
        )
        return pre_norm(fields, number, attention(fields, number, window=fields.window(number)), mixture)

    return decoder(fields, layer)
