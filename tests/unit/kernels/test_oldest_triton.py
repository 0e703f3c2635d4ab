"""Kernels with the Triton of the oldest torch that workers may have (2.11)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from environments import python_with

FOLDER = Path(__file__).parent
COMPILES = re.compile(r"^def test_\w*hopper", re.MULTILINE)
# A process for each file: a machine that has others to serve compiles the kernels of all of them for half an hour.
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("test_*.py") if COMPILES.search(path.read_text()))
assert FILES, "no test compiles a kernel"


@pytest.fixture
def oldest() -> dict[str, str]:
    """The environment of a process that imports Triton 3.6, which keeps what it compiles where Triton always does.

    A second run of the tests compiles what has changed: entries are named by Triton's version and a kernel's source.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = python_with("triton").parents[1] / "lib" / version / "site-packages"
    environ = {**os.environ, "PYTHONPATH": str(packages)}
    environ.pop("PYTEST_ADDOPTS", None)
    told = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"], env=environ, capture_output=True, check=True
    )
    assert told.stdout.strip() == b"3.6.0"
    return environ


@pytest.mark.parametrize("file", FILES)
def test_what_is_compiled_for_a_card_is_compiled_by_the_oldest_triton_too(
    file: str, oldest: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(FOLDER / file)]
    # Of what a tuner would measure, it leaves out what cannot be compiled.
    command += ["-k", "hopper and not tuner", f"--basetemp={tmp_path / 'tests'}"]
    done = subprocess.run(command, env=oldest, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
