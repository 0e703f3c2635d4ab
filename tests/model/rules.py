"""Each rule of recovery switched off, and a space in which that is found out."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from processes import Process
from spaces import named
from world import Faults, Penstock, Space

from servicekit.bus import calls as c
from servicekit.bus.calls import SessionKind
from servicekit.bus.memory_pool import MemoryPool
from servicekit.bus.memory_sessions import MemorySessions


@dataclass(frozen=True)
class Rule:
    """A rule, and how everything looks without it."""

    name: str
    space: Space
    pool_type: type[MemoryPool] = MemoryPool
    processes: dict[SessionKind, type[Process]] = field(default_factory=dict)
    off: Callable[[], AbstractContextManager[Any]] = nullcontext

    def model(self) -> Penstock:
        """Everything without the rule; to be explored inside of `off()`."""
        return Penstock(self.space, pool_type=self.pool_type, processes=self.processes)


class _UnfencedCommit(MemoryPool):
    def _commit(self, call: c.Commit) -> bool:
        with patch.object(MemorySessions, "is_active", lambda *_: True):
            return super()._commit(call)


class _RetiresAgain(MemoryPool):
    def _retire(self, call: c.Retire) -> bool:
        request = self._requests.get(call.request_id)
        if request is not None and request.state is c.RequestState.ENDED:
            request.state = c.RequestState.RUNNING
        return super()._retire(call)


class _KeepsNoResult(MemoryPool):
    def _retire(self, call: c.Retire) -> bool:
        retired = super()._retire(call)
        if retired:
            del self._requests[call.request_id], self._results[call.request_id]
        return retired


class _TokenizesAgain(MemoryPool):
    def _tokenized(self, call: c.Tokenized) -> bool:
        request = self._requests.get(call.request_id)
        if request is not None:
            request.state = c.RequestState.PROMPT
        return super()._tokenized(call)


RULES = [
    Rule(
        "commit is fenced",
        Space(
            "",
            schedulers=2,
            is_warm=True,
            faults=Faults(pauses=1, deaths=1),
            mortal=named("scheduler0"),
            pausing=named("scheduler0"),
        ),
        _UnfencedCommit,
    ),
    Rule("retire once", Space("", is_warm=True, max_tokens=1, faults=Faults(lost_replies=1)), _RetiresAgain),
    Rule(
        "the result is kept",
        Space("", gateways=2, max_tokens=1, is_warm=True, faults=Faults(deaths=1), mortal=named("gateway0")),
        _KeepsNoResult,
    ),
    Rule("tokenized only from PROMPT", Space("", tokenizers=2, max_tokens=1), _TokenizesAgain),
]
