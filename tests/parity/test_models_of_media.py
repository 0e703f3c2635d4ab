"""Models of several media: their text's tokens and logprobs equal those of transformers' model of the whole."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from byte_tokenizer import write_tokenizer
from checkpoints import COMMON, GEMMA3, GROWING, LLAMA4, OF_EXPERTS, OF_QWEN3_5, SHARED, with_random_weights
from plans import drive
from test_runner_parity import assert_like_reference, greedy, load
from transformers import PreTrainedModel

from penstock import LLM, PenstockError, SamplingParams
from servicekit.checkpoint.model import read_checkpoint
from worker_svc.core.models.media import TEXTS

Fields = dict[str, Any]
TOWER: Fields = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
OF_LLAMA4: Fields = {
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
OF_QWEN: Fields = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": COMMON["hidden_size"],
    "patch_size": 14,
}
SQUARE = {**OF_QWEN, "num_position_embeddings": 4}
GEMMA_TOKENS = {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
QWEN_TOKENS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
SECTIONS = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [3, 3, 2]}
# By class of transformers: what the text has, the other medium's part, and what else the whole says.
WHOLES: dict[str, tuple[Fields, Fields, Fields]] = {
    "Gemma3": (GEMMA3, TOWER, {**GEMMA_TOKENS, "mm_tokens_per_image": 4}),
    "Llama4": (LLAMA4, {**TOWER, **OF_LLAMA4}, GEMMA_TOKENS),
    "Mistral3": (
        {"model_type": "mistral", "head_dim": 24},
        {**TOWER, "model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 5, "spatial_merge_size": 2},
    ),
    "Qwen2_5_VL": ({"rope_parameters": SECTIONS}, OF_QWEN, QWEN_TOKENS),
    "Qwen3VL": (
        {"rope_parameters": {**SECTIONS, "mrope_interleaved": True}, "head_dim": 16},
        {**SQUARE, "deepstack_visual_indexes": [0]},
        QWEN_TOKENS,
    ),
    "Qwen3_5": (OF_QWEN3_5, SQUARE, QWEN_TOKENS),
    "Qwen3_5Moe": ({**OF_QWEN3_5, **OF_EXPERTS, **SHARED}, SQUARE, QWEN_TOKENS),
}


def save_whole(directory: Path, name: str, **of_text: Any) -> PreTrainedModel:
    text, other, rest = WHOLES[name]
    config_class, model_class = (
        getattr(transformers, f"{name}{end}") for end in ("Config", "ForConditionalGeneration")
    )
    torch.manual_seed(0)
    config = config_class(text_config={**COMMON, **text, **of_text}, vision_config=other, **rest)
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    model = with_random_weights(model_class(config))
    model.save_pretrained(directory)
    return model


def change(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_every_model_whose_text_is_served_is_compared() -> None:
    assert {f"{name}ForConditionalGeneration" for name in WHOLES} == set(TEXTS)


@pytest.mark.parametrize("name", WHOLES)
def test_tokens_and_logprobs_are_those_of_the_whole(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_whole(tmp_path, name)
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path)
    (said,) = (record for record in caplog.records if record.message == "the text alone is served")
    assert f"{name}ForConditionalGeneration" in vars(said)["reason"]
    sequences = greedy(8)
    drive(loaded.runner, sequences, chunk=64, window=2, stagger=1)
    assert_like_reference(model, sequences)


def test_the_text_of_ministral_3_is_served_by_its_own_family(tmp_path: Path) -> None:
    model = save_whole(tmp_path, "Mistral3", model_type="ministral3", rope_parameters=GROWING)
    sequences = greedy(8)
    drive(load(tmp_path).runner, sequences, chunk=64, window=2, stagger=1)
    assert_like_reference(model, sequences)


def test_older_files_have_the_fields_of_the_text_beside_the_others(tmp_path: Path) -> None:
    model = save_whole(tmp_path, "Qwen2_5_VL")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    text = fields.pop("text_config")
    rope = text.pop("rope_parameters")
    of_rope = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [3, 3, 2]}}
    path.write_text(json.dumps({**text, **fields, **of_rope}))
    sequences = greedy(6)
    drive(load(tmp_path).runner, sequences, chunk=64)
    assert_like_reference(model, sequences)


def test_what_published_texts_of_gemma_3_leave_out_is_as_its_class_has_it(tmp_path: Path) -> None:
    """Of the sizes that are left out, so small a model has the heads and the vocabulary."""
    defaults = transformers.Gemma3TextConfig()
    left_out = ("head_dim", "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "vocab_size")
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "sliding_window": 512,
        **{name: getattr(defaults, name) for name in left_out},
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=TOWER, **GEMMA_TOKENS)
    model = with_random_weights(transformers.Gemma3ForConditionalGeneration(config))
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["text_config"]
    kept = {"hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window", "model_type"}
    change(tmp_path, text_config={name: value for name, value in saved.items() if name in kept})
    assert read_checkpoint(tmp_path).context_length() == defaults.max_position_embeddings
    loaded = load(tmp_path, max_num_seqs=2, num_blocks=64)
    sequences = greedy(1)
    drive(loaded.runner, sequences)
    assert_like_reference(model, sequences)


def test_a_text_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    save_whole(tmp_path, "Mistral3")
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    change(tmp_path, text_config={**text, "model_type": "mistral4"})
    with pytest.raises(PenstockError, match="Mistral3ForConditionalGeneration whose text is mistral4"):
        load(tmp_path)


def test_by_transformers_such_a_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    save_whole(tmp_path, "Mistral3")
    with pytest.raises(PenstockError, match=r"Mistral3ForConditionalGeneration .*leave model_impl out"):
        load(tmp_path, model_impl="transformers")


def test_a_field_of_the_whole_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    save_whole(tmp_path, "Gemma3")
    change(tmp_path, a_field_of_tomorrow="on")
    with pytest.raises(PenstockError, match="a_field_of_tomorrow"):
        load(tmp_path)


def test_llm_serves_the_text(tmp_path: Path) -> None:
    model = save_whole(tmp_path, "Gemma3")
    write_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", num_blocks=64, max_model_len=128)
    prompt = [5 + at for at in range(40)]
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False
    )
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
