"""Blows to the processes, drawn from a seed: kill -9, pauses, orders to end, half-open connections and others.

A process is hit while its siblings are up, the server while everybody is: how long a pipeline stands still that lacks
all processes of a kind says how long these take to start.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rig.chaos.append_only import AppendOnlyFile
from bench.rig.chaos.bombs import Replies, bomb
from bench.rig.chaos.pipeline import KINDS, SERVER, ServedPipeline

# Of each way, beside the others that are wanted.
SHARES = {
    "killed": 0.6,
    "paused": 0.3,
    "ended": 0.3,
    "slow": 0.3,
    "silent": 0.3,
    "bombed": 0.3,
    "cut": 0.6,
    "readonly": 0.6,
}
# A paused server says nothing about the pipeline that a dead one does not.
_SERVER_HOWS = ("killed", "cut", "readonly")
_HOWS_OF = {
    SERVER: _SERVER_HOWS,
    "gateway": ("killed", "paused", "ended", "slow", "silent", "bombed"),
}
_OTHER_HOWS = ("killed", "paused", "ended", "slow", "silent")
PAUSE_S = (0.2, 6.0)
SLOW_S = (4.0, 12.0)  # that a process does nothing after it was started again
READONLY_S = (0.3, 4.0)
CUT_S = (0.3, 1.5)  # of its last writes that a server loses
_UNLUCKY_S = 0.2  # until it is looked again
_LOOK_S = 0.02


@dataclass
class Blow:
    """A blow that one process suffered, and when."""

    kind: str  # of process
    name: str
    # killed; paused; ended: told to drain; slow: killed, and its next life begins with a pause; silent: its connections
    # to the server stay open, and nothing comes through them any more; bombed: by foreign connections; cut: the server,
    # killed and without its last writes; readonly: the server, demoted for a while.
    how: str
    at_s: float  # monotonic
    # When the process had died, if a signal killed it: on a busy machine its connections break some time after that.
    gone_s: float | None = None


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
        self.replies = Replies()  # of bombed gateways
        self._pipeline = pipeline
        self._kinds = kinds
        self._hows = hows
        self._replicas = replicas
        self._every_s = every_s
        self._rng = random.Random(seed)
        self._deck: list[str] = []  # the kinds that are still to be hit before one is hit again
        self._file = AppendOnlyFile(pipeline.data_dir)
        self._busy: dict[int, asyncio.Task[None]] = {}  # what is being done to processes
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
            await asyncio.gather(*self._busy.values())

    async def _strike(self) -> None:
        if not self._deck:
            self._deck = self._rng.sample(self._kinds, len(self._kinds))
        kind = self._deck.pop()
        name = SERVER if kind == SERVER else f"{kind}-{self._rng.randrange(self._replicas)}"
        hows = [each for each in self._hows if each in _HOWS_OF.get(kind, _OTHER_HOWS)] or ["killed"]
        how = self._rng.choices(hows, [SHARES[each] for each in hows])[0]
        limits_s = {"paused": PAUSE_S, "cut": CUT_S, "slow": SLOW_S, "readonly": READONLY_S}
        long_s = self._rng.uniform(*limits_s.get(how, PAUSE_S))
        while not self.is_whole(kind):
            await asyncio.sleep(_UNLUCKY_S)
        pid = self._pipeline.pids()[name]
        self.blows.append(blow := Blow(kind, name, how, time.monotonic()))
        if how == "silent":
            self._pipeline.proxy.go_silent(pid)
        elif how == "paused":
            self._do(pid, self._pause(pid, long_s))
        elif how == "readonly":
            self._do(pid, self._demote(long_s))
        elif how == "bombed":
            gateway = next(each for each in self._pipeline.gateways() if each.name == name)
            self._do(pid, bomb(gateway.http_url, name, self.replies))
        else:
            self._gone.add((name, pid))
            if how == "cut":
                self._file.lose(pid, long_s)
            elif how == "ended":
                os.kill(pid, signal.SIGTERM)
            else:
                os.kill(pid, signal.SIGKILL)
                self._do(pid, self._slow_down(blow, pid, long_s) if how == "slow" else self._see_it_go(blow, pid))

    def _do(self, pid: int, work: Coroutine[None, None, None]) -> None:
        """Works beside further blows, of which this process gets none meanwhile."""

        async def run() -> None:
            try:
                await work
            finally:
                del self._busy[pid]

        self._busy[pid] = asyncio.create_task(run())

    def is_whole(self, kind: str) -> bool:
        """Return whether all processes of a kind are up; of all kinds, if it is the server."""
        pids, ready = self._pipeline.pids(), self._pipeline.ready()
        kinds = {*KINDS, *self._kinds} - {SERVER} if kind == SERVER else {kind}
        wanted = {f"{each}-{index}" for each in kinds for index in range(self._replicas)}
        gone = self._gone | {(name, pid) for name, pid in pids.items() if pid in self._busy or not _runs(pid)}
        return wanted <= ready and not any((name, pids[name]) in gone for name in (*wanted, SERVER))

    async def _pause(self, pid: int, pause_s: float) -> None:
        try:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(pause_s)
        finally:
            with contextlib.suppress(ProcessLookupError):  # its supervisor did not wait for it
                os.kill(pid, signal.SIGCONT)

    async def _see_it_go(self, blow: Blow, pid: int) -> None:
        while not _is_dead(pid) and self._pipeline.pids()[blow.name] == pid:
            await asyncio.sleep(_LOOK_S)
        blow.gone_s = time.monotonic()

    async def _slow_down(self, blow: Blow, pid: int, pause_s: float) -> None:
        await self._see_it_go(blow, pid)
        while (started := self._pipeline.pids()[blow.name]) == pid:
            await asyncio.sleep(_LOOK_S)
        await self._pause(started, pause_s)

    async def _demote(self, seconds: float) -> None:
        """Makes the server a replica of one that cannot be reached: it keeps its data, and takes no writes."""
        server = self._pipeline.server()
        try:
            server.command("REPLICAOF", "127.0.0.1", "1")
            try:
                await asyncio.sleep(seconds)
            finally:
                server.command("REPLICAOF", "NO", "ONE")
        finally:
            server.close()


def _is_dead(pid: int) -> bool:
    """Return whether a process has ended, whether its parent knows it or not (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "XZ"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
