"""The parameters that hold where a request does not say otherwise, as a model's makers wish."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from contract.domain.beams import FILLED_BESIDE_BEAMS
from contract.domain.parameter import Parameter
from contract.domain.params import PARAMETERS, SamplingParams

# What a default may be given for.
FILLED: Final[Mapping[str, Parameter]] = {name: each for name, each in PARAMETERS.items() if each.filled is not None}


@dataclass(frozen=True, slots=True, init=False)
class GenerationDefaults:
    """A model's defaults: parameters of `FILLED` by name. None, or none given: that of OpenAI's API, which
    `SamplingParams` has.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that is out of bounds.
    """

    stated: Mapping[str, Any]  # those that are not OpenAI's

    def __init__(self, **stated: Any) -> None:
        if not stated.keys() <= FILLED.keys():
            raise TypeError(f"no model has defaults of {sorted(stated.keys() - FILLED.keys())}")
        said = {name: stated[name] for name in FILLED if stated.get(name) is not None}
        object.__setattr__(self, "stated", MappingProxyType(said))
        self.params()

    @property
    def beside_beams(self) -> Mapping[str, Any]:
        """Those that hold beside a search of beams, which draws nothing."""
        return {name: value for name, value in self.stated.items() if name in FILLED_BESIDE_BEAMS}

    def params(self) -> SamplingParams:
        """The parameters of a request that says nothing."""
        return SamplingParams(**self.stated)

    def fill(self, params: SamplingParams, unsaid: Collection[str]) -> SamplingParams:
        """The parameters with these defaults in place of the ones that a request did not state.

        Raises:
            PenstockError: INVALID_ARGUMENT: what the request did state contradicts them.
        """
        stated = self.beside_beams if params.use_beam_search else self.stated
        filled = {name: value for name, value in stated.items() if name in unsaid}
        return replace(params, **filled) if filled else params


OPENAI_DEFAULTS: Final = GenerationDefaults()
