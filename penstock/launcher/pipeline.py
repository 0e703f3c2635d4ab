"""The pipeline of one machine: the server for the bus, the replicas, and the order in which they come and go."""

import asyncio
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from penstock.launcher.death_report import tell_dead
from penstock.launcher.layout import KINDS, Child, Launch, children, hold_ports
from penstock.launcher.metrics import open_endpoint
from penstock.launcher.output import Output
from penstock.launcher.replica import Replica
from servicekit.bus import open_bus
from servicekit.bus.embedded import EmbeddedServer
from servicekit.kubernetes import ignored_line, injected
from servicekit.settings import PREFIX
from servicekit.tokens import write_token

PROBE_INTERVAL_S = 0.2
TOKEN_BYTES = 32  # of randomness in a control token
REMIND_INTERVAL_S = 10.0


class Pipeline:
    """Runs what a `Launch` asks for until SIGTERM or SIGINT; a second signal kills everything."""

    def __init__(self, launch: Launch, output: Output, on_ready: Callable[[list[Child]], None]) -> None:
        """`on_ready` is called once, when all services are."""
        self._launch = launch
        self._output = output
        self._on_ready = on_ready
        self._replicas: list[Replica] = []
        self._server: EmbeddedServer | None = None
        self._stopping = asyncio.Event()
        self._exit_status = 0
        self.is_ready = False  # all services were, once
        self.is_alive = True

    async def run(self) -> int:
        """Starts everything, serves, and stops everything in order; the exit status.

        Raises:
            PenstockError: something cannot start; what had started is stopped by then.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        with ExitStack() as stack:
            url = self._launch.redis_url or self._start_server(stack)
            made = children(self._launch, url, self._make_token(stack))
            stack.enter_context(hold_ports(made))
            bus, pause_s = open_bus(url, self._launch.pool), self._launch.settings.max_restart_pause_s
            self._replicas = [Replica(child, self._output, pause_s, partial(tell_dead, bus)) for child in made]
            if port := self._launch.settings.metrics_port:
                address = f"{self._launch.settings.host}:{port}"
                stack.callback(open_endpoint(address, made, self, self._launch.metrics).close)
            lives = [asyncio.create_task(replica.run()) for replica in self._replicas]
            lives.append(asyncio.create_task(self._keep_server()))
            announcer = asyncio.create_task(self._announce(made))
            try:
                await self._until_stopped([*lives, announcer])
            finally:
                self._stopping.set()
                announcer.cancel()
                await self._stop()
                await asyncio.gather(*lives, announcer, return_exceptions=True)
        return self._exit_status

    def _make_token(self, stack: ExitStack) -> Path | None:
        """The file of a control token: where callers need keys, who controls needs one, given or not."""
        if not self._launch.has_keys or self._launch.control_token_file is not None:
            return None
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-control-"))) / "token"
        write_token(path, secrets.token_urlsafe(TOKEN_BYTES))
        return path

    def _start_server(self, stack: ExitStack) -> str:
        data_dir = self._launch.settings.data_dir
        if data_dir is None:
            # A short path: the name of a Unix socket is bounded.
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        self._server = EmbeddedServer(data_dir)
        stack.callback(self._server.close)
        self._server.start()
        self._output.say(f"server started (pid {self._server.pid}) at {self._server.url}")
        return self._server.url

    async def _keep_server(self) -> None:
        """Starts the server again when it died; the services wait for it meanwhile."""
        while self._server is not None and not self._stopping.is_set():
            if (status := self._server.exit_code()) is not None:
                self._output.say(f"server died (status {status}): starting it again")
                self._server.start()
                self._output.say(f"server started (pid {self._server.pid}) at {self._server.url}")
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _announce(self, made: list[Child]) -> None:
        """Waits until all replicas are ready, and says so, or whom it waits for."""
        waiting, began_s, said_s = list(self._replicas), time.monotonic(), time.monotonic()
        while waiting:
            ready = await asyncio.gather(*(replica.is_ready() for replica in waiting))
            waiting = [replica for replica, is_ready in zip(waiting, ready, strict=True) if not is_ready]
            now_s = time.monotonic()
            if waiting and now_s - said_s > REMIND_INTERVAL_S:
                said_s = now_s
                names = ", ".join(replica.child.name for replica in waiting)
                self._output.say(f"waiting for {names} since {now_s - began_s:.0f} s")
            if waiting:
                await asyncio.sleep(PROBE_INTERVAL_S)
        self.is_ready = True
        self._on_ready(made)

    async def _until_stopped(self, tasks: list[asyncio.Task[None]]) -> None:
        """Until somebody asks to stop, or one of the tasks fails: raises its error."""
        stop: asyncio.Task[Any] = asyncio.create_task(self._stopping.wait())
        pending: set[asyncio.Task[Any]] = {stop, *tasks}
        while not stop.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _stop(self) -> None:
        for kind in KINDS:
            await asyncio.gather(
                *(r.stop(self._launch.drain_timeout_s) for r in self._replicas if r.child.kind is kind)
            )

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stopping.is_set():
            self._output.say("stopping: a second signal kills")
            self._stopping.set()
            return
        self._output.say("killing")
        self._exit_status = 128 + number
        for replica in self._replicas:
            replica.kill()


def run(launch: Launch, on_ready: Callable[[list[Child]], None]) -> int:
    """As `Pipeline.run`, from outside of an event loop.

    Raises:
        PenstockError: something cannot start.
    """
    output = Output(prefixed=launch.log_format != "json")
    if names := injected(os.environ, PREFIX):
        output.say(ignored_line(names))
    status = asyncio.run(Pipeline(launch, output, on_ready).run())
    output.say("stopped")
    return status
