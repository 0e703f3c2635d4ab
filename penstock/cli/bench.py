"""`penstock bench NAME FLAGS…`: measures a server or `LLM`, or runs one of the benchmarks of the repository."""

import ast
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import penstock

FOLDER = Path(penstock.__file__).parents[1] / "bench"


PACKAGED = ("serve", "throughput", "latency")  # modules of penstock.benchmark; the others are in a clone


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark, or lists them if none is named; the exit status."""
    if argv and argv[0] in PACKAGED:
        run: Callable[[Sequence[str]], int] = import_module(f"penstock.benchmark.{argv[0]}").main
        return run(argv[1:])
    found = {
        path.stem.replace("_", "-"): path for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()
    }
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__, "\n")
        for name, path in ({name: _packaged(name) for name in PACKAGED} | found).items():
            print(f"  {name:<16} {_first_line(path)}")
        if not found:
            print("\nThe others are in the repository, not in the package: run them from a clone.")
        return 0
    if argv[0] not in found:
        there = ", ".join((*PACKAGED, *found))
        print(f"penstock bench: there is no {argv[0]!r}; there are {there}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(FOLDER.parent))
    sys.argv = [f"penstock bench {argv[0]}", *argv[1:]]
    try:
        runpy.run_path(str(found[argv[0]]), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def _packaged(name: str) -> Path:
    return Path(penstock.__file__).parent / "benchmark" / f"{name}.py"
