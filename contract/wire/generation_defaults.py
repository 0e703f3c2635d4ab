"""Parameters that hold where a request does not say otherwise: tokenizers tell them, gateways fill them in."""

from collections.abc import Collection
from typing import Any, Final

import numpy as np

from contract.domain.generation_defaults import FILLED, GenerationDefaults
from contract.v1 import requests_pb2
from contract.wire.requests import pack_u32, unpack_u32

_SUPPRESS: Final = "suppress_tokens"
_MAX_TOKENS: Final = "max_tokens"
# Of SamplingParameters, by the names that they have in `SamplingParams`.
_SAMPLING_FIELDS: Final = {
    name: "suppress_token_ids" if name == _SUPPRESS else name for name in FILLED if name != _MAX_TOKENS
}


def encode_defaults(defaults: GenerationDefaults) -> requests_pb2.GenerationDefaults:
    """A penstock.v1.GenerationDefaults."""
    stated = dict(defaults.stated)
    max_tokens = stated.pop(_MAX_TOKENS, None)
    if _SUPPRESS in stated:
        stated[_SUPPRESS] = pack_u32(stated[_SUPPRESS])
    sampling = requests_pb2.SamplingParameters(**{_SAMPLING_FIELDS[name]: value for name, value in stated.items()})
    return requests_pb2.GenerationDefaults(sampling=sampling, max_tokens=max_tokens)


def decode_defaults(message: requests_pb2.GenerationDefaults) -> GenerationDefaults:
    """The inverse of `encode_defaults`.

    Raises:
        PenstockError: INVALID_ARGUMENT: a value is out of bounds.
    """
    stated: dict[str, Any] = {
        name: _shortest(getattr(message.sampling, field))
        for name, field in _SAMPLING_FIELDS.items()
        if message.sampling.HasField(field)  # type: ignore[arg-type]  # a field's name that is no literal
    }
    if _SUPPRESS in stated:
        stated[_SUPPRESS] = tuple(unpack_u32(_SUPPRESS, stated[_SUPPRESS]))
    if message.HasField("max_tokens"):
        stated[_MAX_TOKENS] = message.max_tokens
    return GenerationDefaults(**stated)


def _shortest(value: Any) -> Any:
    """A 32-bit float as people write it: what gateways tell is what stands in the model's file."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def unsaid(message: requests_pb2.GenerateRequest) -> frozenset[str]:
    """The parameters of a client's request that are left to the defaults."""
    left = {
        name
        for name, field in _SAMPLING_FIELDS.items()
        if not message.sampling.HasField(field)  # type: ignore[arg-type]
    }
    stopping = message.stopping
    if stopping.max_tokens_is_default or not stopping.HasField("max_tokens"):
        left.add(_MAX_TOKENS)
    return frozenset(left)


def clear_unsaid(message: requests_pb2.GenerateRequest, unsaid: Collection[str]) -> None:
    """Leave out of a request what its caller did not state: what is left is what was asked."""
    for name in unsaid:
        if name == _MAX_TOKENS:
            message.stopping.ClearField(_MAX_TOKENS)
        else:
            message.sampling.ClearField(_SAMPLING_FIELDS[name])  # type: ignore[arg-type]
