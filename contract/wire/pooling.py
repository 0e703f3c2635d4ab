"""Pooling, and the vectors that it makes, as messages of the contract and back."""

import numpy as np
from google.protobuf.message import DecodeError

from contract.domain.errors import PoisonMessageError
from contract.domain.pooling import F32, Pooling, PoolingFacts, PoolingKind
from contract.v1 import common_pb2, status_pb2


def encode_pooling(pooling: Pooling | None) -> common_pb2.Pooling | None:
    """The pooling of a prompt; None: it becomes no vector."""
    if pooling is None:
        return None
    return common_pb2.Pooling(
        kind=common_pb2.PoolingKind.ValueType(pooling.kind),
        normalize=pooling.normalize,
        dimensions=pooling.dimensions,
    )


def decode_pooling(message: common_pb2.Pooling) -> Pooling:
    """The inverse of `encode_pooling`, of what is there.

    Raises:
        PoisonMessageError: a kind that this version does not know.
    """
    return Pooling(_kind(message.kind), message.normalize, message.dimensions)


def encode_facts(facts: PoolingFacts) -> status_pb2.PoolingFacts:
    """The pooling of a checkpoint."""
    kind = common_pb2.PoolingKind.ValueType(facts.kind)
    return status_pb2.PoolingFacts(
        kind=kind, normalize=facts.normalize, size=facts.size, trouble=facts.trouble, scores_pairs=facts.scores_pairs
    )


def decode_facts(message: status_pb2.PoolingFacts) -> PoolingFacts:
    """The inverse of `encode_facts`.

    Raises:
        PoisonMessageError: a kind that this version does not know.
    """
    return PoolingFacts(
        _kind(message.kind), message.normalize, message.size, message.trouble, scores_pairs=message.scores_pairs
    )


def _kind(number: int) -> PoolingKind:
    try:
        return PoolingKind(number)
    except ValueError as error:
        raise PoisonMessageError(f"not a way to pool: {error}") from error


def encode_vector(vector: F32) -> bytes:
    """A penstock.v1.PromptVector."""
    return common_pb2.PromptVector(values=vector.astype("<f4", copy=False).tobytes()).SerializeToString()


def decode_vector(payload: bytes) -> F32:
    """The inverse of `encode_vector`.

    Raises:
        PoisonMessageError: it is none.
    """
    try:
        return unpack_vector(common_pb2.PromptVector.FromString(payload).values)
    except (DecodeError, ValueError) as error:
        raise PoisonMessageError(f"not a PromptVector: {error}") from error


def unpack_vector(values: bytes) -> F32:
    """f32[dimensions] of packed values.

    Raises:
        ValueError: not four bytes for each.
    """
    return np.frombuffer(values, "<f4").astype(np.float32, copy=False)
