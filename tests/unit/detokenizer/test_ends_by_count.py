"""The short way to the most common end leaves a sequence as the long one does."""

from typing import Any

import pytest
import tokenizers_under_test as under_test
from detokenizer_log import opened

from contract.domain.finish import FinishReason
from contract.texts.choice import choose_decoder
from detokenizer_svc.core.sequence import Arrival, Sequence

TOKENIZER = under_test.byte_level()


def begun(prefix: list[int]) -> Sequence:
    sequence = Sequence(opened(), 0, choose_decoder(TOKENIZER, skip_special_tokens=True))
    for token_id in prefix:
        sequence.extend(Arrival([token_id], FinishReason.UNSPECIFIED))
    return sequence


def state(sequence: Sequence) -> dict[str, Any]:
    others = ("_decoder", "request")
    return {name: getattr(sequence, name) for name in Sequence.__slots__ if name not in others}


@pytest.mark.parametrize("prefix", ["", "The brook"])
@pytest.mark.parametrize("last", [" ran", "<|end|>"])
def test_an_end_by_count_is_as_any_other_end(prefix: str, last: str) -> None:
    ids = TOKENIZER.encode(prefix, add_special_tokens=False).ids
    token_id = TOKENIZER.encode(last, add_special_tokens=False).ids[0]
    begun(ids).extend(Arrival([token_id], FinishReason.UNSPECIFIED))  # the decoder's table has it from now on
    short, long = begun(ids), begun(ids)
    text = short.piece(token_id)
    assert text is not None
    assert short.end_by_count(token_id, text) == short.end
    long.extend(Arrival([token_id], FinishReason.LENGTH))
    assert state(short) == state(long)
    assert short.text() == long.text()
