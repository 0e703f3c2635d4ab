"""Pooling: how the hidden states of a prompt become one vector."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from contract.domain.errors import ErrorCode, PenstockError, invalid, unimplemented
from contract.domain.model_kind import ModelKind, wrong_kind

F32 = npt.NDArray[np.float32]
MAX_DIMENSIONS = 2**16


class PoolingKind(IntEnum):
    """The hidden states that count; the numbers are those of `penstock.v1.PoolingKind`."""

    LAST = 1  # that of the last token
    MEAN = 2  # the mean of all tokens'
    CLS = 3  # that of the first token
    SCORE = 4  # none: a cross-encoder's head gives a pair of texts one number


@dataclass(frozen=True, slots=True)
class Pooling:
    """The way from the final normalised hidden states of a prompt to its vector."""

    kind: PoolingKind = PoolingKind.LAST
    normalize: bool = True  # to the length 1
    dimensions: int = 0  # the first so many count, and are normalised then; 0: all

    @property
    def needs_whole_prompt(self) -> bool:
        """Return whether other hidden states than the last count: tokens whose KV is found have none."""
        return self.kind is not PoolingKind.LAST


SCORED: Final = Pooling(PoolingKind.SCORE, normalize=False)


def is_done_by(kind: ModelKind, pooling: Pooling | None) -> bool:
    """Return whether a model of this kind takes requests that are pooled so; None: that generate."""
    is_scored = pooling is not None and pooling.kind is PoolingKind.SCORE
    if kind is ModelKind.CROSS_ENCODER:
        return is_scored
    return not is_scored and (pooling is not None or kind is ModelKind.DECODER)


_SIDES: Final = (None, "left", "right")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """The wishes of a caller, by vLLM's names; None: as the checkpoint says.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that is out of bounds.
    """

    pooling_type: str | None = None  # LAST, MEAN or CLS
    normalize: bool | None = None
    dimensions: int | None = None  # Matryoshka: the first so many of the vector
    truncate_prompt_tokens: int | None = None  # the last so many tokens of the prompt count; -1: those that fit
    truncation_side: str | None = None  # at which tokens are left out: `left`, as by default, or `right`

    def __post_init__(self) -> None:
        if self.pooling_type is not None:
            kind_of(self.pooling_type)
        if self.normalize is not None and type(self.normalize) is not bool:
            raise invalid(f"normalize must be true or false, got {self.normalize!r:.40}", "normalize")
        if self.truncation_side not in _SIDES:
            raise invalid(f"truncation_side must be left or right, got {self.truncation_side!r:.40}", "truncation_side")
        for name in ("dimensions", "truncate_prompt_tokens"):
            if (value := getattr(self, name)) is not None and type(value) is not int:
                raise invalid(f"{name} must be an integer, got {value!r:.40}", name)
        if self.dimensions is not None and not 1 <= self.dimensions <= MAX_DIMENSIONS:
            raise invalid(f"dimensions must be in [1, {MAX_DIMENSIONS}], got {self.dimensions}", "dimensions")


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """The pooling that a checkpoint asks for where a request does not say otherwise."""

    kind: PoolingKind = PoolingKind.LAST
    normalize: bool = True
    size: int = 0  # dimensions of its hidden states; 0: not known
    trouble: str = ""  # the part of its pooling that is not done here, with which none is done by default; or empty
    scores_pairs: bool = False  # it is a cross-encoder: no vectors are made of prompts

    def pooling(self, params: PoolingParams) -> Pooling:
        """The pooling of a request.

        Raises:
            PenstockError: INVALID_ARGUMENT: more dimensions than there are, or no vectors; UNIMPLEMENTED: the
                checkpoint's pooling.
        """
        if self.scores_pairs:
            raise wrong_kind(ModelKind.CROSS_ENCODER)
        if self.size and params.dimensions is not None and params.dimensions > self.size:
            raise invalid(f"dimensions is {params.dimensions}, but vectors have {self.size}", "dimensions")
        if self.trouble and params.pooling_type is None:
            raise PenstockError(
                ErrorCode.UNIMPLEMENTED,
                f"the checkpoint asks for {self.trouble}, which is not implemented: say pooling_type to do without",
                param="pooling_type",
            )
        return Pooling(
            self.kind if params.pooling_type is None else kind_of(params.pooling_type),
            self.normalize if params.normalize is None else params.normalize,
            params.dimensions or 0,
        )

    def scoring(self, params: PoolingParams) -> Pooling:
        """The scoring of a pair.

        Raises:
            PenstockError: UNIMPLEMENTED: the request asks for something of a vector.
        """
        for name in ("pooling_type", "dimensions"):
            if getattr(params, name) is not None:
                raise unimplemented(name, f"{name} of a cross-encoder, which makes no vectors,")
        if params.normalize is False:
            raise unimplemented("normalize", "a cross-encoder's score as it is before its activation")
        return SCORED


PLAIN_POOLING: Final = PoolingFacts()


VECTOR_KINDS: Final = tuple(each for each in PoolingKind if each is not PoolingKind.SCORE)
_BY_NAME: Final = {each.name: each for each in VECTOR_KINDS}


def kind_of(name: str) -> PoolingKind:
    """The kind of this name, in whatever case.

    Raises:
        PenstockError: INVALID_ARGUMENT: there is none.
    """
    try:
        return _BY_NAME[name.upper()]
    except (KeyError, AttributeError):
        names = ", ".join(_BY_NAME)
        raise invalid(f"pooling_type must be one of {names}, got {name!r:.40}", "pooling_type") from None


def cosine(one: F32, other: F32) -> float:
    """The cosine of the angle between two vectors f32[dimensions]; 0 if one has no length."""
    length = float(np.linalg.norm(one.astype(np.float64)) * np.linalg.norm(other.astype(np.float64)))
    return float(one.astype(np.float64) @ other.astype(np.float64)) / length if length else 0.0
