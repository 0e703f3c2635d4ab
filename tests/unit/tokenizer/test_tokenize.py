"""Prompts become ids; whatever does not fit is refused with the field that is to blame."""

from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import tokenizer, write_checkpoint

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from contract.domain.request import Header, Message, Prompt, Request
from tokenizer_svc.core.tokenize import PromptTokenizer
from tokenizer_svc.loading import load_vocabulary

CONTEXT = 64
TOO_LONG = "This model's maximum context length is"  # what clients look for


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    path: Path = write_checkpoint(tmp_path_factory.mktemp("model"))
    return PromptTokenizer(load_vocabulary(str(path)))


def _request(prompt: Prompt, **params: Any) -> Request:
    return Request(Header(b"r" * 16, "", 0, 0, 0, "", 0), "", prompt, SamplingParams(**params))


def test_a_text_gets_the_tokenizers_special_tokens(prompts: PromptTokenizer) -> None:
    tokenized = prompts.tokenize(_request(Prompt(text="the cat")))
    tokenizer = prompts.vocabulary.tokenizer
    assert tokenized.token_ids.tolist() == tokenizer.encode("the cat").ids
    assert tokenized.token_ids[0] == tokenizer.token_to_id("<s>")
    assert tokenized.token_ids.dtype == "uint32"
    assert tokenized.eos_token_ids == (1, 3)


def test_a_chat_gets_only_what_its_template_writes(prompts: PromptTokenizer) -> None:
    tokenized = prompts.tokenize(_request(Prompt(messages=(Message("user", "cat"),))))
    tokenizer = prompts.vocabulary.tokenizer
    text = "<|im_start|>user\ncat<|im_end|>\n<|im_start|>assistant\n"
    assert tokenized.token_ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenized.token_ids[0] == tokenizer.token_to_id("<|im_start|>")


def test_ids_are_taken_as_they_are_up_to_the_models_vocabulary(prompts: PromptTokenizer) -> None:
    # 309 is the model's last id; the tokenizer itself ends earlier.
    assert prompts.tokenize(_request(Prompt(token_ids=(0, 309)))).token_ids.tolist() == [0, 309]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (Prompt(text="the <image> cat"), "prompt"),
        (Prompt(messages=(Message("user", "the <image> cat"),)), "messages"),
    ],
)
def test_a_text_with_a_token_that_the_model_does_not_have_is_refused(
    tmp_path: Path, prompt: Prompt, param: str
) -> None:
    made = tokenizer()
    size = made.get_vocab_size()
    made.add_special_tokens(["<image>"])
    config = {"vocab_size": size, "max_position_embeddings": 64}
    path = write_checkpoint(tmp_path, tokenizer=made.to_str(), config=config)
    prompts = PromptTokenizer(load_vocabulary(str(path)))
    with pytest.raises(PenstockError, match=f"'<image>' with the id {size}.* vocabulary of {size} tokens") as caught:
        prompts.tokenize(_request(prompt))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, param)
    assert len(prompts.tokenize(_request(Prompt(text="the cat"))).token_ids) > 1


def test_max_tokens_is_resolved_to_what_the_context_leaves(prompts: PromptTokenizer) -> None:
    open_end = prompts.tokenize(_request(Prompt(token_ids=(5,) * 10), max_tokens=None, min_tokens=3))
    assert (open_end.stopping.max_tokens, open_end.stopping.min_tokens) == (54, 3)
    assert prompts.tokenize(_request(Prompt(token_ids=(5,) * 10), max_tokens=54)).stopping.max_tokens == 54


@pytest.mark.parametrize(
    ("prompt", "params", "code", "param", "words"),
    [
        (Prompt(), {}, "INVALID_ARGUMENT", "prompt", ["exactly one", "none"]),
        (Prompt(text="a", token_ids=(1,)), {}, "INVALID_ARGUMENT", "prompt", ["exactly one", "text and token_ids"]),
        (Prompt(token_ids=()), {}, "INVALID_ARGUMENT", "prompt", ["empty"]),
        (Prompt(messages=()), {}, "INVALID_ARGUMENT", "messages", ["at least one"]),
        (Prompt(token_ids=(5, 310)), {}, "INVALID_ARGUMENT", "prompt", ["310", "vocabulary"]),
        (Prompt(token_ids=(5, -1)), {}, "INVALID_ARGUMENT", "prompt", ["-1", "vocabulary"]),
        (Prompt(token_ids=(5, 2**70)), {}, "INVALID_ARGUMENT", "prompt", ["310"]),
        (Prompt(text="half \ud83d"), {}, "INVALID_ARGUMENT", "prompt", ["surrogate"]),
        (
            Prompt(messages=(Message("user", "\ud83d"),)),
            {},
            "INVALID_ARGUMENT",
            "messages",
            ["surrogate"],
        ),
        (
            Prompt(text="a", chat_template_kwargs={"x": 1}),
            {},
            "INVALID_ARGUMENT",
            "chat_template_kwargs",
            ["messages"],
        ),
        (
            Prompt(token_ids=(5,) * 64),
            {},
            "CONTEXT_LENGTH_EXCEEDED",
            "prompt",
            [f"{TOO_LONG} 64 ", "has 64 tokens"],
        ),
        (
            Prompt(token_ids=(5,) * 60),
            {},
            "CONTEXT_LENGTH_EXCEEDED",
            "max_tokens",
            [f"{TOO_LONG} 64", "16", "leave 4"],
        ),
        (
            Prompt(token_ids=(5,) * 60),
            {"max_tokens": None, "min_tokens": 5},
            "CONTEXT_LENGTH_EXCEEDED",
            "min_tokens",
            ["leave 4"],
        ),
        (Prompt(text="a"), {"stop_token_ids": [3, 310]}, "INVALID_ARGUMENT", "stop_token_ids", ["310"]),
        (Prompt(text="a"), {"logit_bias": {400: 1.0}}, "INVALID_ARGUMENT", "logit_bias", ["400"]),
        (Prompt(text="a"), {"allowed_token_ids": [3, 310]}, "INVALID_ARGUMENT", "allowed_token_ids", ["310"]),
        (
            Prompt(text="a"),
            {"allowed_token_ids": [3, 4], "suppress_tokens": [5, 4, 3]},
            "INVALID_ARGUMENT",
            "allowed_token_ids",
            ["suppress_tokens"],
        ),
    ],
)
def test_what_is_wrong_is_refused(  # noqa: PLR0917
    prompts: PromptTokenizer, prompt: Prompt, params: dict[str, Any], code: str, param: str, words: list[str]
) -> None:
    with pytest.raises(PenstockError) as caught:
        prompts.tokenize(_request(prompt, **params))
    assert caught.value.code is ErrorCode[code]
    assert caught.value.param == param
    for word in words:
        assert word in caught.value.message


