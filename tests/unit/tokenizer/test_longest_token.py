"""A text that cannot fit is refused by its length alone; where the length proves nothing, nothing is concluded."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.request import Message, Prompt
from penstock.launcher.layout import BUNDLED_MODEL
from tokenizer_svc.core.longest_token import max_token_bytes
from tokenizer_svc.core.tokenize import PromptTokenizer
from tokenizer_svc.loading import load_vocabulary

BUNDLED = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text("utf-8"))
ADDED = {"content": "<x>", "lstrip": False, "rstrip": False}


def changed(**parts: Any) -> dict[str, Any]:
    return {**BUNDLED, **parts}


def test_the_bound_is_the_longest_token() -> None:
    longest = max(len(token) for token in BUNDLED["model"]["vocab"])
    assert max_token_bytes(changed(normalizer=None, added_tokens=[])) == longest
    assert max_token_bytes(changed(normalizer={"type": "NFC"}, added_tokens=[])) == 3 * longest
    assert max_token_bytes(changed(normalizer=None, added_tokens=[ADDED | {"content": "é" * 1000}])) == 2000


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {"type": "Unigram", "vocab": []}},
        {"model": {**BUNDLED["model"], "vocab": {"a": 0}}},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": []}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "ByteLevel"}]}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Split", "behavior": "Removed"}, {"type": "ByteLevel"}],
            }
        },
        {"added_tokens": [ADDED | {"lstrip": True}]},
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(parts: dict[str, Any]) -> None:
    assert max_token_bytes(changed(**parts)) is None


_tokenizer = Tokenizer.from_str(json.dumps(BUNDLED))
_bound = max_token_bytes(BUNDLED)


@given(st.text(max_size=300) | st.text(alphabet=" \n", max_size=300))
def test_no_text_has_fewer_tokens_than_the_bound_says(text: str) -> None:
    assert _bound is not None
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    if num_bytes == len(text.encode("utf-8", "replace")):
        assert len(_tokenizer.encode(text, add_special_tokens=False).ids) * _bound >= num_bytes


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = load_vocabulary(str(BUNDLED_MODEL), max_model_len=16)
    prompts = PromptTokenizer(vocabulary)
    assert vocabulary.max_token_bytes is not None
    too_long = "x" * (16 * vocabulary.max_token_bytes + 1)

    def tokenize(*_: object, **__: object) -> None:
        raise AssertionError("tokenized")

    monkeypatch.setattr(prompts, "encode", tokenize)
    for prompt, param in (
        (Prompt(text=too_long), "prompt"),
        (Prompt(messages=(Message("user", too_long),)), "messages"),
    ):
        with pytest.raises(PenstockError, match="at the very least") as refused:
            prompts.encode_prompt(prompt)
        assert (refused.value.code, refused.value.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, param)
