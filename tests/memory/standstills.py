"""A process that stands still now and then with all that it started, as where a machine gives it no time (Linux)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from bench.rig.process_tree import family

_EVERY_S = 10.0  # from the end of one to the next
_begun: list[subprocess.Popen[bytes]] = []  # each ends with this process


def begin(seconds: float) -> None:
    """Let this process stand still for so many seconds now and then, until it ends."""
    command = [sys.executable, __file__, str(os.getpid()), str(seconds)]
    _begun.append(subprocess.Popen(command, start_new_session=True))


def stand_still(root: int, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Stop a process and all that it started, except this one and what is stopped already, for so many seconds."""
    stopped = [process.pid for process in family(root) if process.state != "T" and process.pid != os.getpid()]
    try:
        for pid in stopped:
            _send(pid, signal.SIGSTOP)
        sleep(seconds)
    finally:
        for pid in stopped:
            _send(pid, signal.SIGCONT)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _main(root: int, seconds: float) -> None:
    parent = os.getppid()
    while os.getppid() == parent:  # else it has ended
        time.sleep(_EVERY_S)
        stand_still(root, seconds)


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]))
