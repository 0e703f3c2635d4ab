"""A process and all that it started: what they are, and the CPU time that they took (Linux)."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """What proc(5)'s stat says of a process."""

    pid: int
    state: str  # a letter; T: stopped
    parent: int
    cpu_s: float


def family(root: int) -> list[Process]:
    """A process and all that it started, as far as they live; empty where there is no /proc."""
    processes = {process.pid: process for process in _processes()}
    children: dict[int, list[int]] = defaultdict(list)
    for process in processes.values():
        children[process.parent].append(process.pid)
    found: list[Process] = []
    reached = [root]
    while reached:
        pid = reached.pop()
        reached += children[pid]
        if pid in processes:
            found.append(processes[pid])
    return found


def cpu_s(root: int) -> dict[str, float]:
    """CPU seconds so far by name: the module of a `python -m`, or the program; empty where there is no /proc."""
    found: defaultdict[str, float] = defaultdict(float)
    for process in family(root):
        found[_name(process.pid)] += process.cpu_s
    return dict(found)


def _processes() -> Iterator[Process]:
    for folder in _PROC.glob("[0-9]*"):
        try:
            # Fields 3, 4, 14 and 15, counted after the name, which may hold anything.
            fields = (folder / "stat").read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        yield Process(int(folder.name), fields[0], int(fields[1]), cpu_s)


def _name(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended"
    modules = [word for word in words if word.endswith("_svc")]
    return (modules[0] if modules else Path(words[0]).name).removesuffix("_svc")
