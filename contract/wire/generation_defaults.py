"""Parameters that hold where a request does not say otherwise: tokenizers tell them, gateways fill them in."""

from collections.abc import Collection
from typing import Any, Final

import numpy as np

from contract.domain.generation_defaults import FILLED, GenerationDefaults
from contract.domain.parameter import Parameter
from contract.v1 import requests_pb2
from contract.wire.requests import decode_value, encode_value

_MAX_TOKENS: Final = "max_tokens"
_OF_SAMPLING: Final = tuple(each for name, each in FILLED.items() if name != _MAX_TOKENS)


def encode_defaults(defaults: GenerationDefaults) -> requests_pb2.GenerationDefaults:
    """A penstock.v1.GenerationDefaults."""
    stated = defaults.stated
    sampling = requests_pb2.SamplingParameters()
    for each in _OF_SAMPLING:
        if each.name in stated:
            sampling.MergeFrom(requests_pb2.SamplingParameters(**encode_value(each, stated[each.name])))
    return requests_pb2.GenerationDefaults(sampling=sampling, max_tokens=stated.get(_MAX_TOKENS))


def decode_defaults(message: requests_pb2.GenerationDefaults) -> GenerationDefaults:
    """The inverse of `encode_defaults`.

    Raises:
        PenstockError: INVALID_ARGUMENT: a value is out of bounds.
    """
    sampling = message.sampling
    stated = {each.name: _shortest(decode_value(each, sampling)) for each in _OF_SAMPLING if _is_said(each, sampling)}
    if message.HasField(_MAX_TOKENS):
        stated[_MAX_TOKENS] = message.max_tokens
    return GenerationDefaults(**stated)


def _shortest(value: Any) -> Any:
    """A 32-bit float as people write it: what gateways tell is what stands in the model's file."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _is_said(parameter: Parameter, sampling: requests_pb2.SamplingParameters) -> bool:
    return sampling.HasField(parameter.field)  # type: ignore[arg-type]  # a field's name that is no literal


def unsaid(message: requests_pb2.GenerateRequest) -> frozenset[str]:
    """The parameters of a client's request that are left to the defaults."""
    left = {each.name for each in _OF_SAMPLING if not _is_said(each, message.sampling)}
    stopping = message.stopping
    if stopping.max_tokens_is_default or not stopping.HasField(_MAX_TOKENS):
        left.add(_MAX_TOKENS)
    return frozenset(left)


def clear_unsaid(message: requests_pb2.GenerateRequest, unsaid: Collection[str]) -> None:
    """Leave out of a request what its caller did not state: what is left is what was asked."""
    for name in unsaid:
        if name == _MAX_TOKENS:
            message.stopping.ClearField(_MAX_TOKENS)
        else:
            message.sampling.ClearField(FILLED[name].field)  # type: ignore[arg-type]
