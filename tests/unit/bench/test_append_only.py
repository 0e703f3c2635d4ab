"""A server's file is cut between units: no function is left half done."""

from itertools import pairwise
from pathlib import Path

import pytest

from bench.rig.chaos.append_only import AppendOnlyFile, Cut, borders, cut
from servicekit.bus.commands import pack

AWKWARD = b"\r\n*1\r\n$4\r\nMULTI\r\n#"
UNITS = [
    pack((b"SELECT", b"0")),
    b"".join(map(pack, ((b"MULTI",), (b"SET", b"a", AWKWARD), (b"XADD", b"s", b"*", b"f", b""), (b"EXEC",)))),
    b"#TS:1700000000\r\n" + pack((b"SET", b"multi", b"exec")),
    b"".join(map(pack, ((b"multi",), (b"DEL", b"a"), (b"exec",)))),
]
ENDS = [sum(map(len, UNITS[: index + 1])) for index in range(len(UNITS))]


def test_borders_are_the_ends_of_units() -> None:
    found = list(borders(b"".join(UNITS)))
    assert set(ENDS) <= set(found)
    remark_end = ENDS[1] + UNITS[2].index(b"*")
    assert set(found) - set(ENDS) == {remark_end}


@pytest.mark.parametrize("missing", range(1, len(UNITS[-1])))
def test_what_is_not_whole_has_no_border(missing: int) -> None:
    assert max(borders(b"".join(UNITS)[:-missing])) == ENDS[-2]


@pytest.mark.parametrize(("keep_bytes", "kept"), [(0, ENDS[0]), (ENDS[0] + 1, ENDS[1]), (ENDS[2], ENDS[2])])
def test_the_file_keeps_whole_units(tmp_path: Path, keep_bytes: int, kept: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(UNITS))
    lost = cut(path, keep_bytes)
    assert path.read_bytes() == b"".join(UNITS)[:kept]
    assert lost.num_bytes == ENDS[-1] - kept


def test_nothing_is_cut_from_a_file_that_did_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(UNITS))
    assert cut(path, ENDS[-1]) == Cut(0, 0)
    assert all(first < second for first, second in pairwise(borders(path.read_bytes())))


def test_the_file_that_grows_is_the_last_of_the_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    (folder / "appendonly.aof.manifest").write_text(
        "file appendonly.aof.2.base.rdb seq 2 type b\n"
        "file appendonly.aof.2.incr.aof seq 2 type i\n"
        "file appendonly.aof.3.incr.aof seq 3 type i startoffset 5\n"
    )
    assert AppendOnlyFile(tmp_path).path() == folder / "appendonly.aof.3.incr.aof"
