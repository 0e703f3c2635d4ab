"""Kinds of models in the contract's messages, and back."""

from contract.domain.errors import PoisonMessageError
from contract.domain.model_kind import ModelKind
from contract.v1 import results_pb2


def encode_model_kind(kind: ModelKind) -> results_pb2.ModelKind.ValueType:
    """A penstock.v1.ModelKind."""
    return results_pb2.ModelKind.ValueType(kind)


def decode_model_kind(number: int) -> ModelKind:
    """The inverse of `encode_model_kind`; what is not told is a decoder.

    Raises:
        PoisonMessageError: a kind that this version does not know.
    """
    try:
        return ModelKind(number or ModelKind.DECODER)
    except ValueError as error:
        raise PoisonMessageError(f"not a kind of model: {error}") from error
