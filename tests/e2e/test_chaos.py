"""A short round of `penstock bench chaos`: every kind of process is hit while clients are served."""

import subprocess
import sys

from served import ROOT

ROUND = ("--seed=11", "--kills=5", "--every-s=1.2", "--clients=6", "--recipes=16", "--replicas=2")


KINDS = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")


def bench(*words: str) -> str:
    """What a round prints that went well."""
    command = [sys.executable, "-m", "penstock.cli", "bench", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def chaos(*flags: str) -> str:
    """The table of a round that went well."""
    table = bench("chaos", *flags)
    assert "lost 0  repeated 0  changed 0  leaked 0" in table
    return table


def test_nothing_is_lost_repeated_changed_or_leaked_when_processes_die() -> None:
    table = chaos(*ROUND)
    for kind in KINDS:
        assert f"\n{kind:11}  " in table


def test_a_rolling_restart_is_not_seen_by_any_client() -> None:
    table = chaos("--rolling", "--clients=4", "--recipes=8")
    for kind in KINDS:
        assert f"\n{kind:11}  rolled      2  " in table


def test_a_real_model_in_half_precision_goes_on_with_what_it_might_have_said() -> None:
    load = ("--clients=2", "--tokens=40", "--kills=1", "--every-s=0.5", "--workers=2")
    table = bench("continuation", "--device=cpu", *load, "--", "--num-threads=1")
    assert "1 workers killed" in table
    assert "lost 0, changed 0, behind a death and off by more than 0.75: 0 tokens" in table
