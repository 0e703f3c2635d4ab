"""The plans that a worker carries out: those of the present epoch, each once, in order."""

from enum import Enum


class PlanVerdict(Enum):
    """The verdict on a plan."""

    START = "start"  # the first of a new epoch
    RUN = "run"  # the next of the present one
    DROP = "drop"  # seen before, or meant for another incarnation
    GAP = "gap"  # plans are missing before it: the epoch is over


class EpochTracker:
    """An epoch is one pairing of a scheduler session and this worker's incarnation; a plan with step 1 begins one.

    Decided from the order of the stream alone. So ranks that follow rank 0, which do not know when it draws another
    incarnation (`incarnation` None), decide alike: to them an incarnation whose epoch ended badly is over for good.
    """

    def __init__(self, incarnation: bytes | None) -> None:
        self._incarnation = incarnation
        self._over: set[bytes] = set()
        self._epoch: tuple[bytes, bytes] | None = None  # session, incarnation
        self._step = 0

    @property
    def step(self) -> int:
        """The last step of the present epoch; 0: none yet."""
        return self._step

    def admit(self, session: bytes, incarnation: bytes, step: int) -> PlanVerdict:
        """Take note of the next plan in the stream and say what to do with it."""
        if incarnation in self._over or (self._incarnation is not None and incarnation != self._incarnation):
            return PlanVerdict.DROP
        # A repeated first plan begins again from empty slots, which does no harm; a later one may not be run twice.
        if step == 1:
            self._epoch, self._step = (session, incarnation), 1
            return PlanVerdict.START
        if self._epoch == (session, incarnation):
            if step <= self._step:
                return PlanVerdict.DROP
            if step == self._step + 1:
                self._step = step
                return PlanVerdict.RUN
        self._over.add(incarnation)
        self._epoch, self._step = None, 0
        return PlanVerdict.GAP

    def end(self, incarnation: bytes | None = None) -> None:
        """The epoch ended badly: nothing more of `incarnation` (None: the present epoch's) is carried out. One of
        another incarnation that has begun since goes on.
        """
        present = self._epoch[1] if self._epoch is not None else None
        over = present if incarnation is None else incarnation
        if over is not None:
            self._over.add(over)
        if over == present:
            self._epoch, self._step = None, 0
