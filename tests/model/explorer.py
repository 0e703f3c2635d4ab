"""A search through all states of a model, shortest paths first.

It knows nothing of what it explores. States are hashable values; it keeps each once, with the edges between them, so
that it can also tell from which states no good end can be reached any more. No reduction is made: every state and every
step that the model has is visited.
"""

import random
import time
from array import array
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Model(Protocol[S]):
    """What is explored."""

    def initial(self) -> S:
        """Where everything begins."""
        ...

    def steps(self, state: S) -> Iterable[tuple[str, S]]:
        """All that can happen next: what it is called, and the state after it."""
        ...

    def wrong(self, state: S) -> str:
        """Which promise is broken in a state; empty: none."""
        ...

    def is_end(self, state: S) -> bool:
        """Return whether everything has ended well."""
        ...


@dataclass(frozen=True, slots=True)
class Counterexample:
    """How a promise is broken: the shortest list of steps that does it."""

    reason: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{number:3}. {step}" for number, step in enumerate(self.steps, 1)]
        return "\n".join([*lines, f"  => {self.reason}"])


@dataclass(frozen=True, slots=True)
class Exploration:
    """What a search has found."""

    num_states: int
    num_steps: int
    num_ends: int
    depth: int  # steps of the longest of the shortest paths
    is_exhausted: bool  # every state was visited
    counterexample: Counterexample | None

    def __str__(self) -> str:
        size = f"{self.num_states} states, {self.num_steps} steps, {self.num_ends} ends, depth {self.depth}"
        return size if self.is_exhausted or self.counterexample else f"{size}, not exhausted"


class _Search(Generic[S]):
    """States by number, in the order in which they were found, and the edges between them."""

    def __init__(self, model: Model[S]) -> None:
        first = model.initial()
        self.model = model
        self.numbers: dict[S, int] = {first: 0}
        self.parents = array("q", [-1])
        self.depths = array("i", [0])
        self.sources = array("q")
        self.targets = array("q")
        self.ends: list[int] = [0] if model.is_end(first) else []
        self.waiting: deque[S] = deque([first])
        self.wrong: tuple[int, str] | None = (0, reason) if (reason := model.wrong(first)) else None

    def expand(self) -> None:
        """Looks at the steps of the next state."""
        state = self.waiting.popleft()
        source = self.numbers[state]
        for _, target in self.model.steps(state):
            number = self.numbers.get(target)
            if number is None:
                number = self._add(target, source)
                if reason := self.model.wrong(target):
                    self.wrong = number, reason
                    return
            self.sources.append(source)
            self.targets.append(number)

    def lost(self) -> int | None:
        """The first state from which no end can be reached; None: there is none. All states must have been expanded."""
        back: list[array[int]] = [array("q") for _ in self.numbers]
        for source, target in zip(self.sources, self.targets, strict=True):
            back[target].append(source)
        reaches = bytearray(len(back))
        stack = list(self.ends)
        for number in stack:
            reaches[number] = 1
        while stack:
            for source in back[stack.pop()]:
                if not reaches[source]:
                    reaches[source] = 1
                    stack.append(source)
        first = reaches.find(0)
        return None if first < 0 else first

    def path(self, number: int) -> tuple[str, ...]:
        """What the steps to a state are called."""
        states = list(self.numbers)
        path: list[str] = []
        while (parent := self.parents[number]) >= 0:
            path.append(next(name for name, to in self.model.steps(states[parent]) if self.numbers.get(to) == number))
            number = parent
        return tuple(reversed(path))

    def _add(self, state: S, parent: int) -> int:
        number = self.numbers[state] = len(self.numbers)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.waiting.append(state)
        if self.model.is_end(state):
            self.ends.append(number)
        return number


def explore(model: Model[S], *, max_states: int = 10_000_000, seconds: float = float("inf")) -> Exploration:
    """Visits every state, the nearest first, until a promise is broken or a bound is reached.

    After the last one it looks whether an end can be reached from everywhere: if not, the nearest state from which none
    can be is the counterexample.
    """
    search = _Search(model)
    deadline_s = time.monotonic() + seconds
    while search.waiting and search.wrong is None and len(search.numbers) < max_states:
        if len(search.sources) & 0xFFF == 0 and time.monotonic() > deadline_s:
            break
        search.expand()
    is_exhausted = search.wrong is None and not search.waiting
    found = search.wrong
    if is_exhausted and (lost := search.lost()) is not None:
        found = lost, "from here no end can be reached any more"
    return Exploration(
        num_states=len(search.numbers),
        num_steps=len(search.sources),
        num_ends=len(search.ends),
        depth=search.depths[-1],
        is_exhausted=is_exhausted,
        counterexample=found and Counterexample(found[1], search.path(found[0])),
    )


def wander(model: Model[S], *, seconds: float, seed: int, max_steps: int = 400) -> Exploration:
    """Random walks through a space that is too large to visit, each until its end; says only what is broken on them."""
    draw = random.Random(seed)
    deadline_s = time.monotonic() + seconds
    seen: set[S] = set()
    num_steps = num_ends = depth = 0
    while time.monotonic() < deadline_s:
        state, path = model.initial(), []
        while len(path) < max_steps and not model.is_end(state) and (steps := list(model.steps(state))):
            name, state = draw.choice(steps)
            path.append(name)
            seen.add(state)
            num_steps += 1
            if reason := model.wrong(state):
                broken = Counterexample(reason, tuple(path))
                return Exploration(len(seen), num_steps, num_ends, len(path), False, broken)
        num_ends += model.is_end(state)
        depth = max(depth, len(path))
    return Exploration(len(seen), num_steps, num_ends, depth, False, None)