def test_an_empty_text_is_a_prompt_only_if_the_tokenizer_adds_something(
    prompts: PromptTokenizer, tmp_path: Path
) -> None:
    assert len(prompts.tokenize(_request(Prompt(text=""))).token_ids) == 1
    made = tokenizer()
    made.post_processor = None
    bare = PromptTokenizer(load_vocabulary(str(write_checkpoint(tmp_path, tokenizer=made.to_str()))))
    with pytest.raises(PenstockError, match="empty"):
        bare.tokenize(_request(Prompt(text="")))


def test_bad_words_are_the_tokens_of_both_their_forms(prompts: PromptTokenizer) -> None:
    def ids(text: str) -> tuple[int, ...]:
        found = prompts.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        return tuple(found)

    assert len(ids("xy")) == len(ids("the")) + 1 == 2
    found = prompts.tokenize(_request(Prompt(text="a"), bad_words=["the", "  xy", "sun"])).made.bad_word_ids
    expected = []
    for word in ("the", "xy", "sun"):
        expected += [ids(word)] if len(ids(f" {word}")) != len(ids(word)) else [ids(word), ids(f" {word}")]
    assert found == tuple(expected)
    assert 3 < len(expected) < 6, "some words have another form of as many tokens, and some have not"
    assert prompts.tokenize(_request(Prompt(text="a"), bad_words=None)).made.bad_word_ids == ()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["xy" * 17], "1 to 32 tokens, 'xyxy.* has 34"),
        (["ok", "   "], "1 to 32 tokens, '   ' has 0"),
        (["a\ud800"], "half of a surrogate pair"),
    ],
)
def test_a_bad_word_that_cannot_be_kept_away_is_refused(prompts: PromptTokenizer, words: list[str], said: str) -> None:
    with pytest.raises(PenstockError, match=said) as refused:
        prompts.tokenize(_request(Prompt(text="a"), bad_words=words))
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_ARGUMENT, "bad_words")


def test_bad_words_leave_some_token(prompts: PromptTokenizer) -> None:
    (only,) = prompts.vocabulary.tokenizer.encode("q", add_special_tokens=False).ids
    with pytest.raises(PenstockError) as refused:
        prompts.tokenize(_request(Prompt(text="a"), bad_words=["q"], allowed_token_ids=[only]))
    assert refused.value.param == "allowed_token_ids"
    others = [token for token in range(310) if token != only]
    with pytest.raises(PenstockError, match="bad_words leave no token") as refused:
        prompts.tokenize(_request(Prompt(text="a"), bad_words=["q"], suppress_tokens=others))
    assert refused.value.param == "bad_words"
    assert prompts.tokenize(_request(Prompt(text="a"), bad_words=["qq"], allowed_token_ids=[only])).made.bad_word_ids


@pytest.mark.parametrize(("asked", "kept"), [(3, 3), (1, 1), (500, 40), (-1, 40)])
def test_the_last_tokens_of_a_prompt_count(prompts: PromptTokenizer, asked: int, kept: int) -> None:
    request = _request(Prompt(token_ids=tuple(range(40))), truncate_prompt_tokens=asked, max_tokens=2)
    assert prompts.tokenize(request).token_ids.tolist() == list(range(40))[-kept:]


@pytest.mark.parametrize(("side", "kept"), [("right", slice(3)), ("left", slice(-3, None)), (None, slice(-3, None))])
def test_a_prompt_is_cut_at_the_side_that_is_said(prompts: PromptTokenizer, side: str | None, kept: slice) -> None:
    request = _request(Prompt(token_ids=tuple(range(40))), truncate_prompt_tokens=3, truncation_side=side)
    assert prompts.tokenize(request).token_ids.tolist() == list(range(40))[kept]
    whole = _request(Prompt(token_ids=tuple(range(40))), truncation_side=side)
    assert prompts.tokenize(whole).token_ids.tolist() == list(range(40))


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(prompts: PromptTokenizer) -> None:
    context = prompts.vocabulary.context_length
    text = Prompt(text="a b " * context)
    with pytest.raises(PenstockError, match=TOO_LONG):
        prompts.tokenize(_request(text))
    cut = prompts.tokenize(_request(text, truncate_prompt_tokens=-1, max_tokens=5))
    assert (len(cut.token_ids), cut.stopping.max_tokens) == (context - 5, 5)
    free = prompts.tokenize(_request(text, truncate_prompt_tokens=-1, max_tokens=None))
    assert (len(free.token_ids), free.stopping.max_tokens) == (context - 1, 1)
    with pytest.raises(PenstockError, match="at least 1"):
        SamplingParams(truncate_prompt_tokens=0)
