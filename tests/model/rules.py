"""Each rule of recovery switched off, and a space in which that is found out.

A rule that lives in the bus functions is switched off by a change of their text, one that lives in a core by a patch of
it, and one that lives in a service's loop in the process that stands for it here.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from clients import TWO_MODELS, Asked, Client
from computing import PlanningScheduler, WorkerProcess, WorkerState
from continuations import SHARD, Samples
from edges import Gateway, GatewayState
from explored_pool import Fields
from generation import Epoch, SchedulerProcess, SchedulerState
from processes import Hold, Move, Process, Stage
from samplers import Kind
from spaces import named
from texts import DetokenizerProcess, DetokenizerState, Recorded
from world import Faults, Penstock, Space

from contract.domain.finish import FinishReason
from contract.domain.rows import TextRow
from detokenizer_svc.core.batch import LogBatch
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.sequence import Sequence
from gateway_svc.core.streams import ClientStream, Refusal
from scheduler_svc.core import rows as core_rows
from scheduler_svc.wire import ReceivedResult
from servicekit.bus import calls as c
from servicekit.bus.calls import SessionKind
from servicekit.bus.keys import Names
from servicekit.bus.library import Library, read_library

SPLICE = "a client got tokens that were not sampled one after another"


@dataclass(frozen=True)
class Cut:
    """A change of the functions' text, without which a rule is kept."""

    shipped: str  # stands in them once
    cut: str

    def made(self, library: Library) -> Library:
        """The functions with the change.

        Raises:
            ValueError: what is to be changed is not there, or not once: the functions have changed, and so must this.
        """
        number = library.source.count(self.shipped.encode())
        if number != 1:
            raise ValueError(f"found {number} times in the bus functions: {self.shipped}")
        return replace(library, source=library.source.replace(self.shipped.encode(), self.cut.encode()))


@dataclass(frozen=True)
class Rule:
    """A rule, and how everything looks without it."""

    name: str
    space: Space
    cut: Cut | None = None
    processes: dict[SessionKind, type[Process]] = field(default_factory=dict)
    off: Callable[[], AbstractContextManager[Any]] = nullcontext
    reason: str = ""  # what must be broken; empty: anything

    def model(self) -> Penstock:
        """Everything without the rule; to be explored inside of `off()`."""
        return Penstock(self.space, library=self.cut and self.cut.made(read_library()), processes=self.processes)


# In the cores.


def _new_tokens_without_hash(
    self: Detokenizer, sequence: Sequence, batch: LogBatch, row: int, token_ids: list[int], finish: FinishReason
) -> list[int] | None:
    known = len(sequence.token_ids) - int(batch.rows.positions[row])
    is_new = 0 <= known < len(token_ids) or (known == len(token_ids) and bool(finish))
    return token_ids[known:] if sequence.end is None and is_new else None


_accept = ClientStream.accept


def _accepts_without_hash(self: ClientStream, row: TextRow) -> TextRow | Refusal:
    state = self.sequences[row.sequence]
    known, known_chars = state.num_tokens - row.token_offset, state.num_chars - row.text_offset
    if 0 <= known <= len(row.token_ids) and 0 <= known_chars <= len(row.text):
        ids, text = row.token_ids[known:], row.text[known_chars:]
        offsets = {"token_offset": state.num_tokens, "text_offset": state.num_chars}
        row = replace(row, **offsets, chain=state.chain, token_ids=ids, text=text)  # type: ignore[arg-type]
    return _accept(self, row)


# In the services' loops.


class _KeepsAfterwards(WorkerProcess):
    """The result goes before the logprobs or the vector of the prompt."""

    def _finish(self, me: WorkerState, pool: int, plan: tuple[int, bytes, int, tuple[int, ...]]) -> Iterator[Move]:
        if me.keeps_prompt:
            for move in self._publish(me, pool, plan):
                yield move._replace(me=me._replace(keeps_prompt=False))
        else:
            kept = self._keep(me, pool, plan[1])
            yield kept._replace(me=me._replace(plan=None))


class _NoWitness(Gateway):
    def witness(self, me: GatewayState, asked: Asked, client: Client) -> c.Submit:
        return self.submission(me, asked)


class _CancelsAnywhere(Gateway):
    def giving_up(self, me: GatewayState, asked: Asked) -> c.Cancel:
        return replace(super().giving_up(me, asked), route=b"")


class _NeverAsksAgain(Gateway):
    def moves(self, me: GatewayState, pool: int, clients: tuple[Client, ...]) -> Iterator[Move]:
        return (move for move in super().moves(me, pool, clients) if not move.is_lazy)


