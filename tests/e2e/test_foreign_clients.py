"""Packages that people call an OpenAI server with, each in an environment of its own, as they come."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from served import ROOT, Served

from penstock.launcher.layout import BUNDLED_MODEL

CLIENTS = ROOT / "tests" / "clients"
ENVIRONMENTS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests" / "clients"
INSTALL_TIMEOUT_S = CALLS_TIMEOUT_S = 1200.0
# litellm looks for newer prices of models on the network otherwise.
ENVIRON = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
    "PYTHONPATH": "",
    "PYTHONDONTWRITEBYTECODE": "",  # nothing is compiled as it is installed, but what is imported, once
}


def python_with(package: str) -> Path:
    """The interpreter of an environment with what `tests/clients/{package}.txt` pins; made once for all checkouts."""
    requirements = CLIENTS / f"{package}.txt"
    interpreter = f"{sys.version} {sys.base_prefix}"  # which the environment's is a link to
    digest = hashlib.sha256(requirements.read_bytes() + interpreter.encode()).hexdigest()[:12]
    folder = ENVIRONMENTS / f"{package}-{digest}"
    python, stamp = folder / "bin" / "python", folder / "installed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not stamp.exists():
            # This environment's pip installs into it: one of its own would take as long to make as a small package.
            subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
            command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
            command += ["--disable-pip-version-check", "--no-compile", "--no-deps", "-r", str(requirements)]
            installed = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
            if installed.returncode:
                pytest.skip(f"{package} cannot be installed here: {installed.stderr[-500:]}")
            stamp.touch()
    return python


@pytest.mark.parametrize(
    ("package", "calls"), [("litellm", "litellm_calls.py"), ("langchain-openai", "langchain_calls.py")]
)
def test_a_package_works_as_it_comes(simulated: Served, package: str, calls: str) -> None:
    call(package, calls, f"{simulated.http_url}/v1", "simulated")


@pytest.mark.parametrize(
    ("package", "calls", "path"),
    [("anthropic", "anthropic_calls.py", ""), ("openai-agents", "agents_calls.py", "/v1")],
)
def test_a_package_for_agents_works_as_it_comes(agents: Served, package: str, calls: str, path: str) -> None:
    call(package, calls, f"{agents.http_urls[1]}{path}", "simulated")


@pytest.mark.parametrize(("package", "calls"), [("guidellm", "guidellm_calls.py"), ("aiperf", "aiperf_calls.py")])
def test_a_benchmark_of_servers_counts_what_the_server_says(bundled: Served, package: str, calls: str) -> None:
    call(package, calls, f"{bundled.http_url}/v1", bundled.model, str(BUNDLED_MODEL))


def call(package: str, calls: str, *words: str) -> None:
    """Runs what is in a file of calls in the environment of a package."""
    ended = subprocess.run(
        [str(python_with(package)), str(CLIENTS / calls), *words],
        env=os.environ | ENVIRON,
        capture_output=True,
        text=True,
        timeout=CALLS_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
