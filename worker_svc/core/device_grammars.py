"""Grammars of sequences whose tokens are chosen on a device: tokens come down to the host, masks go up."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contract.domain.plan import U32, Admission
from worker_svc.core.grammars import Follower, SlotGrammars
from worker_svc.core.kernels.sampling.changes import TokenMasks
from worker_svc.core.slots import I64
from worker_svc.core.transfer import upload

_NUM_STAGES = 3  # of masks: of the step that computes, of the one after it, and of the one that is made


@dataclass(frozen=True, slots=True)
class _Coming:
    """Tokens of a step on their way to the host, and who waits for them, by their rows."""

    followers: list[tuple[int, Follower]]
    token_ids: Tensor  # i64[rows]
    arrived: torch.cuda.Event | None  # None: they are here

    def take(self) -> list[tuple[Follower, int]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        token_ids = self.token_ids.tolist()
        return [(follower, token_ids[row]) for row, follower in self.followers]


class _Stage:
    """Pinned memory from which masks go up."""

    def __init__(self, num_rows: int, num_words: int) -> None:
        self.words = torch.empty((num_rows, num_words), dtype=torch.int32, pin_memory=True)
        self._left = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def upload(self, num_rows: int, device: torch.device) -> Tensor:
        on_device = self.words[:num_rows].to(device, non_blocking=True)
        self._left.record()
        return on_device

    def wait(self) -> None:
        """Until what was uploaded last has left."""
        self._left.synchronize()


class DeviceGrammars:
    """A step of a batch in which some sequence has a grammar is launched as any other; only the choice of its tokens
    waits until those of the step before have come down, while the device computes.
    """

    def __init__(self, grammars: SlotGrammars, device: torch.device) -> None:
        self._grammars = grammars
        self._device = device
        self._coming: list[_Coming] = []
        self._stages: deque[_Stage] = deque()  # the one that was used longest ago first

    def clear(self) -> None:
        """Empty every slot."""
        self._grammars.clear()
        self._coming.clear()

    def release(self, slots: U32) -> None:
        """Empty `slots`."""
        self._grammars.release(slots)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Sequences enter their slots.

        Raises:
            PenstockError: INTERNAL: one has a grammar, and this worker has no tokenizer.
        """
        for admission in admissions:
            self._grammars.remember(admission)

    def holds(self, slots: I64) -> bool:
        """Return whether one of `slots` has a grammar."""
        return bool(self._grammars.of(slots))

    def masks(self, slots: I64) -> TokenMasks | None:
        """The tokens that may come next in `slots`, whose tokens so far have all been launched; waits for them. None:
        any may.
        """
        followers = self._grammars.of(slots)
        if not followers:
            return None
        for coming in self._coming:
            self._grammars.follow(coming.take())
        self._coming.clear()
        if self._device.type != "cuda":
            masks = self._grammars.masks(followers)
            return TokenMasks(torch.from_numpy(masks.rows), torch.from_numpy(masks.words))
        stage = self._stage(len(followers))
        masks = self._grammars.masks(followers, stage.words[: len(followers)].numpy())
        (rows,) = upload(self._device, masks.rows)
        return TokenMasks(rows, stage.upload(len(followers), self._device))

    def _stage(self, num_rows: int) -> _Stage:
        """Memory that nothing reads any more."""
        stage = self._stages.popleft() if len(self._stages) == _NUM_STAGES else None
        if stage is None or len(stage.words) < num_rows:
            # A power of two, so that a batch that grows does not want another with each row.
            stage = _Stage(1 << (num_rows - 1).bit_length(), self._grammars.num_words)
        self._stages.append(stage)
        stage.wait()
        return stage

    def follow(self, slots: I64, token_ids: Tensor) -> dict[int, str]:
        """Take note of the tokens i64[rows] that were launched for `slots`. Returns the slots whose sequence cannot go
        on, and why: these do not count.
        """
        followers = self._grammars.of(slots)
        if not followers:
            return {}
        arrived = None
        if self._device.type == "cuda":
            landing = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            token_ids = landing.copy_(token_ids, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._coming.append(_Coming(followers, token_ids, arrived))
        return {int(slots[row]): why for row, follower in followers if (why := follower.failure())}
