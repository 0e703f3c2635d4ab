"""Characters of byte tokens are given out with their last byte, and the whole is the text of a full decode."""

import byte_runs
import pytest
from detokenizer_log import Client, Log, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_under_test import FAMILIES
from transformers import PreTrainedTokenizerFast

from contract.domain.finish import FinishReason
from contract.domain.params import TextOptions
from contract.texts.choice import choose_decoder, decode_all
from detokenizer_svc.core.detokenizer import Detokenizer

_FAMILIES = st.sampled_from(["llama2", "gemma"])


def _sent(family: str, ids: list[int]) -> list[str]:
    """The text that is given out with each token, and at the end."""
    decoder = choose_decoder(FAMILIES[family](), skip_special_tokens=True)
    state, texts = decoder.start(), []
    for token_id in ids:
        text, state = decoder.step(state, token_id)
        texts.append(text)
    return [*texts, decoder.flush(state)]


@settings(max_examples=200)
@given(family=_FAMILIES, text=st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
def test_a_character_is_given_out_with_its_last_byte(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]()
    given_out = _sent(family, [tokenizer.token_to_id("a"), *byte_runs.ids_of(tokenizer, text.encode())])
    assert given_out == ["a", *(each for character in text for each in _by_byte(character)), ""]


def _by_byte(character: str) -> list[str]:
    return [""] * (len(character.encode()) - 1) + [character]


@settings(max_examples=200)
@given(family=_FAMILIES, data=st.data(), skip=st.booleans())
def test_well_formed_runs_among_any_tokens_give_the_text_of_a_full_decode(
    family: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = FAMILIES[family]()
    run = st.text(st.characters(exclude_categories=["Cs"]), max_size=4).map(
        lambda text: byte_runs.ids_of(tokenizer, text.encode())
    )
    other = st.integers(259, tokenizer.get_vocab_size() + 1) | st.integers(0, 2)
    parts = data.draw(st.lists(run | other.map(lambda each: [each]), max_size=12))
    ids = [each for part in parts for each in part]
    decoder = choose_decoder(tokenizer, skip_special_tokens=skip)
    transformers = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert decode_all(decoder, ids) == transformers.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200)
@given(family=_FAMILIES, begin=st.sampled_from([b"", b"\xe4", b"\xff", b"\xf0\x9f"]), ids=st.lists(st.integers(0, 276)))
def test_bytes_that_are_no_utf8_become_what_a_full_decode_makes_of_them(
    family: str, begin: bytes, ids: list[int]
) -> None:
    """To the end of their run; what was complete before them in it is on its way already and stays."""
    tokenizer = FAMILIES[family]()
    ids = [*byte_runs.ids_of(tokenizer, begin), *ids]
    expected = byte_runs.text(tokenizer, ids)
    assert "".join(_sent(family, ids)) == expected
    space = byte_runs.ids_of(tokenizer, b" ")[0]  # is complete, and taken off where it begins the text
    if space not in ids and all(character == "\ufffd" for character in expected):  # nothing was complete before it
        assert expected == tokenizer.decode(ids)


@pytest.mark.parametrize("family", ["llama2", "gemma"])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xe4\xbd", ["", "", "\ufffd\ufffd"]),
        (b"\xe4\xbdA\n", ["", "", "\ufffd" * 3, "\ufffd", ""]),
        (b"\xff\xe4\xbd\xa0", ["\ufffd", "\ufffd", "\ufffd", "\ufffd", ""]),
        (b"\xed\xa0\x80", ["", "", "\ufffd" * 3, ""]),  # half of a surrogate pair
        (b"\xc0\xaf", ["\ufffd", "\ufffd", ""]),  # an overlong form
    ],
)
def test_a_malformed_run_is_a_replacement_for_each_byte_as_in_a_full_decode(
    family: str, data: bytes, expected: list[str]
) -> None:
    tokenizer = FAMILIES[family]()
    ids = byte_runs.ids_of(tokenizer, data)
    assert _sent(family, ids) == expected
    assert "".join(expected) == tokenizer.decode(ids)


def test_the_first_space_of_a_text_is_dropped_where_the_tokenizer_drops_it() -> None:
    for family in ("llama2", "gemma"):
        tokenizer = FAMILIES[family]()
        ids = byte_runs.ids_of(tokenizer, b"  x")
        assert "".join(_sent(family, ids)) == tokenizer.decode(ids)


def test_what_ends_a_run_does_not_end_what_is_malformed_before_it() -> None:
    tokenizer = FAMILIES["llama2"]()
    ids = [*byte_runs.ids_of(tokenizer, b"\xe4"), tokenizer.token_to_id("▁the"), *byte_runs.ids_of(tokenizer, b"A")]
    assert _sent("llama2", ids) == ["", "\ufffd the", "A", ""]
    assert tokenizer.decode(ids) == "\ufffd theA"


def test_a_stop_string_acts_with_its_last_byte() -> None:
    tokenizer = FAMILIES["gemma"]()
    detokenizer = Detokenizer(tokenizer)
    request = opened(text=TextOptions(stop=("。",)))
    detokenizer.open(request)
    log = Log(request)
    for token_id in byte_runs.ids_of(tokenizer, "日。本".encode()):
        log.add(0, [token_id])
    client = Client(1)
    for num_bytes, rows in enumerate(log, 1):
        for row in detokenizer.push(rows).rows():
            client.take(row)
        if num_bytes == len("日".encode()):
            assert client.texts == ["日"]
        if client.ends[0] is not None:
            break
    assert num_bytes == len("日。".encode())
    assert (client.ends[0][:2], client.texts) == ((FinishReason.STOP, "。"), ["日"])
