"""A short round of `penstock bench chaos`: every kind of process is hit while clients are served."""

import subprocess
import sys

from served import ROOT

ROUND = ("--seed=11", "--kills=5", "--every-s=1.2", "--clients=6", "--recipes=16", "--replicas=2")


def test_nothing_is_lost_repeated_changed_or_leaked_when_processes_die() -> None:
    command = [sys.executable, "-m", "penstock.cli", "bench", "chaos", *ROUND, "--", "--session-ttl-s=1.5"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "lost 0  repeated 0  changed 0  leaked 0" in ended.stdout
    for kind in ("gateway", "tokenizer", "scheduler", "worker", "detokenizer"):
        assert f"\n{kind:11}  " in ended.stdout
