"""Phi-3 (Abdin et al., 2024) and Phi-4: Llama with one stored tensor for q, k and v, and one for gate and up."""

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.parts import attention, decoder, gated_mlp, packed_gate_up, pre_norm
from worker_svc.core.models.spec import DecoderSpec, StoredRows, SublayerSpec


def phi3(fields: ConfigFields) -> DecoderSpec:
    """Rows of a stored tensor, one projection after the other."""
    fields.get("original_max_position_embeddings")  # of a longrope; without one it says nothing
    fields.must_be("full_attn_mod", "one layer that attends to all in", 1)
    fields.must_be("interpolate_factor", "positions interpolated by", 1)

    def layer(number: int) -> tuple[SublayerSpec, ...]:
        plain = attention(fields, number)
        queries, keys = plain.num_heads * plain.head_dim, plain.num_kv_heads * plain.head_dim
        qkv = f"model.layers.{number}.self_attn.qkv_proj"
        attend = attention(
            fields,
            number,
            query=StoredRows(qkv, 0, queries + 2 * keys),
            key=StoredRows(qkv, queries, queries + 2 * keys),
            value=StoredRows(qkv, queries + keys, queries + 2 * keys),
            window=fields.window(number),
        )
        return pre_norm(fields, number, attend, gated_mlp(fields, number, **packed_gate_up(fields, number)))

    return decoder(fields, layer)
