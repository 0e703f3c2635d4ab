"""The tokens that an output thought with."""

from collections.abc import Sequence


class ThinkingTokens:
    """Counts the tokens up to the one that closes a thought."""

    __slots__ = ("_closing_token_id", "_is_closed", "_num")

    def __init__(self, closing_token_id: int | None) -> None:
        """`closing_token_id`: the token with which thoughts end; None: it is no token of its own."""
        self._closing_token_id = closing_token_id
        self._is_closed = False
        self._num = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the output."""
        if self._is_closed or self._closing_token_id is None:
            return
        self._is_closed = self._closing_token_id in token_ids
        self._num += token_ids.index(self._closing_token_id) + 1 if self._is_closed else len(token_ids)

    def count(self, *, has_reasoned: bool) -> int | None:
        """The number of them, in an output that has a thought or has none; None: it is not known."""
        if self._closing_token_id is None:
            return None
        return self._num if has_reasoned else 0
