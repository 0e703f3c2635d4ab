"""Before anything imports Triton, NumPy or torch: what they read from the environment. And what is told at the end."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from late_waits import delay_waits
from standstills import begin

# Without a GPU, Triton's kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Threads of one small product wait for each other, spinning: beside other processes of tests, that is most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No machine is too slow for a test: an example may take as long as it takes, and so may drawing it.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Tests for which a machine may lack something, and what that is.
_ON = {
    "tests/deploy/test_cluster.py": "on a Kubernetes control plane",
    "tests/deploy/test_chart.py": "of what helm renders",
    "tests/deploy/test_valkey_failover.py": "of Valkey's failover",
    "tests/deploy/test_streams_through_failover.py": "of streams through Valkey's failover",
    "tests/deploy/test_valkey_tls.py": "of Valkey's failover over TLS",
    "tests/deploy/test_pods_run.py": "of the chart's pods as processes",
    "tests/deploy/test_prometheus_rules.py": "of rules by promtool",
    "tests/e2e/test_prometheus.py": "with a real Prometheus",
    "tests/e2e/test_foreign_clients.py": "of other client packages",
    "tests/e2e/test_agent_packages.py": "of packages for agents",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--late", type=float, metavar="SECONDS", help="let each wait for an event end so much later")
    parser.addoption("--still", type=float, metavar="SECONDS", help="let what runs tests stand still now and then")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Lets this process stand still, if that is asked for and it is one that runs tests."""
    seconds, config = session.config.getoption("--still"), session.config
    if seconds is not None and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        begin(seconds)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Makes waits late, if that is asked for: every module of tests and their helpers is there now."""
    seconds = session.config.getoption("--late")
    if seconds is not None:
        folder = str(Path(__file__).parent)
        delay_waits([each for each in sys.modules.values() if (_file(each) or "").startswith(folder)], seconds)


def _file(module: object) -> str | None:
    return getattr(module, "__file__", None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many of those ran: skipped ones are easily overlooked."""
    for path, what in _ON.items():
        ran, skipped = (
            sum(each.nodeid.startswith(path) for each in terminalreporter.stats.get(outcome, ()) if wanted(each))
            for outcome, wanted in (("passed", _is_call), ("skipped", lambda _: True))
        )
        if ran or skipped:
            terminalreporter.write_line(f"{what}: {ran} tests passed, {skipped} skipped")


def _is_call(report: Any) -> bool:
    return bool(report.when == "call")
