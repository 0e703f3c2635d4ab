"""Everything together: the pool, the processes, their clients, and what goes wrong; a model for `explorer.explore`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from clients import Client, Got, Phase, ask, contradicts
from computing import PlanningScheduler, WorkerProcess
from continuations import ENCODER, LIMITS, MODELS, SHARD
from edges import Gateway, TokenizerProcess, with_client
from explored_pool import ExploredPool, Interned
from generation import SchedulerProcess
from processes import Move, Process, Stage
from samplers import Kind, Samplers
from texts import DetokenizerProcess, Shards

from servicekit.bus import keys as k
from servicekit.bus.calls import ReadGroup, RequestState, SessionKind, Tokenized
from servicekit.bus.library import Library


class Faults(NamedTuple):
    """How many of each may still happen."""

    deaths: int = 0  # of a process of the kinds in `Space.mortal`; a new one takes its place
    pauses: int = 0  # that outlast a lease
    lost_replies: int = 0
    restarts: int = 0  # of the server
    lost_writes: int = 0  # by each of those, at most
    refusals: int = 0  # of a server that is out of memory, where a process does not just try again
    broken_connections: int = 0  # between a client and its gateway


@dataclass(frozen=True)
class Space:
    """What is explored."""

    name: str
    gateways: int = 1
    tokenizers: int = 0  # none: requests have their tokens from the start
    schedulers: int = 1
    workers: int = 0  # none: a scheduler samples by itself
    detokenizers: int = 1
    requests: int = 1
    samples: int = 1
    max_tokens: int = 2
    kinds: tuple[Kind, ...] = (Kind.PLAIN,)
    may_cancel: bool = False
    compacts: bool = False  # at any time, not only when the log is long
    mortal: frozenset[str] = frozenset()  # names of the processes that may die
    pausing: frozenset[str] = frozenset()
    keeps_nothing: bool = False  # a restart comes soon and brings the first state back
    pools_prompts: bool = False  # the requests ask for vectors of their prompts, likewise
    searches: bool = False  # the outputs are found by a beam search
    has_encoder: bool = False  # workers compute prompts whole, without blocks
    scores_prompts: bool = False  # the requests ask for logprobs of their prompts, which workers keep
    has_two_models: bool = False  # the first worker has one, the second another
    # The first scheduler has claimed what there is, the first detokenizer has the shard, and of two models the first
    # worker is paired.
    is_warm: bool = False
    faults: Faults = field(default_factory=Faults)


class World(NamedTuple):
    """One state of everything; processes, pool and clients by number."""

    pool: int
    clients: int
    faults: Faults
    is_witness_gone: bool  # a gateway died, or paused for longer than its lease
    kept: int  # the pool that a restart brings back: nothing that is written now will last; -1: all lasts
    num_unkept: int  # writes since then
    wrong: int  # a number of `Promises`
    processes: tuple[int, ...]


class Penstock:
    """The model of one space. `library` and `processes` may leave rules out."""

    def __init__(
        self,
        space: Space,
        *,
        library: Library | None = None,
        processes: Mapping[SessionKind, type[Process]] = MappingProxyType({}),
    ) -> None:
        self.space = space
        self.pool = ExploredPool(library)
        self.samplers = Samplers()
        self.asked = tuple(
            ask(
                index,
                num_samples=space.samples,
                max_tokens=space.max_tokens,
                has_stop=Kind.STOP in space.kinds,
                scores_prompt=space.scores_prompts,
                pools=space.pools_prompts,
                searches=space.searches,
            )
            for index in range(space.requests)
        )
        self._values = Interned()
        self._reasons = Interned()
        self._reasons.number("")
        self._moves: dict[tuple[int, ...], list[tuple[Move, int, int, int, int]]] = {}
        self.processes = tuple(self._make(processes))
        self._is_end: dict[tuple[int, int], bool] = {}
        self._wrongs: dict[tuple[int, int], str] = {}
        self._steady = self._find_steady()

    def _make(self, others: Mapping[SessionKind, type[Process]]) -> Iterator[Process]:
        space, asked, pool = self.space, self.asked, self.pool
        models = MODELS if space.has_two_models else MODELS[:1]
        limits = ENCODER if space.has_encoder else LIMITS
        shards, indices = Shards(pool), {each.request_id: each.index for each in asked}
        scheduler = PlanningScheduler if space.workers else SchedulerProcess
        of_kind: dict[SessionKind, tuple[int, type[Any], tuple[Any, ...]]] = {
            SessionKind.GATEWAY: (space.gateways, Gateway, (asked, self.samplers, space.may_cancel)),
            SessionKind.TOKENIZER: (space.tokenizers, TokenizerProcess, (asked,)),
            SessionKind.SCHEDULER: (space.schedulers, scheduler, (asked, self.samplers, space.kinds, limits)),
            SessionKind.WORKER: (space.workers, WorkerProcess, (indices, self.samplers, space.kinds, models, limits)),
            SessionKind.DETOKENIZER: (space.detokenizers, DetokenizerProcess, (shards, space.compacts)),
        }
        for kind, (number, process_type, arguments) in of_kind.items():
            for index in range(number):
                yield others.get(kind, process_type)(f"{kind.value}{index}", pool, *arguments)

    # The model.

    def initial(self) -> World:
        """All processes have said hello; where there are no tokenizers, the requests have their tokens."""
        client = Client(Phase.NEW, self.processes[0].name, False, (Got(),) * self.space.samples)
        clients = (client,) * self.space.requests
        states = [process.born(0) for process in self.processes]
        pool = self.pool.first
        for index, process in enumerate(self.processes):
            while states[index].hold.stage is not Stage.UP:
                states[index], pool, clients = self._first_move(process, states[index], pool, clients)
        states[0], pool, clients = self._first_move(self.processes[0], states[0], pool, clients)
        if not self.space.tokenizers:
            while any(client.phase is Phase.NEW for client in clients):
                states[0], pool, clients = self._first_move(self.processes[0], states[0], pool, clients)
            for asked in self.asked:
                hints, pool = self.pool.call(pool, ReadGroup(self.pool.keys.prompts, k.TOKENIZERS, b"t", 1))
                tokenized = Tokenized(asked.request_id, hints[0].entry_id, asked.meta, 0, token_ids=asked.token_ids)
                _, pool = self.pool.call(pool, tokenized)
        if self.space.is_warm:
            states, pool = self._warm(states, pool, clients)
        number = self._values.number
        processes = tuple(number(state) for state in states)
        kept = pool if self.space.keeps_nothing else -1
        return World(pool, number(clients), self.space.faults, False, kept, 0, 0, processes)

    def _warm(self, states: list[Any], pool: int, clients: Any) -> tuple[list[Any], int]:
        names = [process.name for process in self.processes]
        are_ready: list[tuple[str, Callable[[Any], bool]]] = [
            ("detokenizer0", lambda state: state.is_serving),
            ("scheduler0", lambda state: len(state.held) == self.space.requests),
        ]
        if self.space.has_two_models:
            are_ready.append(("worker0", lambda state: state.position is not None))
            are_ready.append(("scheduler0", lambda state: state.epoch is not None))
        for name, is_done in are_ready:
            index = names.index(name)
            while not is_done(states[index]):
                states[index], pool, _ = self._first_move(self.processes[index], states[index], pool, clients)
        return states, pool

    def _first_move(self, process: Process, state: Any, pool: int, clients: Any) -> tuple[Any, int, Any]:
        move = next(process.moves(state, pool, clients))
        return move.me, move.pool, clients if move.clients is None else move.clients

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Each process's next steps, and all that may go wrong."""
        for index in self._steady:
            moves = self._moves_of(index, world)
            if len(moves) == 1 and moves[0][0].is_reading:
                move, me, clients, _, wrong = moves[0]
                yield move.name, self._after(world, index, move.pool, me, clients, wrong)
                return
        is_busy = False
        lazy: list[tuple[str, World]] = []
        for index in range(len(self.processes)):
            for move, me, clients, if_lost, wrong in self._moves_of(index, world):
                if move.is_lazy:
                    lazy.append((move.name, self._after(world, index, move.pool, me, clients, wrong)))
                    continue
                writes = move.pool != world.pool
                if writes and world.kept >= 0 and world.num_unkept >= self.space.faults.lost_writes:
                    continue
                is_busy = True
                yield move.name, self._after(world, index, move.pool, me, clients, wrong)
                if move.if_full is not None and world.faults.refusals:
                    faults = world.faults._replace(refusals=world.faults.refusals - 1)
                    refused = self._after(world, index, world.pool, self._values.number(move.if_full), clients, 0)
                    yield f"{move.name}; refused by a full server", refused._replace(faults=faults)
                if writes and world.faults.lost_replies:
                    faults = world.faults._replace(lost_replies=world.faults.lost_replies - 1)
                    after = self._after(world, index, move.pool, if_lost, world.clients, 0)
                    yield f"{move.name}; the reply is lost", after._replace(faults=faults)
        if not is_busy and world.kept < 0:
            yield from lazy
        yield from self._faults(world)

    def wrong(self, world: World) -> str:
        """A promise that a client, or the books, found broken."""
        if world.wrong:
            return str(self._reasons.value(world.wrong))
        if world.is_witness_gone and self._has_restarted(world):
            return ""  # then a client may be refused, and a result may be of another history
        key = (world.pool, world.clients)
        known = self._wrongs.get(key)
        if known is None:
            known = self._wrongs[key] = self._what_is_wrong(*key)
        return known

    def _what_is_wrong(self, pool: int, clients: int) -> str:
        for asked, client in zip(self.asked, self._values.value(clients), strict=True):
            if client.phase is Phase.REFUSED:
                return f"a client was refused: {client.why}"
            result = self.pool.view(pool).results.get(asked.request_id)
            if result is not None and contradicts(asked, client, result):
                return "the result is not what its client got"
        return ""

    def is_end(self, world: World) -> bool:
        """Every client has its end, and nothing is left in the pool but results."""
        if world.kept >= 0:
            return False
        key = (world.pool, world.clients)
        known = self._is_end.get(key)
        if known is None:
            clients = self._values.value(world.clients)
            ended = all(client.phase in (Phase.ENDED, Phase.REFUSED) for client in clients)
            known = self._is_end[key] = ended and self._is_clean(world.pool)
        return known

    # Steps of processes.

    def _find_steady(self) -> tuple[int, ...]:
        """Processes that nothing can happen to. Where all that such a one can do is to read the next entry of a stream,
        that comes first and alone: what others do meanwhile neither changes the entry nor what they see. So only the
        order of steps that commute is left out.
        """
        space, faults = self.space, self.space.faults
        if faults.restarts or space.may_cancel:
            return ()
        return tuple(
            index
            for index, process in enumerate(self.processes)
            if not (faults.deaths and process.name in space.mortal)
            and not (faults.pauses and process.name in space.pausing)
        )

    def _moves_of(self, index: int, world: World) -> list[tuple[Move, int, int, int, int]]:
        process, me = self.processes[index], world.processes[index]
        key = (index, me, world.pool, world.clients if process.sees_clients else 0)
        moves = self._moves.get(key)
        if moves is None:
            value, number = self._values.value, self._values.number
            state, clients = value(me), value(world.clients)
            moves = self._moves[key] = []
            for move in process.moves(state, world.pool, clients):
                if_lost = process.disconnected(state) if move.if_lost is None else move.if_lost
                clients_after = world.clients if move.clients is None else number(move.clients)
                wrong = self._reasons.number(move.wrong)
                moves.append((move, number(move.me), clients_after, number(if_lost), wrong))
        if process.sees_clients:
            return moves
        return [(move, me, world.clients, if_lost, wrong) for move, me, _, if_lost, wrong in moves]

    def _after(self, world: World, index: int, pool: int, me: int, clients: int, wrong: int) -> World:
        processes = (*world.processes[:index], me, *world.processes[index + 1 :])
        num_unkept = world.num_unkept + (world.kept >= 0 and pool != world.pool)
        return world._replace(pool=pool, clients=clients, num_unkept=num_unkept, wrong=wrong, processes=processes)

    # What goes wrong.

    def _faults(self, world: World) -> Iterator[tuple[str, World]]:
        if world.kept < 0 or world.num_unkept < self.space.faults.lost_writes:
            yield from self._expiries(world)
            yield from self._settlings(world)
        faults = world.faults
        if faults.deaths:
            yield from self._deaths(world, faults._replace(deaths=faults.deaths - 1))
        if faults.broken_connections:
            yield from self._breaks(world, faults._replace(broken_connections=faults.broken_connections - 1))
        if faults.restarts and world.kept < 0:
            yield "the server keeps nothing of what follows", world._replace(kept=world.pool)
        if world.kept >= 0:
            after = faults._replace(restarts=faults.restarts - 1)
            pool = self.pool.restart(world.kept)
            name = f"the server restarts, {world.num_unkept} writes are lost"
            yield name, world._replace(pool=pool, faults=after, kept=-1, num_unkept=0)

    def _settlings(self, world: World) -> Iterator[tuple[str, World]]:
        """The second after a restart is over. Within it every gateway that lives greets the server: so much of time is
        taken for granted."""
        view = self.pool.view(world.pool)
        states = [self._values.value(me) for me in world.processes[: self.space.gateways]]
        sids = [process.sid(me) for process, me in zip(self.processes, states, strict=False)]
        if view.must_settle and all(sid in view.sessions for sid in sids):
            yield "the second after the restart is over", world._replace(pool=self.pool.settle(world.pool))

    def _expiries(self, world: World) -> Iterator[tuple[str, World]]:
        """A lease runs out: of a process that died, or of one that pauses."""
        faults = world.faults
        living = {
            process.sid(self._values.value(me)): process.name
            for process, me in zip(self.processes, world.processes, strict=True)
        }
        for sid, (kind, _, is_running) in self.pool.view(world.pool).sessions.items():
            if not is_running:
                continue
            name = sid.decode().strip()
            if sid not in living:
                yield f"the lease of {name} runs out", world._replace(pool=self.pool.expire(world.pool, sid))
            elif faults.pauses and living[sid] in self.space.pausing:
                pool, after = self.pool.expire(world.pool, sid), faults._replace(pauses=faults.pauses - 1)
                is_gone = world.is_witness_gone or kind is SessionKind.GATEWAY
                after_pause = world._replace(pool=pool, faults=after, is_witness_gone=is_gone)
                yield f"{name} pauses, its lease runs out", after_pause

    def _breaks(self, world: World, faults: Faults) -> Iterator[tuple[str, World]]:
        """A client loses its connection; its gateway lives, and gives its request up after a grace."""
        clients, names = self._values.value(world.clients), [process.name for process in self.processes]
        for asked, client in zip(self.asked, clients, strict=True):
            if client.gateway is None or client.phase is not Phase.OPEN:
                continue
            index = names.index(client.gateway)
            me = self._values.value(world.processes[index])
            me = me._replace(lost=me.lost | {asked.index}, wanted=me.wanted - {asked.index})
            changed = self._values.number(with_client(clients, asked.index, client._replace(gateway=None)))
            after = self._after(world, index, world.pool, self._values.number(me), changed, 0)
            yield f"client {asked.index} loses its connection", after._replace(faults=faults)

    def _deaths(self, world: World, faults: Faults) -> Iterator[tuple[str, World]]:
        value, number = self._values.value, self._values.number
        for index, process in enumerate(self.processes):
            if process.name not in self.space.mortal:
                continue
            born = process.born(value(world.processes[index]).hold.number + 1)
            after = self._after(world, index, world.pool, number(born), world.clients, 0)._replace(faults=faults)
            if process.kind is SessionKind.GATEWAY:
                clients = tuple(
                    client._replace(gateway=None) if client.gateway == process.name else client
                    for client in value(world.clients)
                )
                after = after._replace(clients=number(clients), is_witness_gone=True)
            yield f"{process.name} dies", after

    def _has_restarted(self, world: World) -> bool:
        return world.faults.restarts < self.space.faults.restarts

    # The books at the end.

    def _is_clean(self, pool: int) -> bool:
        view, keys = self.pool.view(pool), self.pool.keys
        return (
            all(request.state is RequestState.ENDED and not request.owner for request in view.requests.values())
            and view.results.keys() == view.requests.keys()
            and not view.lengths.get(keys.prompts)
            and not view.lengths.get(keys.requests)
            and not view.lengths.get(keys.tokens(SHARD))
            and view.is_clean
        )
