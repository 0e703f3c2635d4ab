"""`penstock bench serve`, `throughput` and `latency` as people call them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from served import ROOT, Served

from penstock.launcher.layout import BUNDLED_MODEL

TIMEOUT_S = 600


def bench(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock.cli", "bench", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_server_is_measured_and_every_request_is_told(bundled: Served, tmp_path: Path, endpoint: str) -> None:
    path = tmp_path / "result.json"
    flags = ["--num-prompts=12", "--random-input-len=40", "--random-output-len=9", "--ignore-eos", "--request-rate=50"]
    flags += [f"--endpoint={endpoint}", "--goodput", "ttft:1e9", "e2el:1e9", f"--save-result={path}"]
    ended = bench("serve", f"--base-url={bundled.http_url}", *flags)
    assert ended.returncode == 0, ended.stderr
    assert "Successful requests" in ended.stdout
    found = json.loads(path.read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (12, 0, 12 * 9)
    assert found["output_lens"] == [9] * 12
    assert 0 < found["p50_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    assert found["request_goodput"] == found["request_throughput"]
    assert (found["model"], "api_key" in found) == (bundled.model, False)


def test_a_request_that_fails_is_counted_and_said(bundled: Served) -> None:
    flags = ("--num-prompts=2", "--random-input-len=20", "--num-warmups=0", '--extra-body={"temperature": -1}')
    ended = bench("serve", f"--base-url={bundled.http_url}", *flags)
    assert ended.returncode == 1
    assert "failed: HTTP 400" in ended.stderr
    assert "temperature" in ended.stderr


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    ended = bench("serve", "--base-url=http://127.0.0.1:9")
    assert (ended.returncode, ended.stderr.count("\n"), "Traceback" in ended.stderr) == (2, 1, False)
    assert "http://127.0.0.1:9/v1/models does not answer" in ended.stderr


def test_the_engine_is_measured_in_this_process(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = (f"--model={BUNDLED_MODEL}", "--num-blocks=200", "--num-threads=1", f"--output-json={path}")
    lengths = ("--num-prompts=3", "--random-input-len=20", "--random-output-len=5")
    ended = bench("throughput", *flags, *lengths)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(path.read_text())
    assert (found["num_requests"], found["total_output_tokens"]) == (3, 15)
    sizes = ("--batch-size=2", "--output-len=3", "--num-iters=2", "--num-iters-warmup=1")
    ended = bench("latency", *flags, *sizes)
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(path.read_text())["latencies"]) == 2


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    ended = bench("serve", "--base-url=http://127.0.0.1:9", f"--plot={tmp_path}/nowhere/plot.png")
    assert ended.returncode == 2
    assert "--plot" in ended.stderr
