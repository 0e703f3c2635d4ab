"""Two checkouts in one run: who is measured when, and what is said of it."""

from pathlib import Path

import pytest

from bench.rig import two_trees
from bench.rig.step_rate import Rate
from bench.rig.two_trees import Turn, alternate, line

BEFORE, AFTER = Path("before"), Path("after")


def test_who_begins_changes_with_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Path] = []

    def measure(tree: Path, *load: float) -> Turn:
        assert load == (256, 1000, 0.002)
        order.append(tree)
        return Turn(len(order), Rate(1.0, {}))

    monkeypatch.setattr(two_trees, "measure", measure)
    said: list[str] = []
    before, after = alternate((BEFORE, AFTER), 3, 256, 1000, 0.002, say=said.append)
    assert order == [BEFORE, AFTER, AFTER, BEFORE, BEFORE, AFTER]
    assert ([turn.loop for turn in before], [turn.loop for turn in after]) == ([1, 4, 5], [2, 3, 6])
    assert said[:2] == ["  round 1, before: 1.000", "  round 1, after: 0.500"]


def test_the_ratio_is_that_of_a_round_and_not_of_medians() -> None:
    turns = [Turn(100.0, Rate(50.0, {"scheduler": 10.0})), Turn(200.0, Rate(200.0, {"scheduler": 30.0}))]
    words = line("before", turns).split()
    assert words == ["before", "150.0", "125.0", "0.750", "0.500–1.000", "scheduler", "20"]


def test_this_checkout_can_be_measured() -> None:
    turn = two_trees.measure(Path(__file__).parents[3], 4, 500, 0.002)
    assert turn.loop > 0
    assert turn.ratio > 0
    assert set(turn.pipeline.cpu_us) <= {"scheduler", "worker", "server"}
