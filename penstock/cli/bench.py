"""`penstock bench NAME FLAGS…`: runs `bench/NAME.py` of this repository."""

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import penstock
from contract.domain.errors import ErrorCode, PenstockError

FOLDER = Path(penstock.__file__).parents[1] / "bench"


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark, or lists them if none is named; the exit status."""
    found = {
        path.stem.replace("_", "-"): path for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()
    }
    if not found:
        raise PenstockError(
            ErrorCode.INTERNAL, "benchmarks are in the repository, not in the package: run it from a clone"
        )
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__, "\n")
        for name, path in found.items():
            print(f"  {name:<16} {_first_line(path)}")
        return 0
    if argv[0] not in found:
        print(f"penstock bench: there is no {argv[0]!r}; there are {', '.join(found)}", file=sys.stderr)
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
