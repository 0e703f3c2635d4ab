"""Detokenizers: the real shard of the log with its real core, its real rebuild, and the calls of its service's loop."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from clients import Client
from continuations import SHARD
from edges import next_entry
from explored_pool import ExploredPool, Fields, Interned
from processes import Hold, Move, Process
from samplers import make_tokenizer

from detokenizer_svc import wire
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.extent import Compaction, LogLimits
from detokenizer_svc.core.textrows import TextRows
from detokenizer_svc.rebuild import rebuild
from detokenizer_svc.shard import Shard, Taken
from servicekit.bus import BusUnavailable
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, Call, Cancel, Entry, LeaseShard, RequestState, Retire, SessionKind


@dataclass(frozen=True)
class Recorded:
    """An answer that may stand in a state."""

    text: str
    answer: Any = field(compare=False)


class Rebuilding(NamedTuple):
    """What a rebuild asks next, or the shard that it made, or neither: the shard was lost meanwhile."""

    call: Call[Any] | None = None
    shard: int | None = None
    taken: tuple[Taken, ...] = ()


class _NextCall(Exception):  # noqa: N818
    """A rebuild got as far as the answers that there are."""

    def __init__(self, call: Call[Any]) -> None:
        self.call = call


class Shards:
    """The states of real shards as numbers: what one step leads to is looked up where it was seen before."""

    def __init__(self, pool: ExploredPool) -> None:
        self._keys = pool.keys
        self._core = Detokenizer(make_tokenizer())
        self._interned = Interned()
        self._shards: list[Shard] = []
        self._known: dict[Any, tuple[int, Any]] = {}
        self._rebuildings: dict[Any, Rebuilding] = {}

    def shard(self, number: int) -> Shard:
        """To look at, and not to change."""
        return self._shards[number]

    def take(self, number: int, entry: Entry) -> tuple[int, Taken]:
        """The next entry of the log."""
        return self._step((number, "take", entry.entry_id, Fields(entry.fields)), lambda shard: shard.take(entry))

    def attach(self, number: int, entry: Entry) -> tuple[int, Taken]:
        """The next attachment."""
        return self._step((number, "attach", entry.entry_id, Fields(entry.fields)), lambda shard: shard.attach(entry))

    def compacted(self, number: int, compaction: Compaction, num_bytes: int) -> int:
        """The log was compacted."""
        return self._step((number, compaction), lambda shard: shard.extent.compacted(compaction, num_bytes))[0]

    def rebuild(self, sid: bytes, answers: tuple[Recorded, ...]) -> Rebuilding:
        """How far the service's own rebuild gets with these answers to its calls."""
        known = self._rebuildings.get((sid, answers))
        if known is None:
            known = self._rebuildings[sid, answers] = self._rebuild(sid, iter(answers))
        return known

    def _rebuild(self, sid: bytes, answers: Iterator[Recorded]) -> Rebuilding:
        def answer(call: Call[Any]) -> Any:
            recorded = next(answers, None)
            if recorded is None:
                raise _NextCall(call)
            return recorded.answer

        def execute(calls: Sequence[Call[Any]]) -> list[Any]:
            return [answer(call) for call in calls]

        shard = Shard(SHARD, self._keys, self._core.sibling())
        try:
            taken = tuple(taken for _, taken in rebuild(execute, sid, shard))
        except _NextCall as next_call:
            return Rebuilding(call=next_call.call)
        except BusUnavailable:
            return Rebuilding()
        return Rebuilding(shard=self._number(shard), taken=taken)

    def _step(self, key: tuple[Any, ...], change: Callable[[Shard], Any]) -> tuple[int, Any]:
        known = self._known.get(key)
        if known is None:
            core = self._core
            # What sequences refer to as well: a copy of a decoder is a copy of its tokenizer.
            decoders = (core._decoders.of(skip_special_tokens=skip) for skip in (True, False))
            shared = (core._decoders, core._stats, *decoders)
            shard = copy.deepcopy(self._shards[key[0]], {id(each): each for each in shared})
            result = change(shard)
            known = self._known[key] = self._number(shard), result
        return known

    def _number(self, shard: Shard) -> int:
        number = self._interned.number(_projected(shard))
        if number == len(self._shards):
            self._shards.append(shard)
        return number


