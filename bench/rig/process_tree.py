"""CPU time of a process and of all that it started, by what runs in them (Linux)."""

import os
from collections import defaultdict
from pathlib import Path

_PROC = Path("/proc")


def cpu_s(root: int) -> dict[str, float]:
    """CPU seconds so far by name: the module of a `python -m`, or the program; empty where there is no /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    seconds: dict[int, float] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            # Fields 4, 14 and 15 of proc(5)'s stat, counted after the name, which may hold anything.
            fields = (folder / "stat").read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        pid = int(folder.name)
        children[int(fields[1])].append(pid)
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    found: defaultdict[str, float] = defaultdict(float)
    reached = [root]
    while reached:
        pid = reached.pop()
        reached += children[pid]
        if pid in seconds:
            found[_name(pid)] += seconds[pid]
    return dict(found)


def _name(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended"
    modules = [word for word in words if word.endswith("_svc")]
    return (modules[0] if modules else Path(words[0]).name).removesuffix("_svc")
