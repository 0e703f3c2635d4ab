"""A short round of `penstock bench chaos`: every kind of process is hit while clients are served."""

import re
import subprocess
import sys

import pytest
from served import ROOT

from servicekit.shape import PROTOCOL

EARLIER = "9677358"  # the oldest revision that shares a pool with this one
OTHER_PROTOCOL = "25bb9c7"

ROUND = ("--seed=11", "--kills=5", "--every-s=1.2", "--clients=6", "--recipes=20", "--replicas=2")

KINDS = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")


def knows(revision: str) -> bool:
    """The history of this checkout has it."""
    return not subprocess.run(["git", "cat-file", "-e", f"{revision}^{{commit}}"], cwd=ROOT, check=False).returncode


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
    table = chaos(*ROUND, "--traces")
    for kind in KINDS:
        assert f"\n{kind:11}  " in table


def test_other_faults_cost_nothing_either() -> None:
    hows = "--hows=slow,silent,bombed,readonly"
    kinds = "--kinds=gateway,tokenizer,scheduler,worker,detokenizer,upgrade,server"
    table = chaos("--seed=880", "--kills=3", "--every-s=1.5", "--recipes=16", "--max-streams=3", hows, kinds)
    assert re.search(r"[1-9]\d* times 429 for [1-9]", table)
    assert re.search(r"[1-9]\d* streams of the first model, [1-9]\d* of the second", table)
    assert re.search(r"foreign connections were told [1-9]\d* times 408, [1-9]\d* times 431; 0 wrongly", table)
    for how in ("slow", "silent", "bombed", "readonly"):
        assert f"  {how:11}  " in table


def test_two_pools_behind_the_same_gateways_lose_nothing_and_one_does_not_notice_that_the_other_is_away() -> None:
    kinds = "--kinds=gateway,worker,detokenizer,server"
    table = bench("chaos", "--pools=2", "--seed=5", "--kills=4", "--recipes=16", "--clients=8", kinds)
    assert table.count("lost 0  repeated 0  changed 0  leaked 0") == 2
    assert re.search(r"[1-9]\d* streams while the other server was away; 0 had an error", table)


def test_an_upgrade_and_its_roll_back_are_not_seen_by_any_client() -> None:
    revision = EARLIER if knows(EARLIER) else "HEAD"
    table = chaos("--rolling", "--from", revision, "--clients=4", "--recipes=8")
    for kind in KINDS:
        for how in ("upgraded", "rolled back"):
            assert re.search(rf"\n{kind:11}  {how:11} +2  ", table)


@pytest.mark.skipif(not knows(OTHER_PROTOCOL), reason="the history of this checkout does not go back so far")
def test_a_revision_that_cannot_share_a_pool_is_refused() -> None:
    command = [sys.executable, "-m", "penstock.cli", "bench", "chaos", "--rolling", "--from", OTHER_PROTOCOL]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert f"{OTHER_PROTOCOL} speaks no protocol, this checkout protocol {PROTOCOL}" in ended.stderr


def test_a_real_model_in_half_precision_goes_on_with_what_it_might_have_said() -> None:
    load = ("--clients=2", "--tokens=40", "--kills=1", "--every-s=0.5", "--workers=2")
    table = bench("continuation", "--device=cpu", *load, "--", "--num-threads=1")
    assert "1 workers killed" in table
    assert "lost 0, changed 0, after a death and off by more than 0.75: 0 tokens" in table
