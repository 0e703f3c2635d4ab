"""A process that stands still does so with all that it started, and goes on."""

import signal
import subprocess
import sys

import pytest
from standstills import stand_still

from bench.rig.process_tree import family

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")


def state_of(pid: int) -> str:
    return family(pid)[0].state


def wait_until_stopped(*pids: int) -> None:
    while not all(state_of(pid) == "T" for pid in pids):
        pass


def test_a_process_and_what_it_started_stop_and_go_on() -> None:
    script = "import subprocess; child = subprocess.Popen(['cat']); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        states: list[str] = []

        def look(seconds: float) -> None:
            assert seconds == 2.5
            wait_until_stopped(parent.pid, child)
            states.extend(state_of(pid) for pid in (parent.pid, child))

        stand_still(parent.pid, 2.5, look)
        assert states == ["T", "T"]
        parent.stdin.close()  # which ends the child, and that its parent, if both go on
        assert parent.wait(300) == 0


def test_what_a_test_has_stopped_stays_so() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until_stopped(process.pid)
        stand_still(process.pid, 0.0)
        assert state_of(process.pid) == "T"
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(300) == 0
