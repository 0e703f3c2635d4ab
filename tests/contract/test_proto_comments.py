"""The contract explains itself: everything has a comment, and no enum's zero means anything."""

import re
from pathlib import Path

import pytest

PROTOS = sorted((Path(__file__).parents[2] / "proto" / "penstock" / "v1").glob("*.proto"))
# Declarations; the fields of a `oneof` too. A `oneof` itself is explained by its fields.
DECLARED = re.compile(
    r"(message|enum|service|rpc) \w+|((optional|repeated) )?(map<.+>|[\w.]+) \w+ = \d+;|[A-Z_]+ = \d+;"
)


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_everything_has_a_comment(path: Path) -> None:
    lines = ["", *(line.strip() for line in path.read_text().splitlines())]
    declared = [index for index, line in enumerate(lines) if DECLARED.match(line)]
    assert declared
    assert [lines[index] for index in declared if not lines[index - 1].startswith("//")] == []


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_the_zero_of_an_enum_is_unspecified(path: Path) -> None:
    for zero in re.findall(r"^\s+(\w+) = 0;", path.read_text(), re.MULTILINE):
        assert zero.endswith("_UNSPECIFIED")
