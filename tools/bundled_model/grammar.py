"""The grammar of the bundled model's answers: it writes them, it recognises them, and it says which are held out.

ask = Ask("story", {"hero": fox, "place": river})
parses(answer)           # is this a text of the grammar at all?
on_subject(ask, answer)  # is it a right answer: a story whose hero is a fox, told at a river?
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations

from tools.bundled_model import lexicon, questions, requests, stories, talk
from tools.bundled_model.rules import Bindings, Grammar, Word, pick

VARIABLES: dict[str, Sequence[Word]] = {
    "hero": lexicon.CHARACTERS,
    "friend": lexicon.CHARACTERS,
    "hname": lexicon.NAMES,
    "fname": lexicon.NAMES,
    "place": lexicon.PLACES,
    "object": lexicon.OBJECTS,
    "weather": lexicon.WEATHER,
    "trait": lexicon.TRAITS,
    "time": lexicon.TIMES,
    "spot": lexicon.SPOTS,
    "animal": lexicon.ANIMALS,
    "person": lexicon.PEOPLE,
    "thing": lexicon.STORY_WORDS,
    "term": lexicon.TERMS,
    "some_hero": lexicon.CHARACTERS,
    "some_place": lexicon.PLACES,
    "some_object": lexicon.OBJECTS,
}
STORY_VARIABLES = ("hero", "friend", "place", "object", "weather", "trait")
"""The parts of a story, and what a user may ask it to be about."""

GRAMMAR = Grammar(
    {**stories.RULES, **questions.RULES, **talk.RULES},
    VARIABLES,
    (frozenset({"hero", "friend"}), frozenset({"hname", "fname"})),
)
ANSWER_RULES = (
    "story",
    "poem",
    "explanation",
    "term",
    *sorted(name for name in GRAMMAR.names if name.startswith(("answer.", "fact.", "talk."))),
)
"""The rules whose texts are whole answers."""

_FAVOURITE_OF = {
    "friend": "hero", "hname": "hero", "fname": "friend", "place": "hero", "object": "hero", "trait": "hero",
    "weather": "place", "spot": "object", "some_place": "some_hero", "some_object": "some_hero",
}  # fmt: skip
"""The words that have a favourite for a variable; see ``pick``."""
_CHARACTERS = frozenset({"hero", "friend", "hname", "fname"})
_APART = (STORY_VARIABLES, ("some_hero", "some_place", "some_object"))
_ATTEMPTS = 50
_HELD_OUT_SHARE = 8
_ORDINARY = 5
"""One in so many wordings and word pairs is kept for examinations."""


@dataclass(frozen=True)
class Ask:
    """A right answer: a text of the rule in which these variables stand for these words."""

    rule: str
    words: Bindings = field(default_factory=dict)


def parses(text: str) -> bool:
    """Return whether the text is an answer that the grammar could have written."""
    return any(True for rule in ANSWER_RULES for _ in GRAMMAR.read(rule, text))


def on_subject(ask: Ask, answer: str) -> bool:
    """Return whether the answer is one of those that the grammar would give to this very request."""
    return any(True for _ in GRAMMAR.read(ask.rule, answer, ask.words))


@cache
def pair_held_out(one: str, other: str) -> bool:
    """Return whether no story of the training text may have both words."""
    return _hashed_out("+".join(sorted((one, other))))


def has_held_out_pair(words: Iterable[Word]) -> bool:
    """Return whether any two of the words are kept apart in the training text."""
    return any(pair_held_out(one.key, other.key) for one, other in combinations(words, 2))


@cache
def wordings(all_of_them: tuple[str, ...], *, held_out: bool) -> tuple[str, ...]:
    """The part of the wordings for training or for examinations, split by a hash.

    The first few of a list are the most ordinary. They are always trained on: users will type them.
    """
    return tuple(wording for wording in all_of_them if _wording_held_out(wording) == held_out)


def _hashed_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def _wording_held_out(wording: str) -> bool:
    same = _same_wording(wording)
    return _hashed_out(same) and same not in _ordinary_wordings()


@cache
def _ordinary_wordings() -> frozenset[str]:
    asked = [one.wordings for one in questions.QUESTIONS]
    sayings = [one.wordings for one in (*talk.TALKS, *talk.FACTS)]
    lists = [*asked, *sayings, *requests.WORDING_LISTS, talk.EXPLANATION_WORDINGS, talk.YES_WORDINGS]
    return frozenset(_same_wording(wording) for one in lists for wording in one[:_ORDINARY])


def _same_wording(wording: str) -> str:
    """Two wordings that read the same once their words are filled in must not end up on different sides."""
    return wording.replace("{friend", "{hero").replace("{fname", "{hname")


def draw(rng: random.Random, *, held_out: bool, fixed: Bindings | None = None, habit: str = "") -> dict[str, Word]:
    """A word for every variable; for training, no two words of a story or of an offer form a held-out pair."""
    words: dict[str, Word] = dict(fixed or {})
    for name, pool in VARIABLES.items():
        if name in words:
            continue
        unlike = {words[other].key for other in _CHARACTERS if name in _CHARACTERS and other in words}
        group = next((group for group in _APART if name in group and not held_out), ())
        beside = [words[other].key for other in group if other in words]
        favours = words[_FAVOURITE_OF[name]].key if name in _FAVOURITE_OF else habit if name == "some_hero" else ""
        for _ in range(_ATTEMPTS):
            word = pick(rng, pool, favours and f"{favours}/{name}")
            if word.key not in unlike and not any(pair_held_out(word.key, other) for other in beside):
                words[name] = word
                break
        else:
            # The words so far leave hardly any choice for this one: begin anew.
            return draw(rng, held_out=held_out, fixed=fixed, habit=habit)
    return words
