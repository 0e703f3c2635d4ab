"""The work that a runner may leave to the device: steps that only decode or are small, and the choice of tokens."""

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from worker_svc.core.batch import Batch
from worker_svc.core.sampler import Extras, Sampled
from worker_svc.core.slots import I64


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """The output of a step, a row for each sample; tokens that are chosen are in the histories already. The next
    step may overwrite it.
    """

    logits: Tensor  # [rows, vocab_size]
    token_ids: Tensor | None  # i64[rows], as temperatures alone decide; None: not chosen yet
    slots: Tensor  # i64[rows]
    positions: Tensor  # i64[rows], of the tokens
    # [rows and more, hidden_size]: hidden states, not yet normalised; after those of the samples those of further rows
    # that were wanted. None: they are not kept.
    hidden: Tensor | None = None

    def first(self, num_rows: int) -> "DecodeOutput":
        """Of the first so many rows, with all hidden states."""
        return replace(
            self,
            logits=self.logits[:num_rows],
            token_ids=self.token_ids[:num_rows] if self.token_ids is not None else None,
            slots=self.slots[:num_rows],
            positions=self.positions[:num_rows],
        )


class DeviceDecoder(Protocol):
    """Works on the slots' device state; never waits for the device."""

    def decode(self, slots: I64) -> DecodeOutput:
        """Compute the last known token of each slot and sample the next."""

    def compute(self, batch: Batch, rows: I64) -> DecodeOutput | None:
        """Carry out a small step of any kind, with what is still to enter the slots' tables; None, and nothing done,
        for one that is not small enough. `rows` i64[n]: those of the batch whose hidden states are wanted, too.
        """

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, extras: Extras | None) -> Sampled:
        """The tokens at `positions` i64[rows] of `slots` i64[rows] from logits [rows, vocab_size], as the slots'
        temperatures and `extras` decide; they are entered in the histories.
        """

    def store(self, tokens: Tensor, target: Tensor) -> None:
        """Write tokens i64[rows] into `target` i64[rows], pinned memory of the host, before the device's next step: it
        must live until an event after that has come.
        """
