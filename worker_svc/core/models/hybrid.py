"""The parts of families most of whose layers keep a state by the gated delta rule, as Qwen's configurations say it."""

from itertools import accumulate

from worker_svc.core.models.config_fields import LINEAR, ConfigFields
from worker_svc.core.models.parts import attention, experts, gated_mlp, head_norms, norm, pre_norm
from worker_svc.core.models.spec import DeltaRuleSpec, ExpertsSpec, GatedMLPSpec, StoredRows, SublayerSpec

OFFSET = 1.0  # of norms' weights, but of that after the delta rule
AHEAD = ("mtp.",)  # layers that predict further tokens
_HEAD_DIM, _TURNING, _INTERVAL = 256, 0.25, 4  # where the configuration leaves them out


def hybrid_layer(
    fields: ConfigFields, number: int, mlp: GatedMLPSpec | ExpertsSpec, *, are_together: bool
) -> tuple[SublayerSpec, ...]:
    """A layer of either sort; `are_together`: see `_delta_rule`."""
    interval, head_dim = fields.count("full_attention_interval", _INTERVAL), fields.count("head_dim", _HEAD_DIM)
    rope, has_bias = fields.rope(head_dim=head_dim, partial_rotary_factor=_TURNING), fields.flag("attention_bias")
    delta = _delta_rule(fields, number, are_together=are_together)
    changes = {**head_norms(fields, number, offset=OFFSET), **_output_gate(number, head_dim), "rope": rope}
    biases = {"has_bias": has_bias, "has_output_bias": has_bias}
    attend = attention(fields, number, head_dim=head_dim, **biases, **changes)
    is_delta = fields.layer_type(number, lambda each: (each + 1) % interval > 0, local=LINEAR) == LINEAR
    return pre_norm(fields, number, delta if is_delta else attend, mlp, offset=OFFSET)


def shared_mixture(fields: ConfigFields, number: int, *, renormalizes: bool) -> ExpertsSpec:
    """Experts and a gated one for all tokens."""
    shared = gated_mlp(fields, number, at="mlp.shared_expert", size=fields.count("shared_expert_intermediate_size"))
    return experts(
        fields,
        number,
        count=fields.count("num_experts"),
        size=fields.count("moe_intermediate_size"),
        router={"renormalizes": renormalizes},
        shared=shared,
        shared_gate=f"model.layers.{number}.mlp.shared_expert_gate",
    )


def _delta_rule(fields: ConfigFields, layer: int, *, are_together: bool) -> DeltaRuleSpec:
    """Of a layer, as Qwen's; `are_together`: a key head's rows stand beside those of its values, head after head."""
    name = f"model.layers.{layer}.linear_attn"
    num_keys, num_values = fields.count("linear_num_key_heads", 16), fields.count("linear_num_value_heads", 32)
    key_dim, value_dim = fields.count("linear_key_head_dim", 128), fields.count("linear_value_head_dim", 128)
    if num_values % num_keys:
        raise fields.wrong("linear_num_value_heads", f"is no multiple of linear_num_key_heads ({num_keys})")
    each, keys, values = num_values // num_keys, num_keys * key_dim, num_values * value_dim
    if are_together:
        wide, narrow = (key_dim, key_dim, each * value_dim, each * value_dim), (each, each)
        rows = [*_of_heads(f"{name}.in_proj_qkvz", wide), *_of_heads(f"{name}.in_proj_ba", narrow)]
    else:
        firsts = (0, keys, 2 * keys)
        rows = [StoredRows(f"{name}.in_proj_qkv", first, 2 * keys + values) for first in firsts]
        rows += [StoredRows(f"{name}.in_proj_{each_of}") for each_of in "zba"]
    query, key, value, gate, beta, decay = rows
    return DeltaRuleSpec(
        num_keys,
        num_values,
        key_dim,
        value_dim,
        conv_width=fields.count("linear_conv_kernel_dim", 4),
        query=query,
        key=key,
        value=value,
        gate=gate,
        beta=beta,
        decay=decay,
        decay_rate=f"{name}.A_log",
        decay_bias=f"{name}.dt_bias",
        conv=f"{name}.conv1d",
        norm=norm(fields, f"{name}.norm"),
        output=StoredRows(f"{name}.out_proj"),
    )


def _output_gate(layer: int, head_dim: int) -> dict[str, StoredRows]:
    """Changes of an attention whose queries stand beside gates of what heads attend to, head after head."""
    query, gate = _of_heads(f"model.layers.{layer}.self_attn.q_proj", (head_dim, head_dim))
    return {"query": query, "gate": gate}


def _of_heads(name: str, sizes: tuple[int, ...]) -> list[StoredRows]:
    """Projections of which each head has so many rows, one after the other."""
    ends = list(accumulate(sizes))
    return [StoredRows(name, end - run, every=ends[-1], run=run) for end, run in zip(ends, sizes, strict=True)]
