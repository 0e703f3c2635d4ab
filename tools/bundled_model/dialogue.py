"""Writes whole chats: what a user might say, turn after turn, and the right answer to each."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tools.bundled_model import lexicon, questions, requests, stories, talk
from tools.bundled_model.grammar import GRAMMAR, STORY_VARIABLES, Ask, draw, has_held_out_pair, wordings
from tools.bundled_model.noise import noisy
from tools.bundled_model.rules import Bindings, Word, pick


@dataclass(frozen=True)
class Turn:
    """A user's message, the answer that the grammar gives to it, and what makes an answer right."""

    kind: str
    user: str
    answer: str
    ask: Ask


_Worded = TypeVar("_Worded", questions.Question, talk.Talk)
_WEIGHTS = {
    "story": 36, "any_story": 5, "poem": 7, "explanation": 16, "fact": 9, "term": 6, "talk": 15, "odd": 15,
    "reading": 4,
}  # fmt: skip
_FOLLOW_UP_SHARE = 0.5
_ASKED = (
    ("hero",), ("hero",), ("hero",), ("hero",), ("hero", "place"), ("hero", "place"), ("hero", "place"), ("place",),
    ("hero", "object"), ("hero", "object"), ("hero", "friend"), ("hero", "friend"), ("object",), ("weather",),
    ("hero", "weather"), ("hero", "trait"), ("hero", "trait", "place"), ("hero", "place", "object"), ("hero", "hname"),
    ("place", "object"), ("hero", "friend", "object"), ("hero", "friend", "place"), ("place", "weather"),
)  # fmt: skip
_LAYOUTS = (
    "{story} {question}", "{story}\n\n{question}", "{question} {story}", "Here is a story: {story} {question}",
    "{question}\n{story}", "{story}\n{question}",
)  # fmt: skip
_POEM_WORDS = ("hero", "place", "object", "weather")


