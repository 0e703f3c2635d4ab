"""A notation for small grammars whose rules both write text and recognise it.

    [one|other]     one of the alternatives; an empty one makes the rest optional
    {hero.a}        the form ``a`` of the word that the variable ``hero`` stands for; ``{hero}`` is its plain form
    <ending>        another rule

A variable stands for the same word throughout a text. That is more than a context-free grammar can say, and it is what
makes the recogniser worth having: a story that opens with "Mina the hare" and goes on with "he" is not in the language.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

_TOKEN = re.compile(r"[\[\]|]|\{[a-z_]+(?:\.[A-Za-z_]+)?\}|<[a-z_.]+>|[^\[\]|{}<>]+")


@dataclass(frozen=True, eq=False)
class Word:
    """A word of the lexicon with its forms: ``a`` for "a fox", ``plural`` for "foxes", "" for the plain one."""

    key: str
    forms: Mapping[str, str]


Bindings = Mapping[str, Word]
"""The word that each variable stands for."""


_HABIT = 0.3
_Option = TypeVar("_Option")


def pick(rng: random.Random, options: Sequence[_Option], habit: str = "") -> _Option:
    """One of the options at random; with a habit, now and then the one that this habit always prefers.

    A model that always takes the likeliest word would tell one and the same story if all were equally likely. With the
    hero's name for a habit, foxes have a favourite story, and it is another one than the hares'.
    """
    if habit and rng.random() < _HABIT:
        return options[_number(habit) % len(options)]
    return rng.choice(options)


@cache
def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


@dataclass(frozen=True)
class _Text:
    text: str


@dataclass(frozen=True)
class _Slot:
    variable: str
    form: str


@dataclass(frozen=True)
class _Rule:
    name: str


@dataclass(frozen=True)
class _Choice:
    alternatives: "tuple[_Sequence, ...]"
    place: str


_Node = _Text | _Slot | _Rule | _Choice
_Sequence = tuple[_Node, ...]


def _compile(template: str) -> _Sequence:
    """Turn the notation into a tree; a stray bracket is an error here and not a riddle later."""
    tokens: list[str] = _TOKEN.findall(template)
    if "".join(tokens) != template:
        raise ValueError(f"cannot read the template {template!r}")
    position = 0

    def alternatives(depth: int) -> tuple[_Sequence, ...]:
        nonlocal position
        found: list[_Sequence] = []
        nodes: list[_Node] = []
        while position < len(tokens) and tokens[position] != "]":
            token = tokens[position]
            position += 1
            if token == "[":
                place = f"{template}/{position}"
                nodes.append(_Choice(alternatives(depth + 1), place))
                if position == len(tokens):
                    raise ValueError(f"missing ']' in {template!r}")
                position += 1
            elif token == "|":
                if depth == 0:
                    raise ValueError(f"'|' outside brackets in {template!r}")
                found.append(tuple(nodes))
                nodes = []
            elif token[0] == "{":
                variable, _, form = token[1:-1].partition(".")
                nodes.append(_Slot(variable, form))
            elif token[0] == "<":
                nodes.append(_Rule(token[1:-1]))
            else:
                nodes.append(_Text(token))
        found.append(tuple(nodes))
        return tuple(found)

    (sequence,) = alternatives(0)
    if position != len(tokens):
        raise ValueError(f"missing '[' in {template!r}")
    return sequence


def spelled_out(*templates: str) -> tuple[str, ...]:
    """Every way through the choices of the templates, in order and without repetition; variables stay as they are."""
    return tuple(dict.fromkeys(text for template in templates for text in _ways(_compile(template))))


def _ways(sequence: _Sequence) -> Iterator[str]:
    if not sequence:
        yield ""
        return
    node, rest = sequence[0], sequence[1:]
    if isinstance(node, _Text):
        starts: Iterator[str] = iter((node.text,))
    elif isinstance(node, _Choice):
        starts = (way for alternative in node.alternatives for way in _ways(alternative))
    elif isinstance(node, _Slot):
        starts = iter((f"{{{node.variable}.{node.form}}}" if node.form else f"{{{node.variable}}}",))
    else:
        starts = iter((f"<{node.name}>",))
    for start in starts:
        for end in _ways(rest):
            yield start + end


class Grammar:
    """Named rules over variables; writes sentences of a rule, and reads back which words made a text."""

    def __init__(
        self,
        rules: Mapping[str, str],
        variables: Mapping[str, Sequence[Word]],
        distinct: Sequence[frozenset[str]] = (),
    ) -> None:
        self._rules = {name: _compile(template) for name, template in rules.items()}
        self._variables = variables
        self._distinct = distinct
        self._templates: dict[str, _Sequence] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of all rules."""
        return frozenset(self._rules)

    def write(self, rule: str, words: Bindings, rng: random.Random, habit: str = "") -> str:
        """Write one text of the rule; ``words`` must give a word to every variable that comes up."""
        return self._write(self._rules[rule], words, rng, habit)

    def write_template(self, template: str, words: Bindings, rng: random.Random) -> str:
        """Write one text of a template that is no rule, such as the wording of a user's question."""
        if template not in self._templates:
            self._templates[template] = _compile(template)
        return self._write(self._templates[template], words, rng)

    def read(self, rule: str, text: str, words: Bindings | None = None) -> Iterator[Bindings]:
        """Every way in which the whole text is a text of the rule, given the words already known."""
        for end, found in self._read(self._rules[rule], text, 0, words or {}):
            if end == len(text):
                yield found

    def _write(self, sequence: _Sequence, words: Bindings, rng: random.Random, habit: str = "") -> str:
        parts: list[str] = []
        for node in sequence:
            if isinstance(node, _Text):
                parts.append(node.text)
            elif isinstance(node, _Slot):
                parts.append(words[node.variable].forms[node.form])
            elif isinstance(node, _Choice):
                alternative = pick(rng, node.alternatives, habit and habit + node.place)
                parts.append(self._write(alternative, words, rng, habit))
            else:
                parts.append(self._write(self._rules[node.name], words, rng, habit))
        return "".join(parts)

    def _read(self, sequence: _Sequence, text: str, at: int, words: Bindings) -> Iterator[tuple[int, Bindings]]:
        if not sequence:
            yield at, words
            return
        node, rest = sequence[0], sequence[1:]
        if isinstance(node, _Text):
            if text.startswith(node.text, at):
                yield from self._read(rest, text, at + len(node.text), words)
        elif isinstance(node, _Slot):
            for end, found in self._read_slot(node, text, at, words):
                yield from self._read(rest, text, end, found)
        else:
            inner = node.alternatives if isinstance(node, _Choice) else (self._rules[node.name],)
            for alternative in inner:
                for end, found in self._read(alternative, text, at, words):
                    yield from self._read(rest, text, end, found)

    def _read_slot(self, slot: _Slot, text: str, at: int, words: Bindings) -> Iterator[tuple[int, Bindings]]:
        known = words.get(slot.variable)
        if known is not None:
            form = known.forms.get(slot.form)
            if form is not None and text.startswith(form, at):
                yield at + len(form), words
            return
        taken = {
            words[other].key for group in self._distinct if slot.variable in group for other in group if other in words
        }
        for word in self._variables[slot.variable]:
            form = word.forms.get(slot.form)
            if form is not None and word.key not in taken and text.startswith(form, at):
                yield at + len(form), {**words, slot.variable: word}
