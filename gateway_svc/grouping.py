"""Rows of a stream in groups of so many tokens, as its client asked for."""

from collections.abc import Sequence

from contract.domain.errors import PenstockError
from contract.domain.finish import Usage
from contract.domain.rows import TextRow
from gateway_svc.call import Sink
from gateway_svc.core.prompt_outputs import PromptOutput
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.streams import merge


def grouped_sink(sink: Sink, form: ReplyForm) -> Sink:
    """The sink of a stream, in groups if its client asked for that."""
    return GroupingSink(sink, form.stream_interval) if form.stream_interval > 1 else sink


class GroupingSink:
    """Hands on a choice's first row at once, then rows together that bring `interval` tokens, and the last at once.

    A group ends where the number of the choice's tokens says so, whoever has counted them: every gateway that goes on
    with a stream groups alike.
    """

    def __init__(self, inner: Sink, interval: int) -> None:
        self._inner = inner
        self._interval = interval
        self._held: dict[tuple[int, int], list[TextRow]] = {}  # by prompt and sample
        self._chains: dict[tuple[int, int], int] = {}  # over the tokens up to the end of what is held

    @property
    def has_room(self) -> bool:
        """Implement `call.Sink`."""
        return self._inner.has_room

    def learn(self, prompt: int, num_prompt_tokens: int) -> None:
        """Implement `call.Sink`."""
        self._inner.learn(prompt, num_prompt_tokens)

    def learn_model(self, prompt: int, model_digest: bytes) -> None:
        """Implement `call.Sink`."""
        self._inner.learn_model(prompt, model_digest)

    def learn_prompt(self, prompt: int, output: PromptOutput) -> None:
        """Implement `call.Sink`: nothing of the prompt's samples is held."""
        self._inner.learn_prompt(prompt, output)

    def recall(self, prompt: int, row: TextRow) -> None:
        """Implement `call.Sink`: it comes before all that is held."""
        self._inner.recall(prompt, row)

    def take(self, prompt: int, row: TextRow, chain: int) -> None:
        """Implement `call.Sink`."""
        choice = prompt, row.sequence
        held = self._held.setdefault(choice, [])
        held.append(row)
        self._chains[choice] = chain
        num_tokens = row.token_offset + len(row.token_ids)
        if row.finish or self._group(num_tokens) != self._group(held[0].token_offset):
            self._hand_on(choice)

    def end(self, usages: Sequence[Usage]) -> None:
        """Implement `call.Sink`: every choice has ended, so nothing is held."""
        self._inner.end(usages)

    def fail(self, error: PenstockError) -> None:
        """Implement `call.Sink`: what is held comes before the error."""
        for choice in list(self._held):
            self._hand_on(choice)
        self._inner.fail(error)

    def _hand_on(self, choice: tuple[int, int]) -> None:
        self._inner.take(choice[0], merge(self._held.pop(choice)), self._chains.pop(choice))

    def _group(self, num_tokens: int) -> int:
        """The group that a choice is in after so many tokens: the first one is a group of its own."""
        return 1 + (num_tokens - 1) // self._interval if num_tokens else 0