class Dialogue:
    """One chat in the making; remembers the last story and the last offer, since both can be referred to."""

    def __init__(self, rng: random.Random, *, held_out: bool = False, noise: bool = True) -> None:
        self._rng = rng
        self._held_out = held_out
        self._noise = noise
        self._story: tuple[str, Bindings] | None = None
        self._offer: dict[str, Word] | None = None
        self._kinds: dict[str, Callable[[], Turn]] = {
            "story": self._tell,
            "any_story": self._tell_any,
            "poem": self._recite,
            "explanation": self._explain,
            "fact": self._state,
            "term": self._explain_term,
            "talk": self._talk,
            "odd": self._decline,
            "reading": self._read,
            "question": self._answer,
            "yes": self._accept,
        }

    def turn(self, kind: str | None = None) -> Turn:
        """The next turn; without a kind, one that fits what was said before."""
        if kind is None:
            kind = self._next_kind()
        return self._kinds[kind]()

    def _next_kind(self) -> str:
        if self._offer is not None and self._rng.random() < 0.12:
            return "yes"
        if self._story is not None and self._rng.random() < _FOLLOW_UP_SHARE:
            return "question"
        return self._rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]

    def _wording(self, all_of_them: tuple[str, ...]) -> str:
        return self._rng.choice(wordings(all_of_them, held_out=self._held_out))

    def _askable(self, choices: Sequence[_Worded]) -> list[_Worded]:
        """Those that have a wording on this side of the split."""
        return [one for one in choices if wordings(one.wordings, held_out=self._held_out)]

    def _finish(
        self, kind: str, user: str, words: Bindings, ask: Ask, *, rule: str = "", offer: Bindings | None = None
    ) -> Turn:
        """Write the answer by the rule, which may be narrower than what is accepted."""
        self._offer = dict(offer) if offer is not None else None
        rule = rule or ask.rule
        habit = words["hero"].key if rule.startswith(("story", "poem")) else rule
        answer = GRAMMAR.write(rule, words, self._rng, habit)
        return Turn(kind, noisy(user, self._rng) if self._noise else user, answer, ask)

    def _asked(self, choices: Sequence[tuple[str, ...]]) -> tuple[dict[str, Word], dict[str, Word]]:
        """Words for a story and those of them that are asked for; in an examination, words never seen together."""
        while True:
            words = draw(self._rng, held_out=self._held_out)
            asked = {name: words[name] for name in self._rng.choice(choices)}
            if not self._held_out or has_held_out_pair(asked[name] for name in STORY_VARIABLES if name in asked):
                return words, asked

    def _request(self, all_of_them: tuple[str, ...], asked: Bindings) -> str:
        rng = self._rng
        topic = requests.topic_phrase(asked, rng)
        wording = self._wording(all_of_them)
        if not self._held_out and rng.random() < 0.05:
            # Of a known and an unknown word, the known one decides.
            odd = lexicon.with_article(rng.choice(requests.ODD_NOUNS))
            topic = f"{topic} and {odd}" if rng.random() < 0.7 else f"{odd} and {topic}"
        text = wording.replace("{topic}", topic)
        if self._noise and wording != "{topic}":
            text = self._decorated(text)
        return text

    def _decorated(self, text: str) -> str:
        rng = self._rng
        if rng.random() < 0.25:
            text = rng.choice(requests.OPENERS) + text[0].lower() + text[1:]
        elif rng.random() < 0.02:
            text = f"{requests.babble(rng, rng.randint(2, 12)).capitalize()}. {text}"
        if rng.random() < 0.15:
            closer = rng.choice(requests.CLOSERS)
            text = (text if closer[1].isupper() else text.rstrip(".")) + closer
        return text

    def _tell(self) -> Turn:
        words, asked = self._asked(_ASKED)
        return self._story_turn("story", self._request(requests.STORY_WORDINGS, asked), words, asked)

    def _tell_any(self) -> Turn:
        words = draw(self._rng, held_out=self._held_out)
        return self._story_turn("story", self._wording(requests.ANY_STORY_WORDINGS), words, {})

    def _story_turn(self, kind: str, user: str, words: Bindings, asked: Bindings) -> Turn:
        plot = _plot(words, self._rng)
        self._story = (plot, words)
        return self._finish(kind, user, words, Ask("story", asked), rule=f"story.{plot}")

    def _accept(self) -> Turn:
        """ "Yes" after an offer: a story about what was offered."""
        offered = self._offer or {}
        words = draw(self._rng, held_out=self._held_out, fixed=offered)
        return self._story_turn("yes", self._wording(talk.YES_WORDINGS), words, offered)

    def _recite(self) -> Turn:
        words, asked = self._asked([names for names in _ASKED if set(names) <= set(_POEM_WORDS)])
        user = self._request(requests.POEM_WORDINGS, asked)
        return self._finish("poem", user, words, Ask("poem", asked))

    def _explain(self) -> Turn:
        words = draw(self._rng, held_out=self._held_out)
        thing = words["thing"]
        user = self._plain_request(talk.EXPLANATION_WORDINGS, words)
        rule = "explanation.animal" if "other" in thing.forms else "explanation.plain"
        ask = Ask("explanation", {"thing": thing})
        return self._finish("explanation", user, words, ask, rule=rule, offer={_role(thing): thing})

    def _explain_term(self) -> Turn:
        words = draw(self._rng, held_out=self._held_out)
        term = words["term"]
        user = self._plain_request(talk.EXPLANATION_WORDINGS, {**words, "thing": term})
        return self._finish("term", user, words, Ask("term", {"term": term}))

    def _state(self) -> Turn:
        fact = self._rng.choice(self._askable(talk.FACTS))
        words = draw(self._rng, held_out=self._held_out)
        user = self._plain_request(fact.wordings, words)
        named = {name: words[name] for name in ("animal", "person", "object") if f"{{{name}." in fact.answer}
        return self._finish("fact", user, words, Ask(f"fact.{fact.name}", named))

    def _plain_request(self, all_of_them: tuple[str, ...], words: Bindings) -> str:
        text = GRAMMAR.write_template(self._wording(all_of_them), words, self._rng)
        return self._decorated(text) if self._noise and self._rng.random() < 0.5 else text

    def _talk(self) -> Turn:
        choices = [one for one in talk.TALKS if one.name != "no_story" or self._story is None]
        one = self._rng.choice(self._askable(choices))
        words = draw(self._rng, held_out=self._held_out, habit=f"talk.{one.name}")
        user = GRAMMAR.write_template(self._wording(one.wordings), words, self._rng)
        named = {"animal": words["animal"]} if one.name == "like" else {}
        offer: Bindings | None = None
        if one.name == "like":
            offer = {"hero": words["animal"]}
        elif one.name == "favourite":
            offer = {"hero": words["some_hero"]}
        elif "<suggestion>" in one.answer:
            offer = _suggested(words)
        return self._finish("talk", user, words, Ask(f"talk.{one.name}", named), offer=offer)

    def _decline(self) -> Turn:
        rng = self._rng
        nouns = wordings(requests.ODD_NOUNS, held_out=self._held_out)
        if not self._held_out and rng.random() < 0.25:
            rule, user = "talk.unknown", requests.babble(rng, rng.choice((1, 2, 3, 5, 8, 13, 20, 40)))
        else:
            rule = rng.choice(list(requests.ODD_WORDINGS))
            if rule == "talk.unknown_word" or rng.random() < 0.5:
                rule = rng.choice(("talk.unknown_word", "talk.unknown"))
            user = requests.odd_request(self._wording(requests.ODD_WORDINGS[rule]), nouns, rng)
        words = draw(rng, held_out=self._held_out, habit=rule)
        # To decline in other words is right, too: between these the wording decides, not the meaning.
        accepted = "talk.declined" if rule in ("talk.unknown", "talk.unknown_word") else rule
        return self._finish("odd", user, words, Ask(accepted), rule=rule, offer=_suggested(words))

    def _read(self) -> Turn:
        """A story that the user tells, and a question about it."""
        words = draw(self._rng, held_out=self._held_out)
        plot = _plot(words, self._rng)
        story = GRAMMAR.write(f"story.{plot}", words, self._rng)
        self._story = (plot, words)
        question, user = self._question(plot, words)
        text = self._rng.choice(_LAYOUTS).format(story=story, question=user)
        return self._question_turn("reading", question, text, words)

    def _answer(self) -> Turn:
        if self._story is None:
            raise RuntimeError("there is no story to ask about yet")
        plot, words = self._story
        question, user = self._question(plot, words)
        if self._noise:
            user = noisy(user, self._rng)
        return self._question_turn("question", question, user, words)

    def _question(self, plot: str, words: Bindings) -> tuple[questions.Question, str]:
        question = self._rng.choice(self._askable([one for one in questions.QUESTIONS if plot in one.plots]))
        return question, GRAMMAR.write_template(self._wording(question.wordings), words, self._rng)

    def _question_turn(self, kind: str, question: questions.Question, user: str, words: Bindings) -> Turn:
        rule = f"answer.{question.name}"
        known = {name: word for name, word in words.items() if not name.startswith("some_")}
        self._offer = None
        return Turn(kind, user, GRAMMAR.write(rule, words, self._rng, words["hero"].key), Ask(rule, known))


