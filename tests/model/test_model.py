"""Small spaces of the real bus functions and cores are exhausted, and each rule that is switched off is missed."""

import pytest
from explorer import explore
from rules import RULES, Cut, Rule
from spaces import SPACES
from world import Penstock, Space

from servicekit.bus.library import read_library

MIN_STATES = 1000  # below it a space would be too small to say anything


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.name)
def test_every_promise_holds_in_every_state(space: Space, capsys: pytest.CaptureFixture[str]) -> None:
    found = explore(Penstock(space))
    with capsys.disabled():
        print(f"\n{space.name}: {found}")
    assert found.counterexample is None, f"\n{found.counterexample}"
    assert found.is_exhausted
    assert found.num_states > MIN_STATES


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_without_a_rule_a_promise_is_broken(rule: Rule) -> None:
    with rule.off():
        found = explore(rule.model())
    print(f"without '{rule.name}': {found}\n{found.counterexample}")
    assert found.counterexample is not None
    assert rule.reason in found.counterexample.reason


@pytest.mark.parametrize("text", ["no such text", "return 0"])
def test_a_rule_whose_text_is_not_found_once_cannot_be_switched_off(text: str) -> None:
    with pytest.raises(ValueError, match=f"times in the bus functions: {text}"):
        Cut(text, "").made(read_library())
