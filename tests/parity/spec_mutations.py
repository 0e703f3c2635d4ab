"""The fields of a specification, one after the other with another value: its logprobs move. Rows of stored tensors are
changed by putting one in another's place.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

from worker_svc.core.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaRuleSpec,
    ExpertsSpec,
    GatedMLPSpec,
    LatentAttentionSpec,
    Mixer,
    NormSpec,
    RopeSpec,
    RouterSpec,
    SublayerSpec,
)

Mutation: TypeAlias = tuple[str, DecoderSpec]  # which field, and the decoder with another value of it


def mutations(decoder: DecoderSpec) -> Iterator[Mutation]:
    """Those of all that layers differ in, one at a time. What means nothing beside other fields is left out: the scale
    of what is normalised after it, means of norms that have none.
    """
    seen = set()
    for number, layer in enumerate(decoder.layers):
        for place, sublayer in enumerate(layer):

            def with_(new: SublayerSpec, number: int = number, place: int = place) -> DecoderSpec:
                changed = list(decoder.layers[number])
                changed[place] = new
                return replace(
                    decoder, layers=(*decoder.layers[:number], tuple(changed), *decoder.layers[number + 1 :])
                )

            for name, new in _of_sublayer(sublayer):
                kind = f"{place}.{_kind(sublayer)}.{name}"
                if kind not in seen:
                    seen.add(kind)
                    yield kind, with_(new)
    for name, norm in _of_norm(decoder.norm, is_whole=True):
        yield f"norm.{name}", replace(decoder, norm=norm)
    yield "embedding_scale", replace(decoder, embedding_scale=decoder.embedding_scale * 1.5)
    yield "logits_scale", replace(decoder, logits_scale=decoder.logits_scale * 1.5)
    yield "logits_softcap", replace(decoder, logits_softcap=None if decoder.logits_softcap else 1.0)
    if decoder.is_tied:
        yield "is_tied", replace(decoder, is_tied=False)


def _kind(sublayer: SublayerSpec) -> str:
    """What tells layers apart: those with windows, chunks, states or other rotations have mutations of their own."""
    parts = []
    for mixer in sublayer.mixers:
        rope = getattr(mixer, "rope", None)
        sees = "w" if getattr(mixer, "window", None) else "c" if getattr(mixer, "chunk", None) else ""
        parts.append(f"{type(mixer).__name__}{sees}{rope.rope_type if rope is not None else ''}")
    return "+".join(parts)


def _of_sublayer(sublayer: SublayerSpec) -> Iterator[tuple[str, SublayerSpec]]:
    for number, mixer in enumerate(sublayer.mixers):
        for name, new in _of_mixer(mixer):
            mixers = (*sublayer.mixers[:number], new, *sublayer.mixers[number + 1 :])
            yield f"{number}.{name}", replace(sublayer, mixers=mixers)
    if sublayer.before is not None:
        yield "before", replace(sublayer, before=None)
        for name, norm in _of_norm(sublayer.before, is_whole=True):
            yield f"before.{name}", replace(sublayer, before=norm)
    if sublayer.after is not None:
        yield "after", replace(sublayer, after=None)
        for name, norm in _of_norm(sublayer.after):
            yield f"after.{name}", replace(sublayer, after=norm)
    else:
        yield "scale", replace(sublayer, scale=sublayer.scale * 1.5)


def _of_mixer(mixer: Mixer) -> Iterator[tuple[str, Mixer]]:
    if isinstance(mixer, AttentionSpec):
        yield from _of_attention(mixer)
    elif isinstance(mixer, LatentAttentionSpec):
        yield from _of_latents(mixer)
    elif isinstance(mixer, GatedMLPSpec):
        yield from _of_mlp(mixer)
    elif isinstance(mixer, ExpertsSpec):
        yield from _of_experts(mixer)
    elif isinstance(mixer, DeltaRuleSpec):
        yield from _of_delta(mixer)


def _of_attention(spec: AttentionSpec) -> Iterator[tuple[str, Mixer]]:
    for name, rope in _of_rope(spec.rope):
        yield f"rope{name}", replace(spec, rope=rope)
    yield from _of_biases(spec)
    for field in ("query_norm", "key_norm"):
        norm = getattr(spec, field)
        if norm is not None:
            yield field, replace(spec, **{field: None})
            for name, new in _of_norm(norm):
                yield f"{field}.{name}", replace(spec, **{field: new})
    if spec.query_norm is not None:
        yield "norms_all_heads", replace(spec, norms_all_heads=not spec.norms_all_heads)
    yield "scale", replace(spec, scale=spec.score_scale * 1.5)
    yield "softcap", replace(spec, softcap=None if spec.softcap else 1.0)
    if spec.chunk is not None:
        yield "chunk", replace(spec, chunk=None)
    else:
        yield "window", replace(spec, window=None if spec.window else 20)
    if spec.window is not None:
        yield "window+1", replace(spec, window=spec.window + 1)
    if (grown := spec.temperature) is not None:
        yield "temperature", replace(spec, temperature=None)
        yield "temperature.floor_scale", replace(spec, temperature=replace(grown, floor_scale=grown.floor_scale - 3))
        yield "temperature.attn_scale", replace(spec, temperature=replace(grown, attn_scale=grown.attn_scale * 2))
        yield "temperature.first", replace(spec, temperature=replace(grown, first=1 - grown.first))
    if spec.sinks is not None:
        yield "sinks", replace(spec, sinks=None)
    if spec.gate is not None:
        yield "gate", replace(spec, query=spec.gate, gate=spec.query)


def _of_biases(spec: AttentionSpec | LatentAttentionSpec) -> Iterator[tuple[str, Mixer]]:
    for name in ("has_bias", "has_output_bias"):
        if getattr(spec, name):
            yield name, replace(spec, **{name: False})


def _of_latents(spec: LatentAttentionSpec) -> Iterator[tuple[str, Mixer]]:
    for name, rope in _of_rope(spec.rope):
        yield f"rope{name}", replace(spec, rope=rope)
    yield from _of_biases(spec)
    if spec.query_norm is not None:
        for name, new in _of_norm(spec.query_norm):
            yield f"query_norm.{name}", replace(spec, query_norm=new)
    for name, new in _of_norm(spec.down_norm):
        yield f"down_norm.{name}", replace(spec, down_norm=new)
    yield "scale", replace(spec, scale=spec.score_scale * 1.5)


def _of_delta(spec: DeltaRuleSpec) -> Iterator[tuple[str, Mixer]]:
    for name, norm in _of_norm(spec.norm):
        yield f"norm.{name}", replace(spec, norm=norm)
    swaps = ("query", "key"), ("value", "gate"), ("beta", "decay"), ("decay_rate", "decay_bias")
    for one, other in swaps:
        yield f"{one} and {other}", replace(spec, **{one: getattr(spec, other), other: getattr(spec, one)})


def _of_mlp(spec: GatedMLPSpec) -> Iterator[tuple[str, GatedMLPSpec]]:
    yield "activation", replace(spec, activation="silu" if spec.activation == "gelu_tanh" else "gelu_tanh")
    yield "gate and up", replace(spec, gate=spec.up, up=spec.gate)
    if spec.has_bias:
        yield "has_bias", replace(spec, has_bias=False)


def _of_experts(spec: ExpertsSpec) -> Iterator[tuple[str, Mixer]]:
    for name, router in _of_router(spec.router):
        yield f"router.{name}", replace(spec, router=router)
    for name, each in _of_mlp(spec.each):
        yield f"each.{name}", replace(spec, each=each)
    if spec.shared is not None:
        yield "shared", replace(spec, shared=None, shared_gate=None)
        for name, shared in _of_mlp(spec.shared):
            yield f"shared.{name}", replace(spec, shared=shared)
    if spec.shared_gate is not None:
        yield "shared_gate", replace(spec, shared_gate=None)


def _of_router(spec: RouterSpec) -> Iterator[tuple[str, RouterSpec]]:
    yield "top_k", replace(spec, top_k=spec.top_k - 1 if spec.top_k > 1 else 2)
    yield "score", replace(spec, score="sigmoid" if spec.score == "softmax" else "softmax")
    yield "renormalizes", replace(spec, renormalizes=not spec.renormalizes)
    yield "scale", replace(spec, scale=spec.scale * 1.5)
    yield "weighs_inputs", replace(spec, weighs_inputs=not spec.weighs_inputs)
    if spec.correction is not None:
        yield "correction", replace(spec, correction=None)
    if spec.has_bias:
        yield "has_bias", replace(spec, has_bias=False)
    if spec.num_groups > 1:
        yield "num_groups", replace(spec, num_groups=1, num_chosen_groups=1)
        yield "num_chosen_groups", replace(spec, num_chosen_groups=spec.num_chosen_groups + 1)
        yield "num_group_scores", replace(spec, num_group_scores=3 - spec.num_group_scores)


def _of_rope(spec: RopeSpec | None) -> Iterator[tuple[str, RopeSpec | None]]:
    if spec is None:
        yield "", RopeSpec()
        return
    yield "", None
    yield ".theta", replace(spec, theta=spec.theta * 5)
    yield ".is_paired", replace(spec, is_paired=not spec.is_paired)
    if spec.attention_factor != 1:
        yield ".attention_factor", replace(spec, attention_factor=1.0)
    if spec.rope_type != "default":
        yield ".rope_type", replace(spec, rope_type="default")
    for name, change in _STRETCHES.get(spec.rope_type, {}).items():
        yield f".{name}", replace(spec, **{name: change(getattr(spec, name))})
    if spec.rope_type == "default" and spec.dims is not None and spec.dims >= 4:
        yield ".dims", replace(spec, dims=spec.dims // 4 * 2)


def _double(value: float) -> float:
    return value * 2


_STRETCHES: dict[str, dict[str, Callable[..., object]]] = {
    "linear": {"factor": _double},
    "proportional": {"factor": _double, "turning_pairs": lambda pairs: pairs + 1},
    "llama3": {
        "factor": _double,
        "high_freq_factor": _double,
        "low_freq_factor": lambda factor: factor / 2,
        "original_max_position_embeddings": _double,
    },
    "yarn": {
        "factor": _double,
        "beta_fast": lambda turns: turns / 2,
        "beta_slow": _double,
        "truncates": lambda truncates: not truncates,
        "original_max_position_embeddings": _double,
    },
    "longrope": {
        "short_factors": lambda factors: tuple(map(_double, factors)),
        "long_factors": lambda factors: tuple(map(_double, factors)),
    },
}


def _of_norm(spec: NormSpec, *, is_whole: bool = False) -> Iterator[tuple[str, NormSpec]]:
    """is_whole: of all that a sublayer reads, whose mean may be taken off, too."""
    yield "eps", replace(spec, eps=1.0)
    yield "offset", replace(spec, offset=0.0 if spec.offset else 1.0)
    if is_whole:
        yield "is_centered", replace(spec, is_centered=not spec.is_centered)
