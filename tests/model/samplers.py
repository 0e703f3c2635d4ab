"""Tokens whose id says who sampled them and after what: no two samplers ever agree, and no splice goes unnoticed."""

from enum import IntEnum

from tokenizers import Tokenizer, decoders, models

_OF_A_KIND = 1 << 12
STOP_STRING = ".!"


class Kind(IntEnum):
    """What a sampler may come up with."""

    PLAIN = 0  # its text is "NUMBER.": the point is held back, as the stop string may begin with it
    EOS = 1
    STOP = 2  # its text is "!NUMBER": after a plain token it completes the stop string


class Samplers:
    """Hands out token ids: one for each sampler, kind, request, sample, and tokens before it."""

    def __init__(self) -> None:
        self._ids: dict[tuple[bytes, Kind, int, int, tuple[int, ...]], int] = {}
        self._behind: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        self._counts = dict.fromkeys(Kind, 0)

    def sample(self, sampler: bytes, kind: Kind, request: int, sequence: int, before: tuple[int, ...]) -> int:
        """The token that this sampler gives after these tokens."""
        key = (sampler, kind, request, sequence, before)
        token_id = self._ids.get(key)
        if token_id is None:
            number = self._counts[kind]
            self._counts[kind] += 1
            assert number < _OF_A_KIND, "more samples than there are token ids"
            token_id = self._ids[key] = kind * _OF_A_KIND + number
            self._behind[token_id] = (request, sequence, before)
        return token_id

    def is_coherent(self, request: int, sequence: int, token_ids: tuple[int, ...]) -> bool:
        """Return whether each token was sampled after exactly those that stand before it."""
        return all(
            self._behind[token_id] == (request, sequence, token_ids[:position])
            for position, token_id in enumerate(token_ids)
        )


def kind_of(token_id: int) -> Kind:
    """What a token is."""
    return Kind(token_id // _OF_A_KIND)


def expected_text(token_ids: tuple[int, ...]) -> tuple[str, bool]:
    """The text of tokens up to a stop string, and whether there was one."""
    text = "".join(_piece(token_id) for token_id in token_ids if kind_of(token_id) is not Kind.EOS)
    before, found, _ = text.partition(STOP_STRING)
    return before, bool(found)


EOS_IDS = range(Kind.EOS * _OF_A_KIND, Kind.EOS * _OF_A_KIND + 256)


def make_tokenizer() -> Tokenizer:
    """The text of every token there may be."""
    tokenizer = Tokenizer(models.BPE(vocab={_piece(i): i for i in range(len(Kind) * _OF_A_KIND)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _piece(token_id: int) -> str:
    number = token_id % _OF_A_KIND
    match kind_of(token_id):
        case Kind.PLAIN:
            return f"{number}."
        case Kind.EOS:
            return f"<{number}>"
        case Kind.STOP:
            return f"!{number}"
