"""`penstock models`: the models that workers load, and how that was proved."""

import argparse
import inspect
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from worker_svc.core.models import FAMILIES

_FORMATS = (
    ("dense", "float32, bfloat16, float16 and whatever else safetensors has of floats; converted when it is read"),
    ("compressed-tensors", "8-bit floats with a scale for each output, inputs rounded to 8 bits too or not"),
)
_PROOF = (
    "Each family's tokens and log-probabilities equal those of transformers' own class in fp32, eager, on tiny "
    "checkpoints with random weights: through chunks, mixed batches, preemption and the prefix cache "
    "(tests/parity); some of each kind on two ranks, and in half precision on a GPU. No published weights were at "
    "hand. What a config.json says and a family does not read is refused by its name before weights are read."
)


def main(argv: Sequence[str]) -> int:
    """Prints the list; the exit status."""
    parser = argparse.ArgumentParser(prog="penstock models", description=__doc__, allow_abbrev=False)
    parser.add_argument("--names", action="store_true", help="architectures alone, a line each")
    if parser.parse_args(argv).names:
        print("\n".join(sorted(FAMILIES)))
        return 0
    console = Console()
    console.print(_table("architecture", _families()))
    console.print(_table("format of weights", iter(_FORMATS)))
    console.print(_PROOF)
    return 0


def _families() -> Iterator[tuple[str, str]]:
    """Architectures as config.json names them, and what the file of each family says of it."""
    for architecture, family in sorted(FAMILIES.items()):
        module = inspect.getmodule(family)
        told = inspect.getdoc(module) if module is not None else None
        yield architecture, " ".join((told or "").split())


def _table(title: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(title, "", box=None, padding=(0, 2, 0, 0))
    for name, meaning in rows:
        table.add_row(name, meaning)
    return table
