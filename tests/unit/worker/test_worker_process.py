"""The process of a worker, as far as it is more than the service in it."""

import subprocess
import sys

LIMIT_S = 300.0
# What a library of a device that hangs does when the interpreter ends; and a service that has failed.
SCRIPT = """
import atexit, time
from servicekit import lifecycle
from worker_svc.__main__ import main
atexit.register(time.sleep, 3600)
lifecycle.serve = lambda *_: lifecycle.EXIT_FAILED
print("told", end="")
main(["--runner=simulated", "--model=none"])
"""


def test_a_worker_that_has_failed_waits_for_nothing_that_its_device_s_libraries_wait_for() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], check=False, timeout=LIMIT_S, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout) == (1, b"told")
