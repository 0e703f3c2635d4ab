"""What is read from a checkpoint's files, and what is said when they are wrong."""

from pathlib import Path

import pytest
from checkpoint_files import CHATML, write_checkpoint

from contract.domain.errors import Fault, PenstockError
from contract.domain.request import Message
from tokenizer_svc.loading import load_vocabulary

_HELLO = (Message("user", "Hello"),)


def test_eos_ids_come_from_generation_config_and_tokenizer(tmp_path: Path) -> None:
    assert load_vocabulary(str(write_checkpoint(tmp_path))).eos_token_ids == (1, 3)


def test_eos_ids_come_from_config_where_generation_config_is_silent(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, generation_config=None, tokenizer_config={})
    assert load_vocabulary(str(tmp_path)).eos_token_ids == (1,)


def test_eos_ids_beyond_the_vocabulary_and_null_are_left_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, generation_config={"eos_token_id": [2, 4000, None]}, tokenizer_config={})
    assert load_vocabulary(str(tmp_path)).eos_token_ids == (2,)


def test_limits_come_from_config(tmp_path: Path) -> None:
    vocabulary = load_vocabulary(str(write_checkpoint(tmp_path)))
    assert (vocabulary.vocab_size, vocabulary.context_length) == (310, 64)
    assert load_vocabulary(str(tmp_path), max_model_len=32).context_length == 32


def test_a_nested_text_config_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config={"text_config": {"vocab_size": 305, "max_position_embeddings": 48}})
    vocabulary = load_vocabulary(str(tmp_path))
    assert (vocabulary.vocab_size, vocabulary.context_length) == (305, 48)


def test_a_stretched_rope_allows_a_longer_context(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0}
    write_checkpoint(tmp_path, config={"vocab_size": 310, "max_position_embeddings": 64, "rope_scaling": rope})
    assert load_vocabulary(str(tmp_path), max_model_len=256).context_length == 256


def test_without_a_vocabulary_size_the_tokenizers_counts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config={"max_position_embeddings": 64})
    vocabulary = load_vocabulary(str(tmp_path))
    assert vocabulary.vocab_size == vocabulary.tokenizer.get_vocab_size()


@pytest.mark.parametrize(
    ("changes", "max_model_len", "words"),
    [
        ({"tokenizer": None}, None, ["tokenizer.json", "save_pretrained"]),
        ({"tokenizer": "{"}, None, ["tokenizer.json", "not a tokenizer"]),
        ({"config": "{]"}, None, ["config.json", "JSON"]),
        ({"config": "[]"}, None, ["config.json", "object"]),
        ({"config": None}, None, ["no config.json", "give the directory", "max_model_len"]),
        ({"config": {"vocab_size": 310}}, None, ["max_position_embeddings", "max_model_len"]),
        ({"tokenizer_config": {"chat_template": "{% for %}"}}, None, ["chat template", "Jinja"]),
    ],
)
def test_a_broken_checkpoint_is_the_operators_to_mend(
    tmp_path: Path, changes: dict[str, object], max_model_len: int | None, words: list[str]
) -> None:
    with pytest.raises(PenstockError) as caught:
        load_vocabulary(str(write_checkpoint(tmp_path, **changes)), max_model_len=max_model_len)
    assert caught.value.fault is Fault.OPERATOR
    for word in words:
        assert word in caught.value.message


def test_template_files_win_over_the_configuration_and_that_over_a_processors(tmp_path: Path) -> None:
    processor = {"chat_template": "processor"}
    write_checkpoint(tmp_path, tokenizer_config={"chat_template": "configuration"}, chat_template=processor)
    assert load_vocabulary(str(tmp_path)).chat.render(_HELLO) == "configuration"
    (tmp_path / "additional_chat_templates").mkdir()
    write_checkpoint(
        tmp_path,
        **{"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "documents"},
        tokenizer_config={"chat_template": [{"name": "default", "template": "a"}, {"name": "b", "template": "b"}]},
    )
    chat = load_vocabulary(str(tmp_path)).chat
    assert chat.render(_HELLO) == "file"
    assert chat.render(_HELLO, {"chat_template": "rag"}) == "documents"
    with pytest.raises(PenstockError, match=r"\(default, rag\), got 'b'") as refused:
        chat.render(_HELLO, {"chat_template": "b"})
    assert (refused.value.fault, refused.value.param) == (Fault.CALLER, "chat_template")


def test_several_templates_without_a_default_must_be_chosen_from(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tokenizer_config={"chat_template": {"a": "first", "b": "second"}})
    chat = load_vocabulary(str(tmp_path)).chat
    with pytest.raises(PenstockError, match=r"choose one with chat_template \(a, b\)"):
        chat.render(_HELLO)
    assert chat.render(_HELLO, {"chat_template": "b"}) == "second"


def test_a_template_may_write_the_models_own_special_tokens_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = "{{ bos_token }}{{ image_token }}{{ boi_token }}{{ audio_token }}"
    write_checkpoint(
        tmp_path,
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "boi_token": "<boi>",
            "chat_template": template,
            "extra_special_tokens": {"image_token": "<image>", "audio_token": "<audio>"},
        },
    )
    written = load_vocabulary(str(tmp_path)).chat.render(_HELLO)
    assert written == "<s><image><boi><audio>"
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert written == theirs.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)


def test_named_templates_are_chosen_by_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_checkpoint(tmp_path, tokenizer_config={"chat_template": named})
    chat = load_vocabulary(str(tmp_path)).chat
    assert chat.render(_HELLO) == "plain"
    assert chat.render(_HELLO, {"tools": [{"type": "function"}]}) == "tools"


def test_a_template_of_a_processor_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tokenizer_config={}, chat_template={"chat_template": CHATML})
    assert "Hello" in load_vocabulary(str(tmp_path)).chat.render(_HELLO)


def test_truncation_and_padding_left_in_the_file_are_switched_off(tmp_path: Path) -> None:
    from checkpoint_files import tokenizer

    made = tokenizer()
    made.enable_truncation(2)
    made.enable_padding(length=50)
    vocabulary = load_vocabulary(str(write_checkpoint(tmp_path, tokenizer=made.to_str())))
    assert 2 < len(vocabulary.tokenizer.encode("the miller's cat").ids) < 50
