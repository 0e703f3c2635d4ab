"""Kernels with the Triton of the oldest torch that workers may have (2.11)."""

import os
import subprocess
import sys
from pathlib import Path

from environments import python_with

TIMEOUT_S = 1800


def test_what_is_compiled_for_a_card_is_compiled_by_the_oldest_triton_too(tmp_path: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = python_with("triton").parents[1] / "lib" / version / "site-packages"
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(folder), "-k", "hopper"]
    environ = {**os.environ, "PYTHONPATH": str(packages), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environ.pop("PYTEST_ADDOPTS", None)
    command += [f"--basetemp={tmp_path / 'tests'}"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    told = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"], env=environ, capture_output=True, check=True
    )
    assert told.stdout.strip() == b"3.6.0"
