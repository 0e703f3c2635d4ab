"""The parts of most families, in the words of a checkpoint of transformers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from contract.domain.errors import unimplemented
from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.spec import (
    AnyAttentionSpec,
    AttentionSpec,
    DecoderSpec,
    DeltaRuleSpec,
    ExpertsSpec,
    GatedMLPSpec,
    LatentAttentionSpec,
    NormSpec,
    RouterSpec,
    StoredRows,
    SublayerSpec,
)


def norm(fields: ConfigFields, name: str | None, **changes: Any) -> NormSpec:
    """With the epsilon of all norms; as Llama's but for `changes`."""
    return replace(NormSpec(name, fields.positive("rms_norm_eps", 1e-6)), **changes)


def attention(fields: ConfigFields, layer: int, **changes: Any) -> AttentionSpec:
    """Of a layer, as Llama's but for `changes`."""
    name = f"model.layers.{layer}.self_attn"
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"does not divide num_attention_heads ({num_heads})")
    head_dim = changes.get("head_dim") or fields.head_dim
    query, key, value, output = (StoredRows(f"{name}.{each}_proj") for each in "qkvo")
    rope = changes["rope"] if "rope" in changes else fields.rope(head_dim=head_dim)
    plain = AttentionSpec(num_heads, num_kv_heads, head_dim, query, key, value, output, rope)
    return replace(plain, **changes)


_LATENT_EPS = 1e-6  # of the norms of latents, whatever that of others


def latent_attention(fields: ConfigFields, layer: int, *, is_paired: bool) -> LatentAttentionSpec:
    """Of a layer, as DeepSeek's; `is_paired`: see `RopeSpec`."""
    name = f"model.layers.{layer}.self_attn"
    num_heads, rank = fields.count("num_attention_heads"), fields.count("kv_lora_rank")
    plain, rotated = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    if fields.count("num_key_value_heads", num_heads) != num_heads:
        raise fields.wrong("num_key_value_heads", f"must be num_attention_heads ({num_heads}) with latent attention")
    for field, count in (("qk_rope_head_dim", rotated), ("kv_lora_rank", rank)):
        if count % 2:
            raise fields.wrong(field, f"must be even, got {count}")
    if fields.get("head_dim") not in (None, rotated):
        raise fields.wrong("head_dim", f"must be qk_rope_head_dim ({rotated})")
    if fields.get("qk_head_dim") not in (None, plain + rotated):
        raise fields.wrong("qk_head_dim", f"must be qk_nope_head_dim + qk_rope_head_dim ({plain + rotated})")
    query_rank, has_bias = fields.get("q_lora_rank"), fields.flag("attention_bias")
    if query_rank is None and has_bias:
        raise unimplemented("biases of latent attention (attention_bias) without q_lora_rank")
    rope = replace(fields.rope(head_dim=rotated, is_paired=is_paired), dims=rotated)
    return LatentAttentionSpec(
        num_heads,
        rank,
        rotated,
        plain,
        fields.count("v_head_dim"),
        query=StoredRows(f"{name}.q_proj" if query_rank is None else f"{name}.q_b_proj"),
        down=StoredRows(f"{name}.kv_a_proj_with_mqa"),
        down_norm=NormSpec(f"{name}.kv_a_layernorm", _LATENT_EPS),
        up=StoredRows(f"{name}.kv_b_proj"),
        output=StoredRows(f"{name}.o_proj"),
        rope=rope,
        query_down=None if query_rank is None else StoredRows(f"{name}.q_a_proj"),
        query_norm=None if query_rank is None else NormSpec(f"{name}.q_a_layernorm", _LATENT_EPS),
        query_rank=0 if query_rank is None else fields.count("q_lora_rank"),
        has_bias=has_bias,
        has_output_bias=has_bias,
        scale=(plain + rotated) ** -0.5 * fields.score_factor(rope),
    )


def head_norms(fields: ConfigFields, layer: int, **changes: Any) -> dict[str, NormSpec]:
    """Changes of an attention whose queries and keys are normalised before they are rotated."""
    name = f"model.layers.{layer}.self_attn"
    return {f"{of}_norm": norm(fields, f"{name}.{of[0]}_norm", **changes) for of in ("query", "key")}


def gated_mlp(fields: ConfigFields, layer: int, *, at: str = "mlp", **changes: Any) -> GatedMLPSpec:
    """Of a layer, where its name has `at`; as Llama's but for `changes`."""
    if "activation" not in changes:
        fields.must_be("hidden_act", "activation function", "silu")
    gate, up, down = (StoredRows(f"model.layers.{layer}.{at}.{each}_proj") for each in ("gate", "up", "down"))
    size = changes.pop("size", None) or fields.count("intermediate_size")
    return replace(GatedMLPSpec(size, gate, up, down), **changes)


def experts(
    fields: ConfigFields, layer: int, *, count: int, size: int, router: dict[str, Any], **changes: Any
) -> ExpertsSpec:
    """Of a layer, as Qwen's but for `changes`: so many experts of that size, and how the router differs from one whose
    weights are a softmax over all.
    """
    name = f"model.layers.{layer}.mlp"
    top_k = fields.count("num_experts_per_tok")
    if top_k > count:
        raise fields.wrong("num_experts_per_tok", f"is more than there are experts ({count})")
    each = gated_mlp(fields, layer, at="mlp.experts.{expert}", size=size)
    return replace(ExpertsSpec(count, replace(RouterSpec(f"{name}.gate", top_k), **router), each), **changes)


