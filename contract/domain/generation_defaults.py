"""The parameters that hold where a request does not say otherwise, as a model's makers wish."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final

from contract.domain.params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """A model's defaults; None: that of OpenAI's API, which `SamplingParams` has.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that is out of bounds.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None  # as many as the context leaves, where these are fewer
    suppress_tokens: tuple[int, ...] | None = None
    # Those that are not OpenAI's, by the names that they have in `SamplingParams`; made once, as each request asks.
    stated: Mapping[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        stated = {name: value for name, value in values.items() if value is not None}
        object.__setattr__(self, "stated", MappingProxyType(stated))
        self.params()

    def params(self) -> SamplingParams:
        """The parameters of a request that says nothing."""
        return SamplingParams(**self.stated)

    def fill(self, params: SamplingParams, unsaid: Collection[str]) -> SamplingParams:
        """The parameters with these defaults in place of the ones that a request did not state.

        Raises:
            PenstockError: INVALID_ARGUMENT: what the request did state contradicts them.
        """
        filled = {name: value for name, value in self.stated.items() if name in unsaid}
        return replace(params, **filled) if filled else params


# What a default may be given for.
FILLED: Final = frozenset(each.name for each in fields(GenerationDefaults) if each.init)
OPENAI_DEFAULTS: Final = GenerationDefaults()
