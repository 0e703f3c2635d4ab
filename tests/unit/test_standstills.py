"""A process that stands still does so with all that it started, and goes on."""

import subprocess
import sys
from pathlib import Path

import pytest
from standstills import stand_still

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]


def test_a_process_and_what_it_started_stop_and_go_on() -> None:
    script = "import subprocess; child = subprocess.Popen(['cat']); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        states: list[str] = []

        def look(seconds: float) -> None:
            assert seconds == 2.5
            while not all(state_of(pid) == "T" for pid in (parent.pid, child)):
                pass
            states.extend(state_of(pid) for pid in (parent.pid, child))

        stand_still(parent.pid, 2.5, look)
        assert states == ["T", "T"]
        parent.stdin.close()  # which ends the child, and that its parent, if both go on
        assert parent.wait(300) == 0
