"""Reading `config.json`: families are read, everything else fails by its name."""

import json
from typing import Any

import pytest
import transformers

from contract.domain.errors import ErrorCode, PenstockError
from worker_svc.core.config import ModelConfig, parse_config
from worker_svc.core.models import FAMILIES
from worker_svc.core.models.spec import NormSpec, RopeSpec, TemperatureSpec

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


YARN = {"rope_type": "yarn", "factor": 2.0}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
WINDOWED = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 96, "use_sliding_window": True}


LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "num_hidden_layers": 8,
    "intermediate_size_mlp": 256,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
}


def parse(**changes: Any) -> ModelConfig:
    return parse_config({**FIELDS, **changes}, "config.json")


def test_defaults_are_those_of_the_family() -> None:
    assert parse().attention.head_dim == 16
    assert parse(architectures=["Qwen3ForCausalLM"]).attention.head_dim == 128
    assert parse(num_key_value_heads=None).attention.num_kv_heads == 4
    assert parse().attention.rope == RopeSpec()


def test_rope_is_read_from_both_places_it_was_ever_written_to() -> None:
    new = parse(rope_parameters={**LLAMA3, "rope_theta": 5e5}).attention.rope
    old = parse(rope_theta=5e5, rope_scaling=LLAMA3).attention.rope
    oldest = parse(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2}).attention.rope
    assert new == old == RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    assert oldest == RopeSpec(5e5, "linear", 2.0)


def test_rope_scaling_wins_over_rope_parameters_as_in_transformers() -> None:
    from transformers import LlamaConfig

    fields = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    theirs = LlamaConfig(**fields).rope_parameters
    assert parse(**fields).attention.rope == RopeSpec(theirs["rope_theta"], "linear", theirs["factor"])
    assert parse(**{**fields, "rope_scaling": {}}).attention.rope == RopeSpec(5e5)
    with pytest.raises(PenstockError, match="rope_scaling must be an object"):
        parse(**{**fields, "rope_scaling": "linear"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "chunked_attention"]}, "chunked"),
        ({"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, "use_qk_norm"),
        ({"architectures": ["GemmaForCausalLM"], "hidden_act": "relu"}, "relu"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta",
        ),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"a_field_of_tomorrow": "on"}, "a_field_of_tomorrow"),
        ({"top_p": 0.9}, "top_p"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "spiral"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["attention", "mamba"]}, "'mamba'"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"}, "topk_method"),
        ({**LLAMA4, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "use_qk_norm.* yarn"),
        ({**LLAMA4, "layer_types": ["sliding_attention"] * 8}, "layer_types.* 'sliding_attention'"),
        ({**LLAMA4, "router_scale": 2.0}, "router_scale"),
        ({"architectures": ["MllamaForConditionalGeneration"]}, "MllamaForConditionalGeneration"),
    ],
)
def test_what_is_not_there_yet_fails_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(PenstockError, match=named) as caught:
        parse(**changes)
    assert caught.value.code is ErrorCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -3}, "vocab_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope"}},
            "original_max_position_embeddings",
        ),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": "all"}, "no_rope_layers"),
        ({**LLAMA4, "moe_layers": 3}, "moe_layers"),
        ({**LLAMA4, "attention_chunk_size": 0}, "attention_chunk_size"),
        ({**LLAMA4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["sliding_attention"]}, "layer_types"),
    ],
)
def test_a_broken_file_is_the_operator_s_and_names_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(PenstockError, match=rf"config\.json: {field}") as caught:
        parse(**changes)
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.param == field


_CONFIGS = {
    "Gemma3ForCausalLM": "Gemma3Text",
    "Llama4ForCausalLM": "Llama4Text",
    "Qwen3_5ForCausalLM": "Qwen3_5Text",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeText",
}
ATTENDS_LAST = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
# As published: by default the first chooses no experts, the second has heads that do not turn, the third state. Of the
# others the fourth layer would be the first that attends.
_OPTIONS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["full_attention"] * 3},
    "Qwen3NextForCausalLM": ATTENDS_LAST,
    "Qwen3_5ForCausalLM": ATTENDS_LAST,
    "Qwen3_5MoeForCausalLM": ATTENDS_LAST,
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_configuration_as_transformers_writes_it_is_read_whole(architecture: str) -> None:
    """With all that it has by default, some of which has nothing to do with the model."""
    config_class = getattr(
        transformers, f"{_CONFIGS.get(architecture, architecture.removesuffix('ForCausalLM'))}Config"
    )
    theirs = config_class(num_hidden_layers=3, **_OPTIONS.get(architecture, {}))
    fields = {**json.loads(theirs.to_json_string(use_diff=False)), "architectures": [architecture]}
    config = parse_config(fields, "config.json")
    assert len(config.decoder.layers) == 3
    assert config.decoder.vocab_size == theirs.vocab_size


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 96}, 96),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 96}, None),
        (WINDOWED, None),
        ({**WINDOWED, "max_window_layers": 0}, 96),
        ({**WINDOWED, "max_window_layers": 1}, 96),
        ({**WINDOWED, "max_window_layers": 2}, None),
        ({**WINDOWED, "layer_types": ["full_attention", "sliding_attention"]}, 96),
        ({**WINDOWED, "layer_types": ["full_attention", "full_attention"]}, None),
    ],
)
def test_a_window_is_that_of_the_layers_that_have_one(changes: dict[str, Any], window: int | None) -> None:
    windows = [each.window for each in parse(**changes).decoder.attentions]
    assert min((each for each in windows if each is not None), default=None) == window


def test_gemma_3_is_read_as_the_hub_has_it_and_as_transformers_5_writes_it() -> None:
    common = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": 96, "num_hidden_layers": 6}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }
    first, second = parse(**common, **old, sliding_window_pattern=6), parse(**common, **new)
    assert first.decoder == second.decoder
    ropes = [each.rope for each in first.decoder.attentions]
    assert ropes == [RopeSpec(1e4)] * 5 + [RopeSpec(1e6, "linear", 8.0)]
    assert [each.window for each in first.decoder.attentions] == [96] * 5 + [None]


def test_llama_4_is_read_as_transformers_5_writes_it_and_as_it_was_published() -> None:
    told = {
        "no_rope_layers": [1, 1, 1, 0] * 2,
        "layer_types": [*["chunked_attention"] * 3, "full_attention"] * 2,
        "moe_layers": [1, 3, 5, 7],
        "attn_temperature_tuning": 4,
        "attention_chunk_size": 8192,
    }
    decoder = parse(**LLAMA4, interleave_moe_layer_step=2, no_rope_layers=[]).decoder
    assert decoder == parse(**LLAMA4, **told).decoder
    attentions = decoder.attentions
    assert [each.chunk for each in attentions] == [8192, 8192, 8192, None] * 2
    assert [each.rope is not None for each in attentions] == [True, True, True, False] * 2
    assert [each.temperature for each in attentions] == [None, None, None, TemperatureSpec(8192, 0.1)] * 2
    assert [each.query_norm for each in attentions] == [*[NormSpec(None, 1e-5)] * 3, None] * 2
    assert [each.size for each in decoder.mlps] == [256, 128] * 4
    assert all(each.chunk is None for each in parse(**LLAMA4, attention_chunk_size=None).decoder.attentions)
    assert all(each.temperature is None for each in parse(**LLAMA4, attn_temperature_tuning=False).decoder.attentions)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_one_of_transformers(name: str) -> None:
    assert hasattr(transformers, name)