class _KeepsTexts(DetokenizerProcess):
    """After a restart of the server it goes on with what it knows."""

    def recovered(self, me: DetokenizerState) -> DetokenizerState:
        return super().recovered(me._replace(hold=me.hold._replace(new_run=False)))


class _KeepsRequests(SchedulerProcess):
    """After a restart of the server it goes on with what it knows."""

    def greeted(self, me: SchedulerState, hold: Hold) -> SchedulerState:
        return me._replace(hold=hold._replace(stage=Stage.REVALIDATE))


class _ReadsTwice(SchedulerProcess):
    """Checkpoints first, and the log in a call of its own."""

    def load(self, me: SchedulerState, pool: int) -> Iterator[Move]:
        loaded, changed = self.pool.call(pool, c.Load(self.sid(me), me.to_load))
        if me.aside is None:
            aside = Recorded(repr(loaded), loaded)
            yield Move(f"{self.name}: loads checkpoints", me._replace(aside=aside), changed)
        else:
            before = me.aside.answer
            mixed = c.Loaded(before.requests, loaded.log, before.checkpoints)
            yield Move(f"{self.name}: loads the log", self.loaded(me._replace(aside=None), mixed), changed)


class _ReadsBeforeItTakes(SchedulerProcess):
    """What another scheduler has logged is read while that one may still write."""

    def take(self, me: SchedulerState, pool: int, dead: bytes) -> Iterator[Move]:
        keys = self.pool.keys
        if me.aside is None:
            stored = [self.pool.call(pool, c.Fetch(request_id))[0] for request_id in self.asked]
            requests = [each for each in stored if each is not None and each.owner == dead]
            log, _ = self.pool.call(pool, c.Read(Fields({keys.tokens(SHARD): b"0-0"}), 512))
            loaded = c.Loaded(requests, {SHARD: log.get(keys.tokens(SHARD), [])}, {})
            yield Move(f"{self.name}: reads the log", me._replace(aside=Recorded(repr(loaded), loaded)), pool)
            return
        taken, changed = self.pool.call(pool, c.Take(self.sid(me), dead))
        if taken is not None:
            after = self.loaded(me._replace(aside=None), me.aside.answer)
            yield Move(f"{self.name}: takes over {dead.decode().strip()}", after, changed)


class _TakesAnyResult(PlanningScheduler):
    def belongs(self, me: SchedulerState, epoch: Epoch, received: ReceivedResult) -> bool:
        return True


class _GoesOnWithAnyModel(PlanningScheduler):
    def may_serve(self, epoch: Epoch, samples: Samples) -> bool:
        return True


_RESTART = Space("", is_warm=True, keeps_nothing=True, faults=Faults(restarts=1, lost_writes=2))
_TAKE_OVER = Space("", schedulers=2, is_warm=True, faults=Faults(pauses=1), pausing=named("scheduler0"))
_TAKE_OVER_AND_DEATH = Space(
    "",
    schedulers=2,
    is_warm=True,
    faults=Faults(pauses=1, deaths=1),
    mortal=named("scheduler0"),
    pausing=named("scheduler0"),
)
_COMPACTION = Space("", schedulers=2, is_warm=True, compacts=True, faults=Faults(deaths=1), mortal=named("scheduler0"))

_UNFENCED_COMMIT = Cut(
    "'state') ~= 'active' then\n    return 0\n  end\n  local started",
    "'state') == 'fenced' then\n    return 0\n  end\n  local started",
)

