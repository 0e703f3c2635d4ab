"""The machine that a figure was measured on: without it a figure means nothing."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from contract.domain.errors import PenstockError
from penstock import __version__
from servicekit.bus.embedded import find_server

_PACKAGES = ("numpy", "hiredis", "protobuf", "tokenizers", "uvicorn", "uvloop")


def describe_machine() -> str:
    """Lines that name the machine, the versions and the command."""
    packages = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    command = " ".join([_program(), *sys.argv[1:]])
    return "\n".join(
        (
            f"machine   {num_cores()} cores, {_cpu_model()}, {platform.system()} {_kernel()}",
            f"versions  Penstock {__version__}, Python {platform.python_version()}, {_server()}, {packages}",
            f"command   {command}",
        )
    )


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _program() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name}" if spec else sys.argv[0]


def _kernel() -> str:
    """Its number: what stands after that names whose build it is."""
    return platform.release().partition("-")[0]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _server() -> str:
    try:
        shown = subprocess.run([find_server(), "--version"], capture_output=True, text=True, check=True).stdout
    except (PenstockError, OSError, subprocess.CalledProcessError):
        return "no server"
    # Both write NAME server v=NUMBER and more.
    name, _, number = shown.partition(" server v=")
    return f"{name} {number.split()[0]}" if number else shown.strip()
