"""A short round of `penstock bench scale-to-zero`: no worker is there, and nobody's request is lost by that."""

import subprocess
import sys

from served import ROOT


def test_requests_wait_for_a_worker_and_streams_outlive_the_last_one() -> None:
    flags = ("--streams=10", "--tokens=1000", "--step-ms=20", "--away-s=3")
    command = [sys.executable, "-m", "penstock.cli", "bench", "scale-to-zero", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    # How soon the query says so depends on the machine; all else does not.
    assert "10 requests waited" in ended.stdout, ended.stdout + ended.stderr
    assert "; 0 ended wrongly" in ended.stdout
    assert "10 streams ran when the last worker went for 3 s" in ended.stdout
    assert "lost 0  repeated 0  changed 0" in ended.stdout, ended.stdout
