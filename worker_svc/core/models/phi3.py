"""Phi-3 (Abdin et al., 2024) and Phi-4: Llama with one stored tensor for q, k and v, and one for gate and up."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, pre_norm
from worker_svc.core.models.spec import DecoderSpec, StoredRows, SublayerSpec


def phi3(fields: ConfigFields) -> DecoderSpec:
    """Rows of a stored tensor, one projection after the other."""
    fields.get("original_max_position_embeddings")  # of a longrope, which is refused by its name

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        name, size = f"model.layers.{number}", fields.count("intermediate_size")
        plain = attention(fields, number)
        queries, keys = plain.num_heads * plain.head_dim, plain.num_kv_heads * plain.head_dim
        qkv, gate_up = f"{name}.self_attn.qkv_proj", f"{name}.mlp.gate_up_proj"
        attend = attention(
            fields,
            number,
            query=StoredRows(qkv, 0, queries + 2 * keys),
            key=StoredRows(qkv, queries, queries + 2 * keys),
            value=StoredRows(qkv, queries + keys, queries + 2 * keys),
            window=fields.window(number),
        )
        gate, up = StoredRows(gate_up, 0, 2 * size), StoredRows(gate_up, size, 2 * size)
        return pre_norm(fields, number, attend, gated_mlp(fields, number, gate=gate, up=up))

    return decoder(fields, layer)
