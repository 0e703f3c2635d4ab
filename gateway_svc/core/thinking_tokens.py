"""The tokens that an output thought with."""

from collections.abc import Sequence


class ThinkingTokens:
    """Counts the tokens of each stretch of an output up to one that closes a thought."""

    __slots__ = ("_closing_token_id", "_nums")

    def __init__(self, closing_token_id: int | None) -> None:
        """`closing_token_id`: the token with which thoughts end; None: it is no token of its own."""
        self._closing_token_id = closing_token_id
        self._nums = [0]

    def add(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the output."""
        for token_id in token_ids if self._closing_token_id is not None else ():
            self._nums[-1] += 1
            if token_id == self._closing_token_id:
                self._nums.append(0)

    def count(self, thoughts: Sequence[bool]) -> int | None:
        """The number of them, where these stretches are thoughts; None: it is not known."""
        if self._closing_token_id is None:
            return None
        return sum(num for num, is_thought in zip(self._nums, thoughts, strict=False) if is_thought)
