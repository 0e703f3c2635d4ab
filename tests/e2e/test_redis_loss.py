"""Redis dies under load, and comes back with all it acknowledged or without its last writes: no client notices more
than a pause."""

import subprocess
import sys

import pytest
from served import ROOT

ROUND = ("--kinds=server", "--every-s=2", "--clients=6", "--recipes=8", "--replicas=2", "--seed=2")


@pytest.mark.parametrize(("how", "times"), [("killed", 1), ("cut", 2)])
def test_no_request_fails_and_no_stream_changes(how: str, times: int) -> None:
    command = [sys.executable, "-m", "penstock.cli", "bench", "chaos", *ROUND, f"--hows={how}", f"--kills={times}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "lost 0  repeated 0  changed 0  leaked 0" in ended.stdout
    assert f"\nserver       {how:11}  {times:5}  " in ended.stdout
    assert "refused" not in ended.stdout
