"""Beam search as a message of the contract and back."""

from typing import Final

from contract.domain.beams import BeamSearch
from contract.domain.errors import invalid
from contract.v1 import requests_pb2

_Early = requests_pb2.EarlyStopping
_NUMBERS: Final[dict[bool | str, _Early.ValueType]] = {
    False: requests_pb2.EARLY_STOPPING_UNSPECIFIED,
    True: requests_pb2.EARLY_STOPPING_AT_ONCE,
    "never": requests_pb2.EARLY_STOPPING_NEVER,
}
_VALUES: Final = {number: value for value, number in _NUMBERS.items()}


def encode_beams(search: BeamSearch | None) -> requests_pb2.BeamParameters | None:
    """The search of beams; None: there is none."""
    if search is None:
        return None
    return requests_pb2.BeamParameters(
        length_penalty=search.length_penalty, early_stopping=_NUMBERS[search.early_stopping]
    )


def decode_beams(message: requests_pb2.BeamParameters) -> BeamSearch:
    """The inverse of `encode_beams`, of what is there.

    Raises:
        PenstockError: INVALID_ARGUMENT: an early_stopping that this version does not know.
    """
    if (early := _VALUES.get(message.early_stopping)) is None:
        raise invalid(f"early_stopping {message.early_stopping} is not known", "early_stopping")
    default = BeamSearch().length_penalty
    return BeamSearch(message.length_penalty if message.HasField("length_penalty") else default, early)