RULES = [
    Rule("commit is fenced", _TAKE_OVER_AND_DEATH, _UNFENCED_COMMIT),
    Rule(
        "retire once",
        Space("", is_warm=True, max_tokens=1, faults=Faults(lost_replies=1)),
        Cut(
            "if request[1] == 'RUNNING' and request[2] == shard then\n      if request[6] then",
            "if request[1] and request[2] == shard then\n      if request[6] then",
        ),
    ),
    Rule(
        "the result is kept",
        Space("", gateways=2, max_tokens=1, is_warm=True, faults=Faults(deaths=1), mortal=named("gateway0")),
        Cut(
            "redis.call('PEXPIRE', key, ttl)", f"redis.call('DEL', key, prefix .. '{Names.RESULT.decode()}' .. digits)"
        ),
    ),
    Rule(
        "tokenized only from PROMPT",
        Space("", tokenizers=2, max_tokens=1),
        Cut("if request[1] ~= 'PROMPT' then", "if not request[1] or request[1] == 'ENDED' then"),
    ),
    Rule(
        "registering ends a pairing",
        Space("", workers=1, max_tokens=1, is_warm=True, faults=Faults(lost_replies=1)),
        Cut(
            "redis.call('HDEL', key, 'owner')\n  redis.call('SADD'",
            "if redis.call('HGET', key, 'incarnation') ~= sid then\n    redis.call('HDEL', key, 'owner')\n  end\n"
            "  redis.call('SADD'",
        ),
        reason="no end can be reached",
    ),
    Rule("first take, then load", _TAKE_OVER, processes={SessionKind.SCHEDULER: _ReadsBeforeItTakes}),
    Rule("checkpoint and log in one read", _COMPACTION, processes={SessionKind.SCHEDULER: _ReadsTwice}),
    Rule(
        "compaction under the lease",
        Space("", detokenizers=2, is_warm=True, compacts=True, faults=Faults(pauses=1), pausing=named("detokenizer0")),
        Cut(
            "if not leases_shard(prefix, sid, shard) then\n    return 0\n  end\n  for i = 4, #args, 2 do",
            "for i = 4, #args, 2 do",
        ),
    ),
    Rule(
        "claim and load read the cancel flag",
        Space("", max_tokens=1, may_cancel=True),
        Cut("table.insert(request, 1, id)", "table.insert(request, 1, id)\n  request[10] = '0'"),
    ),
    Rule(
        "results of another epoch are dropped",
        Space("", workers=2, is_warm=True, samples=2, max_tokens=1, faults=Faults(pauses=1), pausing=named("worker0")),
        processes={SessionKind.SCHEDULER: _TakesAnyResult},
    ),
    Rule(
        "a request goes on with its model",
        Space("", workers=2, has_two_models=True, is_warm=True, faults=Faults(deaths=1), mortal=named("worker0")),
        processes={SessionKind.SCHEDULER: _GoesOnWithAnyModel},
        reason=TWO_MODELS,
    ),
    Rule(
        "gateways ask again for what is missing",
        Space("", is_warm=True, max_tokens=1, samples=2, faults=Faults(refusals=1)),
        processes={SessionKind.GATEWAY: _NeverAsksAgain},
    ),
    Rule(
        "a request is given up only where its client was lost",
        Space("", gateways=2, is_warm=True, faults=Faults(broken_connections=1)),
        processes={SessionKind.GATEWAY: _CancelsAnywhere},
    ),
    Rule(
        "what has ended counts for its key as running no more",
        Space("", is_warm=True),
        Cut("end_metered(prefix, request[6], digits)", ""),
    ),
    Rule("gateways are witnesses", replace(_RESTART, max_tokens=1), processes={SessionKind.GATEWAY: _NoWitness}),
    Rule("a restarted pool settles", replace(_RESTART, max_tokens=1), Cut("if not earliest then", "if true then")),
    Rule(
        "logprobs of a prompt are kept before the result",
        Space("scored", workers=1, scores_prompts=True, max_tokens=1, is_warm=True),
        processes={SessionKind.WORKER: _KeepsAfterwards},
        reason="nothing is kept of its prompt",
    ),
    Rule(
        "a vector is kept before the result",
        Space("pooled", workers=1, pools_prompts=True, max_tokens=1, is_warm=True),
        processes={SessionKind.WORKER: _KeepsAfterwards},
        reason="nothing is kept of its prompt",
    ),
    Rule("detokenizers begin anew after a restart", _RESTART, processes={SessionKind.DETOKENIZER: _KeepsTexts}),
    Rule("schedulers begin anew after a restart", _RESTART, processes={SessionKind.SCHEDULER: _KeepsRequests}),
    Rule(
        "ends are derived after a witness",
        replace(_RESTART, kinds=(Kind.PLAIN, Kind.EOS)),
        off=lambda: patch.object(core_rows, "finish_of", lambda *_: FinishReason.UNSPECIFIED),
    ),
    Rule(
        "gateways check the hash",
        replace(_RESTART, pausing=named("gateway0"), faults=Faults(pauses=1, restarts=1, lost_writes=2)),
        off=lambda: patch.object(ClientStream, "accept", _accepts_without_hash),
        reason=SPLICE,
    ),
    Rule(
        "detokenizers check the hash",
        _TAKE_OVER,
        _UNFENCED_COMMIT,  # the first line of defence; without it alone nothing worse than a standstill happens
        off=lambda: patch.object(Detokenizer, "_new_tokens", _new_tokens_without_hash),
        reason=SPLICE,
    ),
]
