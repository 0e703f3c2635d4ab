"""Generates docs/openapi.json from the bodies of calls and the table of routes; with --check says whether it is up to
date.
"""

import argparse
import json
import sys
from pathlib import Path

from gateway_svc.core.openapi import describe

FILE = Path(__file__).resolve().parents[1] / "docs" / "openapi.json"


def text() -> str:
    """The description, for people who compare two of them."""
    return json.dumps(describe(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Entry point; the exit status is 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    if parser.parse_args().check:
        if is_stale := not FILE.exists() or FILE.read_text("utf-8") != text():
            print(f"{FILE.name} is out of date, run `make docs`", file=sys.stderr)
        return int(is_stale)
    FILE.write_text(text(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