def _projected(shard: Shard) -> Any:
    """All that the future of a shard depends on."""
    core, extent = shard.detokenizer, shard.extent
    live = tuple(
        (
            request_id,
            request.num_ended,
            tuple((s.token_ids.tobytes(), s.num_chars, repr(s.end), repr(s.told), s.route) for s in request.sequences),
        )
        for request_id, request in core._requests.items()
    )
    early = tuple((request_id, route, tuple(offsets)) for request_id, (route, offsets) in shard._early.items())
    read = (extent._entry_id, extent._num_entries, extent._num_bytes, extent._num_last_bytes)
    marks = (read, extent._kept, tuple(extent._needed.items()), extent._num_written)
    return shard.log_position, shard.attach_position, marks, early, live, frozenset(core._requests._ended)


class DetokenizerState(NamedTuple):
    hold: Hold
    shard: int | None = None  # a number of `Shards`
    answers: tuple[Recorded, ...] | None = None  # of the calls of a rebuild; None: none goes on
    out: tuple[Call[Any], ...] = ()  # effects, in order
    doubts: bool = False  # a call under the lease was refused

    @property
    def is_serving(self) -> bool:
        return self.shard is not None


class DetokenizerProcess(Process):
    """Leases the shard, rebuilds it, and turns rows into text and ends."""

    kind = SessionKind.DETOKENIZER

    def __init__(self, name: str, pool: ExploredPool, shards: Shards, compacts: bool) -> None:
        super().__init__(name, pool)
        self.shards = shards
        self.limits = LogLimits(0, 0) if compacts else LogLimits(1 << 20, 1 << 30)

    def born(self, number: int) -> DetokenizerState:
        return DetokenizerState(Hold(number))

    def recovered(self, me: DetokenizerState) -> DetokenizerState:
        hold = me.hold
        forgets = hold.is_lost or hold.new_run or not me.is_serving  # a rebuild that broke off begins anew
        return DetokenizerState(hold) if forgets else me

    def work(self, me: DetokenizerState, pool: int, clients: tuple[Client, ...]) -> Iterator[Move]:
        sid = self.sid(me)
        if me.answers is not None:
            yield self._rebuild(me, pool, me.answers)
        elif me.shard is None:
            granted, changed = self.pool.call(pool, LeaseShard(sid, SHARD))
            if granted:
                yield Move(f"{self.name}: leases the shard", me._replace(answers=()), changed)
        else:
            if me.doubts or self.pool.view(pool).leases.get(SHARD) != sid:
                held, changed = self.pool.call(pool, self.confirmation(me))
                kept = me._replace(doubts=False) if held else DetokenizerState(me.hold)
                yield Move(f"{self.name}: confirms its lease, {held}", kept, changed)
            yield from self._serve(me, pool, me.shard)

    def confirmation(self, me: DetokenizerState) -> LeaseShard:
        return LeaseShard(self.sid(me), SHARD, held=True)

    def _rebuild(self, me: DetokenizerState, pool: int, answers: tuple[Recorded, ...]) -> Move:
        """The next call of a rebuild, or its end."""
        rebuilding = self.shards.rebuild(self.sid(me), answers)
        if rebuilding.call is not None:
            answer, changed = self.pool.call(pool, rebuilding.call)
            asked = me._replace(answers=(*answers, Recorded(repr(answer), answer)))
            return Move(f"{self.name}: rebuilds, {type(rebuilding.call).__name__}", asked, changed)
        if rebuilding.shard is None:
            return Move(f"{self.name}: lost the shard", self.disconnected(DetokenizerState(me.hold)), pool)
        out: tuple[Call[Any], ...] = ()
        for taken in rebuilding.taken:
            out += self._effects(me, taken, is_rebuilding=True)
        snapshots = self.shards.shard(rebuilding.shard).detokenizer.snapshots()
        out += tuple(self._text(me, route, rows) for route, rows in snapshots if len(rows))
        rebuilt = me._replace(shard=rebuilding.shard, answers=None, out=out)
        wrong = next((taken.poison for taken in rebuilding.taken if taken.poison), "")
        return Move(f"{self.name}: has rebuilt", rebuilt, pool, wrong=wrong)

    def _serve(self, me: DetokenizerState, pool: int, number: int) -> Iterator[Move]:
        shard = self.shards.shard(number)
        if me.out:
            yield self._send(me, pool)
        if any(not isinstance(call, Retire) for call in me.out):
            return
        if entry := next_entry(self.pool, pool, shard.log_stream, shard.log_position):
            number, taken = self.shards.take(number, entry)
            after = me._replace(shard=number, out=self._effects(me, taken))
            yield Move(f"{self.name}: reads the log", after, pool, wrong=taken.poison, is_reading=True)
        elif entry := next_entry(self.pool, pool, shard.attach_stream, shard.attach_position):
            number, taken = self.shards.attach(number, entry)
            after = me._replace(shard=number, out=self._effects(me, taken))
            yield Move(f"{self.name}: reads an attachment", after, pool, wrong=taken.poison)
        if not me.out:
            yield from self._compact(me, pool, shard)

    def _send(self, me: DetokenizerState, pool: int) -> Move:
        call, *rest = me.out
        answer, changed = self.pool.call(pool, call)
        if not isinstance(call, Retire):
            # Text that a full server refuses is let go: gateways ask for it again.
            texts_gone = tuple(each for each in me.out if not isinstance(each, Append))
            if_full = me._replace(out=texts_gone) if isinstance(call, Append) else None
            return Move(f"{self.name}: {type(call).__name__}", me._replace(out=tuple(rest)), changed, if_full=if_full)
        request = self.pool.view(pool).requests.get(call.request_id)
        has_ended = request is not None and request.state is RequestState.ENDED
        wrong = "a request was ended twice" if answer and has_ended else ""
        after = me._replace(out=tuple(rest), doubts=me.doubts or not answer)
        return Move(f"{self.name}: retires, {answer}", after, changed, wrong=wrong)

    def _compact(self, me: DetokenizerState, pool: int, shard: Shard) -> Iterator[Move]:
        """As the service does when it has sent all effects."""
        assert me.shard is not None
        compaction = shard.extent.compaction(self.limits)
        if compaction is None:
            return
        (call,) = shard.compact(compaction, self.sid(me), 0)
        done, changed = self.pool.call(pool, call)
        num_bytes = sum(len(payload) for _, payload in call.checkpoints)
        number = self.shards.compacted(me.shard, compaction, num_bytes) if done else me.shard
        name = f"{self.name}: compacts, {len(call.checkpoints)} checkpoints" + ("" if done else ", refused")
        yield Move(name, me._replace(shard=number, doubts=me.doubts or not done), changed)

    def _effects(self, me: DetokenizerState, taken: Taken, *, is_rebuilding: bool = False) -> tuple[Call[Any], ...]:
        """As the service puts them into its next write, before the requests that it has yet to retire."""
        sid, effects = self.sid(me), taken.effects
        texts = [(route, rows) for route, rows in effects.texts.items() if len(rows)]
        if is_rebuilding:
            texts = [(each.route, each.result.rows()) for each in effects.retirements]
        out: list[Call[Any]] = [self._text(me, route, rows) for route, rows in texts]
        out += [Cancel(c.request_id, int(c.reason), 0, sequence=c.sequence) for c in effects.cancels]
        out += me.out
        for retirement in effects.retirements:
            result = wire.encode_finished(retirement.result)
            out.append(Retire(sid, SHARD, retirement.request_id, result, 1000, retirement.route))
        for route, request_id in effects.results:
            out.append(Append(self.pool.keys.text(route), Fields({k.REQUEST: request_id}), k.TEXT_CAP))
        return tuple(out)

    def _text(self, me: DetokenizerState, route: bytes, rows: TextRows) -> Append:
        payload = wire.encode_text(rows, self.sid(me), 0)
        return Append(self.pool.keys.text(route), Fields({k.PAYLOAD: payload}), k.TEXT_CAP)
