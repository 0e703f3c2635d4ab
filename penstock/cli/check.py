"""`penstock check`: whether `penstock serve` with the same flags would start, and what it would run."""

import os
from collections.abc import Sequence

from penstock.launcher.checks import Verdict, check
from penstock.launcher.layout import parse


def main(argv: Sequence[str]) -> int:
    """Prints what was found; the exit status: 0, or 2 if something would keep the pipeline from starting."""
    findings, made = check(parse(argv, os.environ), os.environ)
    width = max(len(each.part) for each in findings)
    for each in findings:
        print(f"{each.verdict.value:<7}  {each.part:<{width}}  {each.text}")
    if any(each.verdict is Verdict.WRONG for each in findings):
        return 2
    print("\nwould run")
    for child in made:
        print(
            f"  {child.name:<{max(len(each.name) for each in made)}}  python -m {child.module} {' '.join(child.flags)}"
        )
    return 0
