"""What a runner may leave to the device: steps that only decode or are small, and tokens that only a temperature
decides.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker_svc.core.batch import Batch
from worker_svc.core.sampler import Draw
from worker_svc.core.slots import I64


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """What such a step leaves behind, a row for each sample; the tokens are in the histories already. The next step may
    overwrite it.
    """

    logits: Tensor  # [rows, vocab_size]
    token_ids: Tensor  # i64[rows], as temperatures alone decide


class Decoder(Protocol):
    """Works on the slots' device state; never waits for the device."""

    def decode(self, slots: I64) -> DecodeOutput:
        """Compute the last known token of each slot and sample the next."""

    def draw(self, logits: Tensor, draw: Draw) -> Tensor:
        """Tokens i64[d] for logits f32[d, vocab_size], as `sampler.sample` wants them."""

    def compute(self, batch: Batch) -> DecodeOutput | None:
        """Carry out a small step of any kind, with what is still to enter the slots' tables; None, and nothing done,
        for one that is not small enough.
        """

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Tokens i64[rows] at `positions` i64[rows] of `slots` i64[rows] from logits [rows, vocab_size]."""