def plain_text(rng: random.Random) -> str:
    """A text without a chat around it, for plain completions; it may begin in the middle of a story."""
    words = draw(rng, held_out=False)
    style = rng.random()
    if style < 0.1:
        return GRAMMAR.write("poem", words, rng)
    if style < 0.2:
        rule = rng.choice(("explanation.plain", "term"))
        return GRAMMAR.write(rule, words, rng)
    story = GRAMMAR.write(f"story.{_plot(words, rng)}", words, rng, words["hero"].key)
    if style < 0.3:
        return f"The {words['hero'].forms['title']} and the {words['object'].forms['title']}\n\n{story}"
    if style < 0.4:
        return f"{story} {GRAMMAR.write('answer.continuation', words, rng)}"
    if style < 0.6:
        sentences = story.split(". ")
        return ". ".join(sentences[rng.randrange(len(sentences)) :])
    return story


def system_prompt(rng: random.Random) -> str | None:
    """The text of the system message, if there is one; it changes nothing, and the model should learn that."""
    style = rng.random()
    if style < 0.55:
        return None
    if style < 0.95:
        return rng.choice(requests.SYSTEM_PROMPTS)
    return requests.babble(rng, rng.choice((3, 10, 30)))


def _plot(words: Bindings, rng: random.Random) -> str:
    return pick(rng, list(stories.STORY_RULES), f"{words['hero'].key}/plot")


def _role(thing: Word) -> str:
    for role in ("hero", "place", "object"):
        if thing in {"hero": lexicon.CHARACTERS, "place": lexicon.PLACES, "object": lexicon.OBJECTS}[role]:
            return role
    return "weather"


def _suggested(words: Bindings) -> dict[str, Word]:
    # Of "a fox, a river or a key", "yes" gets the first: all three could leave no weather that may go with them.
    return {"hero": words["some_hero"]}
