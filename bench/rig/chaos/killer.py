"""What happens to the processes: kill -9, pauses and orders to end, drawn from a seed.

A process is hit while its siblings are up, the server while everybody is: how long a pipeline stands still that lacks
all processes of a kind says how long these take to start.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.rig.chaos.append_only import AppendOnlyFile
from bench.rig.chaos.pipeline import KINDS, SERVER, ServedPipeline

SHARES = {"killed": 0.6, "paused": 0.3, "ended": 0.3, "cut": 0.6}  # of each way, beside the others that are wanted
_SERVER_HOWS = ("killed", "cut")  # a paused server says nothing about the pipeline that a dead one does not
PAUSE_S = (0.2, 6.0)
CUT_S = (0.3, 1.5)  # of its last writes that a server loses
_UNLUCKY_S = 0.2  # until it is looked again


@dataclass(frozen=True)
class Blow:
    """What one process suffered, and when."""

    kind: str  # of process
    name: str
    how: str  # killed; paused; ended: told to drain; cut: the server, killed and without its last writes
    at_s: float  # monotonic


class Killer:
    """Hits processes of some kinds one after the other; pauses run beside further blows."""

    def __init__(
        self,
        pipeline: ServedPipeline,
        *,
        kinds: Sequence[str],
        hows: Sequence[str],
        replicas: int,
        every_s: float,
        seed: int,
    ) -> None:
        """`every_s` is the mean time between two blows, `hows` are keys of `SHARES`."""
        self.blows: list[Blow] = []
        self._pipeline = pipeline
        self._kinds = kinds
        self._hows = hows
        self._replicas = replicas
        self._every_s = every_s
        self._rng = random.Random(seed)
        self._deck: list[str] = []  # the kinds that are still to be hit before one is hit again
        self._file = AppendOnlyFile(pipeline.data_dir)
        self._paused: dict[int, asyncio.Task[None]] = {}
        self._gone: set[tuple[str, int]] = set()  # with its name: numbers of processes come again

    async def run(self, num_kills: int, seconds: float) -> None:
        """Until so many processes had to be started again or so much time has passed; then none is paused any more."""
        end_s = time.monotonic() + seconds
        watching = asyncio.create_task(self._file.watch())
        try:
            while len(self._gone) < num_kills and time.monotonic() < end_s:
                await asyncio.sleep(self._rng.uniform(0.2, 1.8) * self._every_s)
                await self._strike()
        finally:
            watching.cancel()
            await asyncio.gather(*self._paused.values())

    async def _strike(self) -> None:
        if not self._deck:
            self._deck = self._rng.sample(self._kinds, len(self._kinds))
        kind = self._deck.pop()
        name = SERVER if kind == SERVER else f"{kind}-{self._rng.randrange(self._replicas)}"
        hows = [each for each in self._hows if kind != SERVER or each in _SERVER_HOWS]
        hows = [each for each in hows if kind == SERVER or each != "cut"] or ["killed"]
        how = self._rng.choices(hows, [SHARES[each] for each in hows])[0]
        pause_s, cut_s = self._rng.uniform(*PAUSE_S), self._rng.uniform(*CUT_S)
        while not self._is_whole(kind):
            await asyncio.sleep(_UNLUCKY_S)
        pid = self._pipeline.pids()[name]
        self.blows.append(Blow(kind, name, how, time.monotonic()))
        if how == "paused":
            self._paused[pid] = asyncio.create_task(self._pause(pid, pause_s))
        elif how == "cut":
            self._gone.add((name, pid))
            self._file.lose(pid, cut_s)
        else:
            self._gone.add((name, pid))
            os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGTERM)

    def _is_whole(self, kind: str) -> bool:
        """Whether all processes of a kind are up; of all kinds, if it is the server's turn."""
        pids, ready = self._pipeline.pids(), self._pipeline.ready()
        kinds = KINDS if kind == SERVER else (kind,)
        wanted = {f"{each}-{index}" for each in kinds for index in range(self._replicas)}
        gone = self._gone | {(name, pid) for name, pid in pids.items() if pid in self._paused or not _runs(pid)}
        return wanted <= ready and not any((name, pids[name]) in gone for name in (*wanted, SERVER))

    async def _pause(self, pid: int, pause_s: float) -> None:
        try:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(pause_s)
        finally:
            with contextlib.suppress(ProcessLookupError):  # its supervisor did not wait for it
                os.kill(pid, signal.SIGCONT)
            del self._paused[pid]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