def block_sparse_experts(fields: ConfigFields, layer: int, **router: Any) -> ExpertsSpec:
    """Of a layer, called and sized as Mixtral's; router: how it differs, as in `experts`."""
    name, size = f"model.layers.{layer}.block_sparse_moe", fields.count("intermediate_size")
    gate, up, down = (StoredRows(f"{name}.experts.{{expert}}.{each}") for each in ("w1", "w3", "w2"))
    return experts(
        fields,
        layer,
        count=fields.count("num_local_experts"),
        size=size,
        router={"name": f"{name}.gate", **router},
        each=GatedMLPSpec(size, gate, up, down),
    )


def expert_groups(fields: ConfigFields, num_experts: int) -> dict[str, int]:
    """Changes of a router that looks for experts in the best groups alone, as DeepSeek's."""
    num_groups, num_chosen = fields.count("n_group", 1), fields.count("topk_group", 1)
    if num_experts % num_groups or (num_groups > 1 and num_experts < 2 * num_groups):
        raise fields.wrong("n_group", f"does not part {num_experts} experts into groups of two and more")
    if num_chosen > num_groups or fields.count("num_experts_per_tok") > num_chosen * (num_experts // num_groups):
        raise fields.wrong("topk_group", f"({num_chosen} of {num_groups}) does not leave enough experts to choose from")
    return {"num_groups": num_groups, "num_chosen_groups": num_chosen}


def has_experts(fields: ConfigFields, layer: int) -> bool:
    """Return whether a layer's feed-forward block is a mixture, as Qwen's configurations say it."""
    is_dense = layer in (listed_layers(fields, "mlp_only_layers") or [])
    return (layer + 1) % fields.count("decoder_sparse_step", 1) == 0 and not is_dense


def listed_layers(fields: ConfigFields, name: str) -> list[int] | None:
    """The numbers of some layers; None: the configuration does not list any."""
    layers = fields.get(name)
    if layers is not None and not (isinstance(layers, list) and all(isinstance(each, int) for each in layers)):
        raise fields.wrong(name, f"must be a list of layers, got {layers!r}")
    return layers


def rotated_layers(fields: ConfigFields) -> list[int]:
    """For each layer 1 if it is rotated, else 0, as SmolLM3's and Llama 4's configurations say it."""
    interval, turns = fields.count("no_rope_layer_interval", 4), listed_layers(fields, "no_rope_layers")
    num_layers = fields.count("num_hidden_layers")
    turns = turns or [int((number + 1) % interval > 0) for number in range(num_layers)]
    if len(turns) != num_layers:
        raise fields.wrong("no_rope_layers", f"must be a list of 0 or 1 for each of {num_layers} layers")
    return turns


def pre_norm(
    fields: ConfigFields,
    layer: int,
    attend: AnyAttentionSpec | DeltaRuleSpec,
    mlp: GatedMLPSpec | ExpertsSpec,
    *,
    scale: float = 1.0,
    **of_norms: Any,
) -> tuple[SublayerSpec, ...]:
    """A layer whose two blocks read normalised hidden states; norms are as Llama's but for `of_norms`."""
    name = f"model.layers.{layer}"
    return (
        SublayerSpec((attend,), norm(fields, f"{name}.input_layernorm", **of_norms), scale=scale),
        SublayerSpec((mlp,), norm(fields, f"{name}.post_attention_layernorm", **of_norms), scale=scale),
    )


def sandwich(
    fields: ConfigFields, layer: int, attend: AttentionSpec, mlp: GatedMLPSpec, names: tuple[str, ...], **of_norms: Any
) -> tuple[SublayerSpec, ...]:
    """A layer with norms before and after each of its two blocks, whose four names are given in this order."""
    norms = [norm(fields, f"model.layers.{layer}.{name}", **of_norms) for name in names]
    return SublayerSpec((attend,), norms[0], norms[1]), SublayerSpec((mlp,), norms[2], norms[3])


def packed_gate_up(fields: ConfigFields, layer: int) -> dict[str, Any]:
    """Changes of a feed-forward block whose gate and up are one stored tensor."""
    name, size = f"model.layers.{layer}.mlp.gate_up_proj", fields.count("intermediate_size")
    return {"gate": StoredRows(name, 0, 2 * size), "up": StoredRows(name, size, 2 * size)}


def decoder(
    fields: ConfigFields,
    make_layer: Callable[[int], tuple[SublayerSpec, ...]],
    *,
    ties_by_default: bool = False,
    **changes: Any,
) -> DecoderSpec:
    """The whole model, as Llama's but for `changes`; `ties_by_default`: where the configuration says nothing of it."""
    layers = tuple(make_layer(layer) for layer in range(fields.count("num_hidden_layers")))
    plain = DecoderSpec(
        fields.count("vocab_size"),
        fields.count("hidden_size"),
        layers,
        norm(fields, "model.norm"),
        is_tied=fields.flag("tie_word_embeddings", default=ties_by_default),
    )
    return replace(plain, **changes)
