"""The parts in which a model's answer comes, and who gives them."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from contract.domain.request import Message


@dataclass(frozen=True, slots=True)
class Piece:
    """More of an answer."""

    text: str = ""
    reasoning: str = ""  # thoughts that the server tells apart
    num_tokens: int = 0  # of the answer up to here; 0: not told


class Answers(Protocol):
    """A server that a model can be asked on. Closing an answer before its end stops it."""

    def model_name(self) -> str:
        """The model that answers.

        Raises:
            PenstockError: the server does not say.
        """

    def complete(self, prompt: str) -> Generator[Piece, None, None]:
        """Continues a text.

        Raises:
            PenstockError: the request is wrong, was refused, or failed.
        """

    def chat(self, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        """Answers a chat.

        Raises:
            PenstockError: as `complete`.
        """
