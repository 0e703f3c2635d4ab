"""Generates the table of sampling parameters in docs/api.md; with --check says whether it is up to date."""

import argparse
import sys
from pathlib import Path

import msgspec

from contract.domain.parameter import Parameter
from contract.domain.params import PARAMETERS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
BEGIN = "<!-- Generated from contract/domain/params.py by tools/generate_parameters.py (`make docs`): do not edit. -->"
END = "<!-- Up to here. -->"


def table() -> str:
    """The rows of all parameters, by name."""
    rows = [f"| `{name}` | both | {_words(each)} |" for name, each in sorted(PARAMETERS.items())]
    return "\n".join((BEGIN, "", "| field | call | |", "|---|---|---|", *rows, "", END))


def page(text: str) -> str:
    """The whole page, of which all but the table is as in `text`."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + table() + after


def _words(each: Parameter) -> str:
    words = ", ".join(part for part in (each.meaning, each.kind.bounds) if part)
    # A list has nothing in it by default, and what is None by default says so in words.
    has_default = each.default is not None and not hasattr(each.default, "__len__")
    return f"{words} [{msgspec.json.encode(each.default).decode().removesuffix('.0')}]" if has_default else words


def main() -> int:
    """Entry point; the exit status is 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    text = PAGE.read_text("utf-8")
    if parser.parse_args().check:
        if is_stale := text != page(text):
            print(f"{PAGE.name} is out of date, run `make docs`", file=sys.stderr)
        return int(is_stale)
    PAGE.write_text(page(text), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
