"""Pairs of texts become token ids by the tokenizer's own template, with a type for the tokens of each."""

from contract.domain.errors import invalid, unimplemented
from contract.domain.plan import U32
from tokenizer_svc.core.texts import check_length, known_ids
from tokenizer_svc.core.vocabulary import Vocabulary

_PARAM, _TRUNCATION = "prompt", "truncate_prompt_tokens"


class PairTokenizer:
    """Joins two texts. Safe to call from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def encode(self, pair: tuple[str, str], kept: slice | None) -> tuple[U32, int]:
        """The token ids of a pair, u32[num_tokens], and how many of them come before those of the second type; 0: there
        are none of that.

        Args:
            pair: the texts.
            kept: as many tokens as it would keep of a prompt stay in all, of which special ones are none less; they are
                left out at the end, or the beginning, of the longer text, as long as it is that. None: all stay.

        Raises:
            PenstockError: INVALID_ARGUMENT: a text is no valid Unicode, or has tokens that the model does not know;
                CONTEXT_LENGTH_EXCEEDED: it is too long whatever its tokens are; UNIMPLEMENTED: other types of tokens.
        """
        tokenizer = self._vocabulary.tokenizer
        if kept is None:
            check_length(self._vocabulary, len(pair[0]) + len(pair[1]), _PARAM)
        try:
            first, second = tokenizer.encode_batch(list(pair), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise invalid("the text is not valid Unicode: it holds half of a surrogate pair", _PARAM) from error
        if kept is not None:
            at_end = kept.start is None
            num_kept = kept.stop if at_end else -kept.start
            left = num_kept - tokenizer.num_special_tokens_to_add(is_pair=True)
            if left < 0:
                raise invalid(f"truncate_prompt_tokens leaves no room for a pair of texts: {num_kept}", _TRUNCATION)
            direction = "right" if at_end else "left"
            for text, length in zip((first, second), longest_first(len(first), len(second), left), strict=True):
                text.truncate(length, direction=direction)
        joined = tokenizer.post_process(first, second, add_special_tokens=True)
        return known_ids(self._vocabulary, joined.ids, _PARAM), _num_first(joined.type_ids)


def longest_first(first: int, second: int, left: int) -> tuple[int, int]:
    """The lengths of two texts that together have `left` tokens at most, where the longer one gives them up."""
    if first + second <= left:
        return first, second
    shorter = min(first, second, left // 2)
    return (shorter, left - shorter) if first <= second else (left - shorter, shorter)


def _num_first(type_ids: list[int]) -> int:
    """The number of leading zeros, before nothing but ones."""
    num_second = sum(each == 1 for each in type_ids)
    if type_ids != [0] * (len(type_ids) - num_second) + [1] * num_second:
        raise unimplemented("text_2", "the way in which the tokenizer types the tokens of pairs")
    return len(type_ids) - num_second if num_second else 0
