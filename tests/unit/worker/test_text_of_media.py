"""Fields and tensors of models of several media, of which the text is served."""

from typing import Any

import pytest

from contract.domain.errors import PenstockError
from worker_svc.core.models.media import text_fields, text_tensor

WHOLE: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "mm_tokens_per_image": 256,
    "vision_config": {"hidden_size": 1152},
    "text_config": {"model_type": "gemma3_text", "hidden_size": 64, "tie_word_embeddings": True},
}


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("mtp.norm.weight", "mtp.norm.weight"),
        ("vision_tower.encoder.layers.0.mlp.fc1.weight", None),
        ("model.visual.blocks.0.attn.proj.weight", None),
        ("vision_model.layernorm_pre.bias", None),
        ("model.multi_modal_projector.linear_1.weight", None),
    ],
)
def test_tensors_have_the_names_of_the_text_models_own_checkpoint(stored: str, own: str | None) -> None:
    assert text_tensor(stored) == own


def test_the_whole_speaks_for_what_its_text_does_not_say_and_of_heads_and_formats_first() -> None:
    stored = {"quant_method": "fp8", "ignored_layers": ["visual", "model.visual.merger", "model.language_model.norm"]}
    fields = text_fields({**WHOLE, "tie_word_embeddings": False, "quantization_config": stored})
    assert fields == {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "eos_token_id": [1, 106],
        "hidden_size": 64,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "ignored_layers": ["model.norm"]},
    }


@pytest.mark.parametrize("names", [None, [], [3], "Gemma3ForConditionalGeneration", ["Gemma3ForCausalLM"]])
def test_others_stay_as_they_are(names: object) -> None:
    assert text_fields({**WHOLE, "architectures": names}) is None


@pytest.mark.parametrize("text", [None, 3, {"model_type": "gemma"}, {}])
def test_a_text_that_is_none_of_such_a_model_is_refused_by_name(text: object) -> None:
    with pytest.raises(PenstockError, match="Gemma3ForConditionalGeneration whose text"):
        text_fields({**WHOLE, "text_config": text})
