"""Scripts of simulated workers."""

from pathlib import Path

import pytest
from byte_tokenizer import write_tokenizer

from contract.domain.errors import PenstockError
from servicekit.checkpoint.tokenizer import read_tokenizer
from worker_svc.core.script import Line, Script, scripted
from worker_svc.script_file import read_script


def test_the_first_line_that_fits_is_the_answer() -> None:
    script = Script([Line("late", (1, 2)), Line("", (3,))], lambda ids: "late" if 7 in ids else "early")
    assert script.answer([5, 7]) == (1, 2)
    assert script.answer([5]) == (3,)
    assert Script([Line("late", (1,))], lambda _: "early").answer([5]) == ()


def test_an_answer_goes_on_from_any_position_and_stays_at_its_end() -> None:
    assert [scripted((4, 5, 9), position, 0) for position in range(5)] == [4, 5, 9, 9, 9]
    assert scripted((), 3, 17) == 17


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    file = tmp_path / "script"
    file.write_text('{"match": "é?", "answer": "ab"}\n\n{"match": "", "answer": ""}\n')
    script = read_script(file, tokenizer, 256)
    ids = tokenizer.encode("who é?").ids
    assert script.answer(ids) == (*tokenizer.encode("ab").ids, 256)
    assert script.answer(ids[:2]) == (256,)


@pytest.mark.parametrize("line", ["{", "[]", '{"match": "a"}', '{"match": "a", "answer": 1}'])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "script"
    file.write_text(f"\n{line}\n")
    with pytest.raises(PenstockError, match="script:2"):
        read_script(file, read_tokenizer(tmp_path), 256)
    with pytest.raises(PenstockError, match="cannot be read"):
        read_script(tmp_path / "none", read_tokenizer(tmp_path), 256)
