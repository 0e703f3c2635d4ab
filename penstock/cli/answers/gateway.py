"""Answers of a Penstock gateway, over gRPC: they go on when a gateway dies."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.request import Message
from penstock.cli.answers.piece import Piece
from penstock.client import Client, Delta
from penstock.client.events import Event


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway, and how its model is to generate."""

    client: Client
    params: Mapping[str, Any]
    model: str = ""  # empty: the one that is served
    timeout_s: float | None = None

    def model_name(self) -> str:
        """The model that answers."""
        if self.model:
            return self.model
        if not (models := self.client.models()):
            raise PenstockError(ErrorCode.UNAVAILABLE, "no worker has registered a model yet: try again in a moment")
        return models[0].name

    def complete(self, prompt: str) -> Generator[Piece, None, None]:
        """Continues a text."""
        yield from _pieces(
            self.client.generate(prompt, self.params, model=self.model, timeout_s=self.timeout_s, resumable=True)
        )

    def chat(self, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        """Answers a chat."""
        yield from _pieces(
            self.client.generate(
                messages=messages, params=self.params, model=self.model, timeout_s=self.timeout_s, resumable=True
            )
        )


def _pieces(events: Generator[Event, None, None]) -> Generator[Piece, None, None]:
    num_tokens = 0
    try:
        for event in events:
            if isinstance(event, Delta):
                num_tokens += len(event.token_ids)
                yield Piece(event.text, num_tokens=num_tokens)
    finally:
        events.close()
