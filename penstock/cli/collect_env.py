"""`penstock collect-env`: what this machine has, for a report of something that does not work."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from contract.domain.errors import PenstockError
from penstock import __version__
from penstock.cli.arguments import no_arguments
from servicekit.bus.embedded import find_server
from servicekit.settings import PREFIX, num_cores

_TIMEOUT_S = 30.0
_GPU_FIELDS = "name,driver_version,memory.total,compute_cap"
_TORCH = (
    "import torch; print(torch.__version__, 'with CUDA', torch.version.cuda, 'and', torch.cuda.device_count(), 'GPUs')"
)
_NAME = re.compile(r"[\w.-]+")
_OTHERS = ("triton", "transformers", "openai")  # that come with others, or speak to this one


def main(argv: Sequence[str]) -> int:
    """Prints lines of a name and a value; no secret is among them. The exit status."""
    no_arguments("penstock collect-env", __doc__, argv)
    for name, value in _lines():
        print(f"{name:<14}{value}")
    return 0


def _lines() -> Iterator[tuple[str, str]]:
    yield "penstock", f"{__version__} in {Path(__file__).parents[2]}"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}{_libc()}"
    yield "processor", f"{_processor()}, {num_cores():g} cores for this process"
    yield "memory", _memory()
    yield "server", _server()
    for line in _said("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader").splitlines():
        yield "gpu", line
    yield "torch", _said(sys.executable, "-c", _TORCH).splitlines()[-1]
    names = sorted({*_required(), *_OTHERS}, key=str.lower)
    for name in names:
        yield "package", f"{name} {_version(name)}"
    # What a variable says may be a secret.
    for name in sorted(name for name in os.environ if name.startswith((PREFIX, "CUDA_", "NCCL_", "TRITON_", "HF_"))):
        yield "variable", f"{name} is set"


def _required() -> list[str]:
    """Names of the packages that this one needs or may have."""
    try:
        needed = requires("penstock") or []
    except PackageNotFoundError:  # it runs from a folder
        return []
    return [_NAME.findall(each)[0] for each in needed if "'dev'" not in each.replace('"', "'")]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


def _server() -> str:
    try:
        return f"{_said(str(find_server()), '--version').strip()}"
    except PenstockError as error:
        return error.message


def _said(*command: str) -> str:
    """The output of a program, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return f"{Path(command[0]).name} is not there"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{Path(command[0]).name}: {error}"
    return done.stdout.strip() or (done.stderr.strip() or "said nothing").splitlines()[-1]


def _libc() -> str:
    name, number = platform.libc_ver()
    return f", {name} {number}" if name else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _memory() -> str:
    try:
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return "unknown"
    return f"{num_bytes / 2**30:.1f} GiB"
