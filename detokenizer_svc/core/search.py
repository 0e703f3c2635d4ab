"""The log of a beam search as a detokenizer keeps it: for checkpoints, since only schedulers read it."""

from collections.abc import Iterable

from contract.domain import chain
from contract.texts.decoder import TextDecoder
from detokenizer_svc.core.request import OpenRequest
from detokenizer_svc.core.sequence import Sequence


class SearchLog(Sequence):
    """The sequence that stands for a request's search: words in place of tokens, no text, no end."""

    __slots__ = ()

    def __init__(self, request: OpenRequest, decoder: TextDecoder) -> None:
        super().__init__(request, request.n, decoder)
        self.logprobs = None  # of words there are none

    def take(self, words: Iterable[int]) -> None:
        """Add the next words."""
        new = list(words)
        self.token_ids.extend(new)
        self.chain = chain.extend(self.chain, new)
