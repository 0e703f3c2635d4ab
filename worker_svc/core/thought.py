"""A bound on what a model thinks: once a thought is so long, the token that closes it comes next."""

from collections.abc import Iterable

from contract.domain.plan import Admission


class Thought:
    """One sequence's: a function of its tokens. A thought that comes after another one has the whole budget again."""

    __slots__ = ("_budget", "_is_open", "_num_tokens", "_opening_token_id", "closing_token_id")

    def __init__(self, budget: int, opening_token_id: int, closing_token_id: int) -> None:
        """No thought is open.

        Args:
            budget: tokens of the output that may stand in a thought.
            opening_token_id: with this one it begins.
            closing_token_id: with this one it ends.
        """
        self._budget = budget
        self._opening_token_id = opening_token_id
        self.closing_token_id = closing_token_id
        self._is_open = False
        self._num_tokens = 0

    @classmethod
    def of(cls, admission: Admission) -> "Thought | None":
        """The thought of a sequence that enters a slot; None: nothing bounds it."""
        sampling = admission.sampling
        if sampling.thinking_token_budget is None or len(sampling.thinking_token_ids) != 2:
            return None
        opening, closing = sampling.thinking_token_ids
        thought = cls(sampling.thinking_token_budget, opening, closing)
        num_prompt = admission.num_prompt_tokens
        prompt = admission.token_ids[:num_prompt]
        marks = prompt[(prompt == opening) | (prompt == closing)]
        thought._is_open = bool(len(marks)) and int(marks[-1]) == opening
        thought.add(admission.token_ids[num_prompt:].tolist())
        return thought

    @property
    def must_close(self) -> bool:
        """Return whether the next token must be the one that closes the thought."""
        return self._is_open and self._num_tokens >= self._budget

    def add(self, token_ids: Iterable[int]) -> None:
        """Take the next tokens of the output."""
        for token_id in token_ids:
            if token_id in (self._opening_token_id, self.closing_token_id):
                self._is_open, self._num_tokens = token_id == self._opening_token_id, 0
            else:
                self._num_tokens += 1
