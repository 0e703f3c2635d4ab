"""Configurations of published models are read, with whatever stands beside what transformers reads today."""

import json
from pathlib import Path
from typing import Any

import pytest
from published_configs import PUBLISHED

from contract.domain.errors import PenstockError
from servicekit.checkpoint.model import read_checkpoint
from worker_svc.core.config import ModelConfig
from worker_svc.core.models import FAMILIES
from worker_svc.model_config import read_model_config


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
    ],
)
def test_another_value_of_a_field_that_has_but_one_meaning_is_refused_by_name(
    name: str, field: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(PenstockError, match=field):
        read(tmp_path, {**PUBLISHED[name], field: value})


def test_every_family_has_a_published_model_here() -> None:
    """But those whose files hold no more than what transformers writes (`test_config.py`)."""
    others = {
        "Llama4ForCausalLM",
        "Ministral3ForCausalLM",
        "MinistralForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    }
    here = {name for config in PUBLISHED.values() for name in config["architectures"]}
    assert set(FAMILIES) - here == others
