"""Environments of packages that are not Penstock's, each of its own."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

CLIENTS = Path(__file__).parents[1] / "clients"
_ENVIRONMENTS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests" / "clients"
_INSTALL_TIMEOUT_S = 1200.0


def python_with(package: str) -> Path:
    """The interpreter of an environment with what `tests/clients/{package}.txt` pins; made once for all checkouts."""
    requirements = CLIENTS / f"{package}.txt"
    interpreter = f"{sys.version} {sys.base_prefix}"  # which the environment's is a link to
    digest = hashlib.sha256(requirements.read_bytes() + interpreter.encode()).hexdigest()[:12]
    folder = _ENVIRONMENTS / f"{package}-{digest}"
    python, stamp = folder / "bin" / "python", folder / "installed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not stamp.exists():
            # This environment's pip installs into it: one of its own would take as long to make as a small package.
            subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
            command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
            command += ["--disable-pip-version-check", "--no-compile", "--no-deps", "-r", str(requirements)]
            installed = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
            if installed.returncode:
                pytest.skip(f"{package} cannot be installed here: {installed.stderr[-500:]}")
            stamp.touch()
    return python
