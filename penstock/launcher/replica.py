"""One child process: started, listened to, restarted when it dies, stopped."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable

from contract.domain.errors import ErrorCode, PenstockError
from penstock.launcher.layout import Child, python_command
from penstock.launcher.output import Output
from servicekit.kubernetes import injected
from servicekit.settings import PREFIX, split_address

CANNOT_START = 2  # a service's exit status that no restart will change
MAX_FIRST_TRIES = 5
FIRST_PAUSE_S = 0.5
HEALTHY_AFTER_S = 30.0  # having lived so long, a death is an accident and no pattern
PROBE_INTERVAL_S = 2.0  # between two questions whether a child makes progress
ANSWER_S = 1.0  # for which its answer is waited for
STILL_S = 2.0  # a question that took so much longer than it may was asked by a process that stood still
MAX_VAIN_QUESTIONS = 3  # in a row, after which it hangs, too: within 10 s
KILL_AFTER_S = 10.0  # beyond the service's own drain timeout
_CHUNK_BYTES = 64 * 1024
_MAX_LINE_BYTES = 1024 * 1024


class Replica:
    """Runs one child until told to stop."""

    def __init__(
        self, child: Child, output: Output, max_pause_s: float, mourn: Callable[[Child], Awaitable[None]]
    ) -> None:
        """Nothing runs yet.

        Args:
            child: what to run.
            output: takes what it writes.
            max_pause_s: the longest wait before a restart; the first is half a second, then each is twice the last.
            mourn: told of each death before the next life begins.
        """
        self.child = child
        self._was_ever_ready = False  # in any of its lives: it can start
        self._is_up = False  # was ready in its present life, so that silence is no slow start any more
        self._output = output
        self._mourn = mourn
        self._first_pause_s, self._max_pause_s = min(FIRST_PAUSE_S, max_pause_s), max_pause_s
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        output.introduce(child.name)

    async def run(self) -> None:
        """Keeps the process alive; returns when it was stopped.

        Raises:
            PenstockError: INTERNAL: it cannot start; its last lines say why.
        """
        pause_s, deaths = self._first_pause_s, 0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            status = await self._live()
            if self._stopping.is_set():
                return
            deaths += 1
            if not self._was_ever_ready and (status == CANNOT_START or deaths >= MAX_FIRST_TRIES):
                raise PenstockError(
                    ErrorCode.INTERNAL, f"{self.child.name} cannot start ({_cause(status)}): its last lines say why"
                )
            if time.monotonic() - began_s > HEALTHY_AFTER_S:
                pause_s = self._first_pause_s
            self._output.say(f"{self.child.name} died ({_cause(status)}): starting it again in {pause_s:g} s")
            await self._mourn(self.child)
            try:
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            except TimeoutError:
                pause_s = min(2 * pause_s, self._max_pause_s)

    async def is_ready(self) -> bool:
        """Asks whether it takes new work."""
        ready = await self._ask("/ready") is True
        self._is_up |= ready
        self._was_ever_ready |= ready
        return ready

    async def _ask(self, path: str) -> bool | None:
        """The status beside its metrics, told from a thread of its own, so that one whose loops are stuck answers too.

        None: it says nothing.
        """
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_connection(*split_address(self.child.health_address))
                writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                words = (await reader.readline()).split()
        except (OSError, TimeoutError):
            return None
        finally:
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        return words[1] == b"200" if len(words) > 1 else None

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kills a process that makes no progress any more. One that has not been ready yet may take its time.

        In each of its lives: importing and loading take as long as they do, most of all from a cold disk. Questions
        during which this process stood still itself, suspended or without time, say nothing about the other.
        """
        num_vain = 0
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(PROBE_INTERVAL_S)
            is_alive = await self._ask("/health")
            if is_alive and not self._is_up:
                await self.is_ready()
            if is_alive or not self._is_up or self._stopping.is_set():
                num_vain = 0
                continue
            if time.monotonic() - began_s > PROBE_INTERVAL_S + ANSWER_S + STILL_S:
                continue
            num_vain += 1
            if is_alive is False or num_vain == MAX_VAIN_QUESTIONS:
                why = "it makes no progress" if is_alive is False else "it does not answer"
                self._output.say(f"{self.child.name} hangs, {why}: killing it")
                _kill_group(process.pid)
                return

    async def stop(self, drain_timeout_s: float) -> None:
        """Asks it to drain and waits until it has ended; kills it if that takes too long."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), drain_timeout_s + KILL_AFTER_S)
        except TimeoutError:
            self._output.say(f"{self.child.name} does not end: killing it")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """Ends it and what it started at once."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            _kill_group(self._process.pid)

    async def _live(self) -> int:
        """One life of the process; its exit status."""
        self._is_up = False
        ignored = injected(os.environ, PREFIX)  # the launcher has said so for all
        environ = {name: value for name, value in os.environ.items() if name not in ignored}
        environ |= {"PYTHONUNBUFFERED": "1", "PENSTOCK_REDIS_URL": self.child.redis_url}
        if self._output.colored:
            environ["FORCE_COLOR"] = "1"
        # A pipe of our own: asyncio's would let `wait` return only when whatever the process started has closed it too.
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *python_command(self.child),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                env=environ,
                # Ctrl-C in the terminal is the launcher's, which then stops its children in order.
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        self._output.say(f"{self.child.name} started (pid {self._process.pid})")
        if self._stopping.is_set():  # meanwhile
            self.kill()
        relaying = asyncio.create_task(self._relay(read_end))
        watching = asyncio.create_task(self._watch(self._process))
        status = await self._process.wait()
        watching.cancel()
        # What it started itself must not outlive it.
        _kill_group(self._process.pid)
        await relaying
        return status

    async def _relay(self, read_end: int) -> None:
        """Passes on lines until nobody holds the other end of the pipe."""
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", 0)
        )
        rest = b""
        while chunk := await stream.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._output.relay(self.child.name, line.decode(errors="replace").rstrip("\r"))
        if rest:
            self._output.relay(self.child.name, rest.decode(errors="replace"))
        transport.close()


def _kill_group(pid: int) -> None:
    """Ends a process and what it started. It may have ended already, and been waited for, before the loop has heard."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _cause(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
