"""Tokens as grammars know them: for those who check grammars, and for those who follow them."""

import threading
from collections.abc import Callable

from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

_END = "<|the output may end here|>"


class GrammarTokens:
    """A model's tokens, made when they are first called for, once: it takes a second for a large vocabulary, and most
    pools never see a grammar. Safe to call from several threads.
    """

    def __init__(self, read: Callable[[], Tokenizer], vocab_size: int) -> None:
        """`read`: the model's tokenizer; `vocab_size`: ids up to there that it does not know mean nothing."""
        self._read = read
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None

    def __call__(self) -> LLTokenizer:
        """The tokens. The EOS token among them is one beside the model's: it stands for the end of the output, since
        what ends an output, and whether that has a text too, is the request's business.

        Raises:
            PenstockError: INTERNAL (operator): there is no tokenizer.
        """
        with self._lock:
            if self._tokens is None:
                self._tokens = _make(self._read(), self._vocab_size)
            return self._tokens


def _make(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_special_tokens([AddedToken(_END, special=True)])
    size = max(vocab_size, extended.get_vocab_size(with_added_tokens=True))
    return LLTokenizer(extended.to_str(), n_vocab=size, eos_token=extended.token_to_id(_END))
