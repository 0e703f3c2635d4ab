"""Workers beside those of a pipeline, in its pool: they come and go as the bench says."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TextIO

from penstock.launcher.death_report import tell_dead
from penstock.launcher.layout import children, parse
from penstock.launcher.output import Output
from penstock.launcher.replica import Replica
from servicekit.bus import open_bus
from servicekit.bus.calls import SessionKind

UPGRADE = "upgrade"
SECOND_SEED = 7  # of the second model; the first one's is 0
READY_WITHIN_S = 300.0
_LOOK_S = 0.1
_DRAIN_S = 10.0


class Workers:
    """Runs workers as the launcher runs its own: who dies is started again."""

    def __init__(
        self, serve_flags: Sequence[str], url: str, count: int, log: TextIO, *, name: str = UPGRADE, seed: int
    ) -> None:
        """Nothing runs yet.

        Args:
            serve_flags: of `penstock serve`, of which the pipeline is.
            url: of the server, as the services of the pipeline know it.
            count: how many workers.
            log: takes what the launcher would say, and what they write.
            name: what they are called, with a number after it.
            seed: of their simulated model.
        """
        flags = [*serve_flags, f"--redis-url={url}", f"--workers={count}", f"--simulated-seed={seed}"]
        launch = parse(flags, {})
        workers = [child for child in children(launch, url) if child.kind is SessionKind.WORKER]
        output, bus = Output(stream=log), open_bus(url, launch.pool)
        self._replicas = [
            Replica(
                replace(worker, name=f"{name}-{index}"),
                output,
                launch.settings.max_restart_pause_s,
                partial(tell_dead, bus),
            )
            for index, worker in enumerate(workers)
        ]
        self._lives: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when all are ready.

        Raises:
            TimeoutError: they are not within two minutes.
        """
        self._lives = [asyncio.create_task(replica.run()) for replica in self._replicas]
        deadline_s = time.monotonic() + READY_WITHIN_S
        while not all(await asyncio.gather(*(replica.is_ready() for replica in self._replicas))):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the workers are not ready")
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """Lets them drain, and returns when they have ended."""
        await asyncio.gather(*(replica.stop(_DRAIN_S) for replica in self._replicas))
        await asyncio.gather(*self._lives)
