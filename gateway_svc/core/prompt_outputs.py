"""The computed part of a prompt that a reply tells: its logprobs, or the vector that it becomes."""

from base64 import b64encode
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import msgspec

from contract.domain.pooling import F32
from gateway_svc.core.prompt_logprobs import SpelledPrompt

_json = msgspec.json.Encoder()


@dataclass(frozen=True)
class PromptVector:
    """The vector of a prompt, as replies write it."""

    values: F32  # f32[dimensions]

    @cached_property
    def numbers(self) -> msgspec.Raw:
        """A list of numbers, in JSON: written once, beside the event loop, since all of a call's would take long."""
        return msgspec.Raw(_json.encode(self.values.tolist()))

    @cached_property
    def base64(self) -> str:
        """Its little-endian f32, as OpenAI's clients read them."""
        return b64encode(self.values.astype("<f4", copy=False).tobytes()).decode()


PromptOutput: TypeAlias = SpelledPrompt | PromptVector
