"""Reasons for the end of a sequence, and its usage."""

from dataclasses import dataclass
from enum import IntEnum

from contract.domain.errors import ErrorCode, PenstockError


class FinishReason(IntEnum):
    """The numbers are those of `penstock.v1.FinishReason`; zero means that the sequence goes on."""

    UNSPECIFIED = 0
    STOP = 1  # EOS, a stop token id or a stop string
    LENGTH = 2  # max_tokens, or the context is full
    CANCELLED = 3  # the client left or asked for it
    ERROR = 4  # a typed error says whose fault it is
    POOLED = 5  # the prompt is computed, and its vector kept: nothing was to be generated
    REPETITION = 6  # the output repeats itself


class CancelReason(IntEnum):
    """The reason why a request or a sequence is to end; numbers are those of `penstock.v1.CancelReason`."""

    UNSPECIFIED = 0
    CLIENT = 1  # asked for, or the connection broke
    STOP = 2  # the detokenizer met a stop string: the end is already decided
    DEADLINE = 3
    SHUTDOWN = 4


@dataclass(frozen=True, slots=True)
class RequestError:
    """A `PenstockError` as a value, so that it can travel in a log row."""

    code: ErrorCode
    message: str
    param: str = ""

    @classmethod
    def of(cls, error: PenstockError) -> "RequestError":
        """The value of a raised error."""
        return cls(error.code, error.message, error.param or "")

    def raised(self) -> PenstockError:
        """The error to raise at the edge."""
        return PenstockError(self.code, self.message, param=self.param or None)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request used: the prompt once, outputs over all its sequences."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
