"""Incremental text equals the full decode, whatever the tokenizer and the tokens."""

import byte_runs
import pytest
import tokenizers_under_test as under_test
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_under_test import FAMILIES

from contract.texts.choice import choose_decoder, decode_all
from contract.texts.decoder import ByteLevelDecoder, TokenwiseDecoder, WindowDecoder

_TEXTS = [
    "The miller's cat.",
    "日本語のテキスト、汉字と한국어",
    "👩‍👩‍👧‍👦🎉 👍🏽",
    "e\u0301 a\u0308\u0301 Z\u0351\u036b\u0343",
    "Größe naïve\tΩμέγα\n\n  x",
    "",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=100)
@given(data=st.data())
def test_random_tokens_give_the_text_of_a_full_decode(family: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    # Two ids beyond the vocabulary: models pad theirs.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), max_size=40))
    decoder = choose_decoder(tokenizer, skip_special_tokens=skip)
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    if family in ("llama2", "gemma"):
        expected = byte_runs.text(tokenizer, ids, skip_special_tokens=skip)
    assert decode_all(decoder, ids) == expected


@settings(max_examples=100)
@given(data=st.binary(max_size=24))
def test_invalid_utf8_gives_the_text_of_a_full_decode(data: bytes) -> None:
    tokenizer = under_test.byte_level()
    decoder = choose_decoder(tokenizer, skip_special_tokens=True)
    alphabet = {value: tokenizer.token_to_id(key) for key, value in _alphabet().items()}
    ids = [alphabet[byte] for byte in data]
    assert decode_all(decoder, ids) == tokenizer.decode(ids)


def _alphabet() -> dict[str, int]:
    from contract.texts.decoder import _BYTE_OF

    return _BYTE_OF


@pytest.mark.parametrize("text", _TEXTS)
@pytest.mark.parametrize("family", ["byte_level", "llama2"])
def test_text_survives_and_nothing_broken_is_sent_early(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]()
    ids = tokenizer.encode(text).ids
    decoder = choose_decoder(tokenizer, skip_special_tokens=True)
    state = decoder.start()
    sent = ""
    for token_id in ids:
        piece, state = decoder.step(state, token_id)
        sent += piece
        assert text.startswith(sent)
    assert sent + decoder.flush(state) == text


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50)
@given(data=st.data())
def test_pieces_are_the_text_that_stepping_gives(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), max_size=40))
    decoder = choose_decoder(tokenizer, skip_special_tokens=True)
    decode_all(decoder, ids)
    state = decoder.start()
    sent = ""
    for token_id in ids:
        if state is None and token_id in decoder.pieces:
            sent += decoder.pieces[token_id]
        else:
            piece, state = decoder.step(state, token_id)
            sent += piece
    assert sent + decoder.flush(state) == decode_all(decoder, ids)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("byte_level", ByteLevelDecoder),
        ("llama2", TokenwiseDecoder),
        ("gemma", TokenwiseDecoder),
        ("metaspace", TokenwiseDecoder),
        ("word_piece", TokenwiseDecoder),
        ("suffixed", WindowDecoder),
        ("without_decoder", WindowDecoder),
    ],
)
def test_the_fastest_decoder_that_fits_is_chosen(family: str, kind: type) -> None:
    assert type(choose_decoder(FAMILIES[family](), skip_special_tokens=True)) is kind


def test_a_decoder_that_probes_prove_wrong_is_not_used() -> None:
    from tokenizers import Tokenizer, decoders

    tokenizer = Tokenizer.from_str(under_test.llama2().to_str())
    # A pattern over the border of two byte-fallback runs is not the business of single tokens.
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "!")])
    assert type(choose_decoder(tokenizer, skip_special_tokens=True)) is WindowDecoder


@settings(max_examples=100)
@given(data=st.data())
def test_token_bytes_joined_are_the_text(data: st.DataObject) -> None:
    tokenizer = under_test.byte_level()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), max_size=20))
    decoder = choose_decoder(tokenizer, skip_special_tokens=False)
    joined = b"".join(decoder.token_bytes(token_id) for token_id in ids)
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("family", "token", "expected"),
    [
        ("llama2", "<0xE4>", b"\xe4"),
        ("llama2", "▁the", b" the"),
        ("llama2", "</s>", b"</s>"),
        ("word_piece", "##s", b"s"),
        ("word_piece", "cat", b" cat"),
        ("metaspace", "▁日", " 日".encode()),
        ("suffixed", "ab</w>", b"ab"),
    ],
)
def test_token_bytes_are_those_of_the_token_behind_others(family: str, token: str, expected: bytes) -> None:
    tokenizer = FAMILIES[family]()
    decoder = choose_decoder(tokenizer, skip_special_tokens=False)
    assert decoder.token_bytes(tokenizer.token_to_id(token)) == expected
