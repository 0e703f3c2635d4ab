"""Models of several media, of which the text is served: the fields and the tensors of their text model.

A text alone is computed as by the text model; images would add embeddings, and positions in two dimensions.
"""

from collections.abc import Mapping
from typing import Any

from contract.domain.errors import unimplemented

# By architecture of the whole: that of its text, by the model types that its `text_config` may have.
TEXTS: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl": "Qwen2ForCausalLM", "qwen2_5_vl_text": "Qwen2ForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}
# Fields of the whole that say how other media are read.
_OF_OTHERS = (
    *("vision_", "image_", "video_", "audio_", "mm_", "multimodal_", "projector_", "boi_", "eoi_"),
    "spatial_merge_size",
)
# Fields that the whole says for its text, too.
_OF_BOTH = ("tie_word_embeddings", "quantization_config")
_LISTS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")  # of names, in `quantization_config`
_BASE = "model."
_TEXT = "language_model."
_OTHERS = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.")


def text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The fields of the text model, as if its checkpoint were alone; None: it is alone.

    Raises:
        PenstockError: UNIMPLEMENTED, naming the text's model type: it is another than such a model usually has.
    """
    names = fields.get("architectures")
    whole = names[0] if isinstance(names, list) and names else None
    if not isinstance(whole, str) or whole not in TEXTS:
        return None
    by_type = TEXTS[whole]
    text = fields.get("text_config", {"model_type": fields.get("model_type")})  # older files have the text's beside
    model_type = text.get("model_type") if isinstance(text, Mapping) else None
    if not isinstance(model_type, str) or model_type not in by_type:
        raise unimplemented(f"{whole} whose text is {model_type} (text_config) and not {' or '.join(by_type)}")
    own = {name: value for name, value in fields.items() if name != "text_config" and not name.startswith(_OF_OTHERS)}
    both = {name: own[name] for name in _OF_BOTH if name in own}
    merged = {**own, **text, **both, "architectures": [by_type[model_type]]}
    if isinstance(stored := merged.get("quantization_config"), Mapping):
        merged["quantization_config"] = {
            **stored,
            **{name: _of_text(stored[name]) for name in _LISTS if name in stored},
        }
    return merged


def text_tensor(name: str) -> str | None:
    """The name that a tensor has in the text model's own checkpoint; None: it belongs to another medium."""
    inner = name.removeprefix(_BASE)
    if inner.startswith(_OTHERS):
        return None
    if name.startswith(_TEXT):
        return name.removeprefix(_TEXT)
    return _BASE + inner.removeprefix(_TEXT) if inner.startswith(_TEXT) else name


def _of_text(names: Any) -> Any:
    """Names of layers as the text model has them; patterns stay as they are."""
    if not isinstance(names, list):
        return names
    found = [text_tensor(f"{name}.") if isinstance(name, str) else name for name in names]
    return [name.removesuffix(".") if isinstance(name, str) else name for name in found if name is not None]
