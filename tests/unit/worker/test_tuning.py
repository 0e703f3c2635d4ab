"""Tables of tuning: which files are read for a device, and what is said of one that is of no use."""

from pathlib import Path

import pytest
import torch

from contract.domain.errors import ErrorCode, PenstockError
from worker_svc.compute import choose_compute
from worker_svc.core.kernels.linear.table import Card, Line, Table, write_table
from worker_svc.core.kernels.linear.ways import CUBLAS, Cublas
from worker_svc.core.kv_cache import KVCacheShape
from worker_svc.tuning import card_of, default_file, find_lines, packaged_lines

CPU = torch.device("cpu")
TUNED = Line(("plain",), (1, None), (Cublas(lt=True),), outputs=(64, 64), inputs=(64, 64))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def save(path: Path, card: Card) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write_table(Table(card, (TUNED,))))
    return str(path)


def test_without_a_file_there_is_what_comes_along() -> None:
    card = card_of(CPU)
    assert find_lines(CPU) == packaged_lines(card)
    assert {way.lt for line in packaged_lines(card) for way in line.ways if isinstance(way, Cublas)} == {True, False}


def test_lines_of_a_file_stand_before_those_that_come_along(tmp_path: Path) -> None:
    file = save(tmp_path / "mine.json", card_of(CPU))
    assert find_lines(CPU, file) == (TUNED, *packaged_lines(card_of(CPU)))


def test_the_card_s_own_file_in_the_cache_is_read_unless_another_is_named(cache: Path) -> None:
    path = default_file(card_of(CPU))
    assert path.is_relative_to(cache)
    save(path, card_of(CPU))
    assert find_lines(CPU)[0] == TUNED
    other = save(cache / "other.json", Card((9, 0), 132))
    Path(other).write_bytes(write_table(Table(card_of(CPU), ())))
    assert find_lines(CPU, other) == packaged_lines(card_of(CPU))


def test_cards_have_files_of_their_own() -> None:
    cards = [Card((9, 0), 132, "NVIDIA H200"), Card((9, 0), 114, "NVIDIA H200"), Card((9, 0), 132, "NVIDIA H100/2")]
    names = [default_file(card).name for card in cards]
    assert names == ["nvidia-h200-132.json", "nvidia-h200-114.json", "nvidia-h100-2-132.json"]


def test_a_table_without_a_name_is_of_all_cards_like_that() -> None:
    assert Card((9, 0), 132).includes(Card((9, 0), 132, "NVIDIA H200"))
    assert not Card((9, 0), 132, "NVIDIA H200").includes(Card((9, 0), 132, "NVIDIA H100"))
    assert not Card((9, 0), 132).includes(Card((9, 0), 114, "NVIDIA H100"))


@pytest.mark.parametrize("what", ["missing", "another card", "no table"])
def test_a_file_that_was_asked_for_must_be_a_table_of_this_card(what: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    said = "which is not there"
    if what == "another card":
        save(path, Card((8, 0), 108, "NVIDIA A100"))
        said = "it is of NVIDIA A100 of capability 8.0 with 108 multiprocessors, and here is capability 9.0 with 132"
    elif what == "no table":
        path.write_text('{"card": {}}')
        said = "missing required field"
    with pytest.raises(PenstockError, match=said) as caught:
        find_lines(CPU, str(path))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_a_broken_file_in_the_cache_is_the_operator_s() -> None:
    path = default_file(card_of(CPU))
    path.parent.mkdir(parents=True)
    path.write_text("[]")
    with pytest.raises(PenstockError, match=r"is no table of tuning .*: remove it") as caught:
        find_lines(CPU)
    assert caught.value.code is ErrorCode.INTERNAL


def test_a_table_that_nobody_would_look_into_is_refused(tmp_path: Path) -> None:
    shape = KVCacheShape(1, 2, 64, 16, torch.float32)
    file = save(tmp_path / "mine.json", card_of(CPU))
    with pytest.raises(PenstockError, match="but torch computes"):
        choose_compute("torch", "auto", CPU, shape, 4, products=(), tuning=file)


def test_cublas_s_own_choice_is_what_no_line_says() -> None:
    assert Cublas(lt=False, rows=None) == CUBLAS
