"""Configurations of published models are read, with whatever stands beside what transformers reads today.

`published` has excerpts of their `config.json`, by November 2026: the fields that decide whether it can be read, what
old versions of transformers and the authors' own code wrote among them. From public sources and from memory; long lists
of factors are made up.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.domain.errors import PenstockError
from servicekit.checkpoint.model import read_checkpoint
from worker_svc.core.config import ModelConfig
from worker_svc.core.models import FAMILIES
from worker_svc.core.models.media import text_fields
from worker_svc.core.models.spec import AttentionSpec, TemperatureSpec
from worker_svc.model_config import read_model_config

PUBLISHED: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text("utf-8"))
    for path in sorted((Path(__file__).parent / "published").glob("*.json"))
}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return read_model_config(read_checkpoint(folder))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read(name: str, tmp_path: Path) -> None:
    config = PUBLISHED[name]
    text = config.get("text_config", config)
    decoder = read(tmp_path, config).decoder
    assert (len(decoder.layers), decoder.hidden_size) == (text["num_hidden_layers"], text["hidden_size"])


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("c4ai-command-r7b-12-2024", "layer_switch", 3),
        ("c4ai-command-r7b-12-2024", "order_of_interleaved_layers", "global_attn_first"),
        ("c4ai-command-r7b-12-2024", "position_embedding_type", "rope_neox"),
        ("c4ai-command-r7b-12-2024", "rotary_pct", 0.5),
        ("c4ai-command-r7b-12-2024", "use_gated_activation", False),
        ("c4ai-command-r7b-12-2024", "use_parallel_block", False),
        ("c4ai-command-r7b-12-2024", "use_embedding_sharing", False),
        ("c4ai-command-r7b-12-2024", "use_qk_norm", True),
        ("Phi-4-mini-instruct", "full_attn_mod", 2),
        ("Phi-4-mini-instruct", "interpolate_factor", 2),
        ("EXAONE-4.0-32B", "reorder_qk_norm", False),
        ("granite-4.0-micro", "normalization_function", "layernorm"),
        ("MiniMax-M2", "attn_type_list", [0, 1]),
        ("MiniMax-M2", "hidden_act", "gelu"),
        ("MiniMax-M2", "qk_norm_type", "per_head"),
        ("MiniMax-M2", "scoring_func", "softmax"),
        ("MiniMax-M2", "shared_intermediate_size", 1536),
        ("MiniMax-M2", "sliding_window", 4096),
        ("MiniMax-M2", "use_qk_norm", False),
        ("MiniMax-M2", "use_routing_bias", False),
    ],
)
def test_another_value_of_a_field_that_has_but_one_meaning_is_refused_by_name(
    name: str, field: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(PenstockError, match=field):
        read(tmp_path, {**PUBLISHED[name], field: value})


def test_all_of_minimax_m2_but_routers_and_head_is_in_blocks_of_8_bit_floats(tmp_path: Path) -> None:
    quantization = read(tmp_path, PUBLISHED["MiniMax-M2"]).quantization
    assert quantization is not None
    name = "model.layers.61"
    parts = ("self_attn.q_proj", "block_sparse_moe.experts.255.w1", "block_sparse_moe.gate")
    assert [quantization.covers(f"{name}.{part}") for part in parts] == [True, True, False]
    assert not quantization.covers("lm_head")


def test_every_family_has_a_published_model_here() -> None:
    """But those whose files hold no more than what transformers writes (`test_config.py`)."""
    here = {(text_fields(config) or config)["architectures"][0] for config in PUBLISHED.values()}
    assert set(FAMILIES) - here == {"MinistralForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}


def test_what_they_say_is_what_is_computed(tmp_path: Path) -> None:
    def attention(name: str, layer: int) -> AttentionSpec:
        folder = tmp_path / f"{name}-{layer}"
        folder.mkdir()
        mixer = read(folder, PUBLISHED[name]).decoder.layers[layer][0].mixers[0]
        assert isinstance(mixer, AttentionSpec)
        return mixer

    ministral = attention("Ministral-3-8B-Instruct-2512", 0)
    assert ministral.temperature == TemperatureSpec(16_384, 0.1, first=0)
    assert ministral.rope is not None
    assert (ministral.rope.theta, ministral.rope.factor, ministral.rope.attention_factor) == (1e6, 16.0, 1.0)
    local, of_all = (attention("gemma-3-1b-it", layer) for layer in (0, 5))
    assert local.rope is not None
    assert of_all.rope is not None
    assert (local.window, local.rope.theta, of_all.window, of_all.rope.theta) == (512, 1e4, None, 1e6)
    local, of_all = (attention("c4ai-command-r7b-12-2024", layer) for layer in (2, 3))
    assert (local.window, of_all.window, of_all.rope) == (4096, None, None)
    phi = attention("Phi-4-mini-instruct", 0).rope
    assert phi is not None
    assert (phi.rope_type, phi.dims, phi.original_max_position_embeddings) == ("longrope", 96, 4096)


def test_queries_that_need_not_grow_do_not_and_the_base_of_a_rotation_is_transformers_(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0}
    config = {"architectures": ["Ministral3ForCausalLM"], **sizes, "vocab_size": 99, "max_position_embeddings": 256}
    mixer = read(tmp_path, {**config, "rope_parameters": rope}).decoder.layers[0][0].mixers[0]
    assert isinstance(mixer, AttentionSpec)
    assert (mixer.temperature, mixer.rope and mixer.rope.theta) == (None, 10_000.0)
    with pytest.raises(PenstockError, match="llama_4_scaling_beta"):
        read(tmp_path, {**config, "rope_parameters": {**rope, "llama_4_scaling_beta": None}})


def test_windows_of_smollm3_are_those_of_layers_without_rotation(tmp_path: Path) -> None:
    config = {**PUBLISHED["SmolLM3-3B"], "layer_types": None, "use_sliding_window": True, "sliding_window": 64}
    layers = read(tmp_path, config).decoder.layers[:8]
    assert [layer[0].mixers[0].window for layer in layers] == [None, None, None, 64] * 2  # type: ignore[union-attr]


def test_layer_types_decide_where_both_are_said(tmp_path: Path) -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    changes = {"num_hidden_layers": 12, "layer_types": types, "layer_switch": 3, "sliding_window_pattern": None}
    layers = read(tmp_path, {**PUBLISHED["c4ai-command-r7b-12-2024"], **changes}).decoder.layers
    assert [layer[0].mixers[0].window for layer in layers] == [4096, 4096, None] * 4  # type: ignore[union-attr]


def test_a_text_whose_type_is_no_name_is_refused(tmp_path: Path) -> None:
    config = PUBLISHED["gemma-3-4b-it"]
    with pytest.raises(PenstockError, match="whose text is"):
        read(tmp_path, {**config, "text_config": {**config["text_config"], "model_type": ["gemma3_text"]}})
