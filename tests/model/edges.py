"""Gateways and tokenizers: the smallest processes that do with each call what the services do."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from clients import TENANT, Asked, Client, Phase, is_whole, prompt_output, receive, stream_of
from explored_pool import ExploredPool, Fields
from processes import Hold, Move, Process, Stage
from samplers import Samplers

from contract.domain.finish import CancelReason
from contract.domain.rows import TextRow
from gateway_svc.wire.text import decode_finished, decode_text, encode_offsets
from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Attach,
    Call,
    Cancel,
    Entry,
    LastId,
    Metered,
    Read,
    ReadGroup,
    ReadPromptOutput,
    Reclaim,
    SessionKind,
    Submit,
    SubmitOutcome,
    Tokenized,
)

API_KEY = b"one key."  # that all requests come with


def next_entry(pool: ExploredPool, state: int, stream: bytes, after: bytes) -> Entry | None:
    """The entry of a stream that a reader gets next."""
    if not pool.view(state).lengths.get(stream):
        return None
    answer, _ = pool.call(state, Read(Fields({stream: after}), 1))
    return answer[stream][0] if stream in answer else None


class GatewayState(NamedTuple):
    hold: Hold
    submitted: frozenset[int] = frozenset()  # by this process
    cancelled: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()  # their clients lost their connection
    restart_calls: tuple[Call[Any], ...] | None = None  # to be told a restarted server yet; None: not known
    position: bytes | None = None  # in its text stream; None: its route is new
    wanted: frozenset[int] = frozenset()  # requests to be attached
    probed: frozenset[Any] = frozenset()  # what was asked for again without a sign that it is missing


class Gateway(Process):
    """Submits, takes text where it extends what its clients have, and asks again for what is missing."""

    kind = SessionKind.GATEWAY
    sees_clients = True

    def __init__(
        self, name: str, pool: ExploredPool, asked: tuple[Asked, ...], samplers: Samplers, may_cancel: bool
    ) -> None:
        super().__init__(name, pool)
        self.asked = asked
        self.samplers = samplers
        self.may_cancel = may_cancel

    def born(self, number: int) -> GatewayState:
        return GatewayState(Hold(number))

    def recovered(self, me: GatewayState) -> GatewayState:
        return me._replace(position=None, probed=frozenset(), restart_calls=None)

    def greeted(self, me: GatewayState, hold: Hold) -> GatewayState:
        """The server was restarted, or the session is another's: first of all what clients have must be told."""
        return me._replace(hold=hold._replace(stage=Stage.CONFIRM), restart_calls=None)

    def come_back(self, me: GatewayState, pool: int, clients: tuple[Client, ...]) -> Iterator[Move]:
        if me.hold.stage is not Stage.CONFIRM:
            yield from super().come_back(me, pool, clients)
            return
        restart_calls = self.restart_calls(me, clients) if me.restart_calls is None else me.restart_calls
        if not restart_calls:
            done = me._replace(hold=me.hold._replace(stage=Stage.REVALIDATE), restart_calls=None)
            yield from super().come_back(done, pool, clients)
            return
        call, *rest = restart_calls
        _, changed = self.pool.call(pool, call)
        what = "submits again" if isinstance(call, Submit) else "cancels again"
        yield Move(f"{self.name}: {what}", me._replace(restart_calls=tuple(rest)), changed)

    def restart_calls(self, me: GatewayState, clients: tuple[Client, ...]) -> tuple[Call[Any], ...]:
        """What it submitted and serves, or has served to the end; then its cancels."""
        submitted = [
            self.witness(me, asked, client)
            for asked, client in zip(self.asked, clients, strict=True)
            if asked.index in me.submitted
            and client.gateway == self.name
            and (client.phase is Phase.OPEN or is_whole(client))
        ]
        cancels = [self._cancel_of(asked) for asked in self.asked if asked.index in me.cancelled]
        return (*submitted, *cancels)

    def witness(self, me: GatewayState, asked: Asked, client: Client) -> Submit:
        """With the tokens that the client has."""
        tokens = tuple(np.array(got.token_ids, "<u4").tobytes() for got in client.got)
        model_digest = next((each for got in client.got for each in got.models), b"")
        return replace(self.submission(me, asked), witness=tokens, model_digest=model_digest)

    def _cancel_of(self, asked: Asked) -> Cancel:
        return Cancel(asked.request_id, int(CancelReason.CLIENT), 0, TENANT)

    def work(self, me: GatewayState, pool: int, clients: tuple[Client, ...]) -> Iterator[Move]:
        stream = self.pool.keys.text(self.sid(me))
        if me.position is None:
            position, changed = self.pool.call(pool, LastId(stream))
            wanted = frozenset(asked.index for asked in self.asked if self._serves(clients[asked.index]))
            yield Move(f"{self.name}: reads its text", me._replace(position=position, wanted=wanted), changed)
            return
        for asked, client in zip(self.asked, clients, strict=True):
            yield from self._serve(me, pool, clients, asked, client)
        if entry := next_entry(self.pool, pool, stream, me.position):
            yield self._read(me, pool, clients, entry)

    def _serves(self, client: Client) -> bool:
        return client.gateway == self.name and client.phase is Phase.OPEN

    def _serve(
        self, me: GatewayState, pool: int, clients: tuple[Client, ...], asked: Asked, client: Client
    ) -> Iterator[Move]:
        index = asked.index
        if client.gateway is None and client.phase in (Phase.NEW, Phase.OPEN):
            joined = with_client(clients, index, client._replace(gateway=self.name))
            wanted = me.wanted | {index} if client.phase is Phase.OPEN else me.wanted
            me = me._replace(lost=me.lost - {index})
            yield Move(f"client {index} connects to {self.name}", me._replace(wanted=wanted), pool, joined)
        if index in me.lost and client.gateway != self.name:
            yield self._give_up(me, pool, clients, asked)
        if client.gateway != self.name:
            return
        if client.phase is Phase.NEW:
            yield self._submit(me, pool, clients, asked)
        elif client.phase is Phase.OPEN:
            if index in me.wanted:
                yield self._attach(me, pool, clients, asked)
            elif (sign := (index, client.got, self.pool.view(pool).leases.get(0))) not in me.probed:
                probed = me._replace(wanted=me.wanted | {index}, probed=me.probed | {sign})
                yield Move(f"{self.name}: asks again for {index}, silent for long", probed, pool, is_lazy=True)
            if self.may_cancel and not client.wants_cancel:
                yield self._cancel(me, pool, clients, asked)

    def _submit(self, me: GatewayState, pool: int, clients: tuple[Client, ...], asked: Asked) -> Move:
        outcome, changed = self.pool.call(pool, self.submission(me, asked))
        clients = with_client(clients, asked.index, clients[asked.index]._replace(phase=Phase.OPEN))
        me = me._replace(submitted=me.submitted | {asked.index})
        if outcome is SubmitOutcome.EXISTS:  # its route may be another gateway
            me = me._replace(wanted=me.wanted | {asked.index})
        wrong = "" if outcome in (SubmitOutcome.CREATED, SubmitOutcome.EXISTS) else f"a submit found {outcome.name}"
        return Move(f"{self.name}: submits {asked.index}, {outcome.name}", me, changed, clients, wrong=wrong)

    def submission(self, me: GatewayState, asked: Asked) -> Submit:
        metered = Metered(API_KEY, asked.request_id)
        return Submit(
            *(asked.request_id, TENANT, asked.header, asked.body, b"digest", self.sid(me), 0),
            prompt=asked.prompt,
            metered=metered,
        )

    def _attach(self, me: GatewayState, pool: int, clients: tuple[Client, ...], asked: Asked) -> Move:
        client = clients[asked.index]
        offsets = encode_offsets(stream_of(client).offsets())
        answer, changed = self.pool.call(pool, Attach(asked.request_id, TENANT, self.sid(me), offsets))
        me = me._replace(wanted=me.wanted - {asked.index})
        wrong = ""
        if not answer.known:
            client = client._replace(phase=Phase.REFUSED, why="unknown")
        elif answer.result is not None:
            client, wrong, _ = self._take(clients, decode_finished(asked.request_id, answer.result), asked)
            wrong = wrong or self._lacks_prompt(pool, asked, client)
            if client.phase is Phase.OPEN:
                client = client._replace(phase=Phase.REFUSED, why="diverged")
        name = f"{self.name}: attaches {asked.index}, {answer.state.name if answer.state else 'unknown'}"
        return Move(name, me, changed, with_client(clients, asked.index, client), wrong=wrong)

    def _cancel(self, me: GatewayState, pool: int, clients: tuple[Client, ...], asked: Asked) -> Move:
        _, changed = self.pool.call(pool, self._cancel_of(asked))
        me = me._replace(cancelled=me.cancelled | {asked.index})
        client = clients[asked.index]._replace(wants_cancel=True)
        return Move(f"{self.name}: cancels {asked.index}", me, changed, with_client(clients, asked.index, client))

    def _give_up(self, me: GatewayState, pool: int, clients: tuple[Client, ...], asked: Asked) -> Move:
        """Nobody came back for a request here."""
        request = self.pool.view(pool).requests.get(asked.request_id)
        is_here = request is not None and request.route == self.sid(me)
        _, changed = self.pool.call(pool, self.giving_up(me, asked))
        client = clients[asked.index]
        if is_here:  # what its client then gets, it was told in advance
            client = client._replace(wants_cancel=True)
        me = me._replace(lost=me.lost - {asked.index})
        return Move(f"{self.name}: gives up {asked.index}", me, changed, with_client(clients, asked.index, client))

    def giving_up(self, me: GatewayState, asked: Asked) -> Cancel:
        return replace(self._cancel_of(asked), route=self.sid(me))

    def _read(self, me: GatewayState, pool: int, clients: tuple[Client, ...], entry: Entry) -> Move:
        me = me._replace(position=entry.entry_id)
        if k.PAYLOAD not in entry.fields:  # another gateway has taken a request: its client went there
            return Move(f"{self.name}: reads that it lost a request", me, pool)
        _, rows = decode_text(entry.fields[k.PAYLOAD])
        before, wrong = clients, ""
        for asked in self.asked:
            if self._serves(clients[asked.index]):
                mine = [row for row in rows if row.request_id == asked.request_id]
                client, wrong_here, is_behind = self._take(clients, mine, asked)
                wrong = wrong or self._lacks_prompt(pool, asked, client)
                clients, wrong = with_client(clients, asked.index, client), wrong or wrong_here
                if is_behind:
                    me = me._replace(wanted=me.wanted | {asked.index})
        name = f"{self.name}: reads text" + (", nothing new" if clients == before else "")
        return Move(name, me, pool, clients, wrong=wrong, is_reading=True)

    def _lacks_prompt(self, pool: int, asked: Asked, client: Client) -> str:
        """Whoever has tokens, or the end of a pooled prompt, finds what was computed of the prompt by that model."""
        is_kept = asked.scores_prompt or asked.pools
        models = {each for got in client.got for each in got.models} if is_kept else set()
        for model_digest in models:
            found, _ = self.pool.call(pool, ReadPromptOutput(asked.request_id, model_digest))
            if found != prompt_output(model_digest):
                return "a client has tokens or an end, and nothing is kept of its prompt"
        return ""

    def _take(self, clients: tuple[Client, ...], rows: list[TextRow], asked: Asked) -> tuple[Client, str, bool]:
        client, wrong, is_behind = clients[asked.index], "", False
        for row in rows:
            reception = receive(asked, client, row, self.samplers)
            client, wrong, is_behind = reception.client, wrong or reception.wrong, is_behind or reception.is_behind
        return client, wrong, is_behind


def with_client(clients: tuple[Client, ...], index: int, client: Client) -> tuple[Client, ...]:
    """All clients, one of them in another state."""
    return (*clients[:index], client, *clients[index + 1 :])


class TokenizerState(NamedTuple):
    hold: Hold
    jobs: tuple[tuple[bytes, bytes], ...] = ()  # hints: entry id, request id


class TokenizerProcess(Process):
    """Takes hints, those that others left too, and says what came out."""

    kind = SessionKind.TOKENIZER

    def __init__(self, name: str, pool: ExploredPool, asked: tuple[Asked, ...]) -> None:
        super().__init__(name, pool)
        self.tokenized = {
            each.request_id: Tokenized(each.request_id, b"", each.meta, 0, token_ids=each.token_ids) for each in asked
        }

    def born(self, number: int) -> TokenizerState:
        return TokenizerState(Hold(number))

    def work(self, me: TokenizerState, pool: int, clients: tuple[Client, ...]) -> Iterator[Move]:
        consumer, prompts = self.sid(me), self.pool.keys.prompts
        for entry_id, request_id in me.jobs:
            call = replace(self.tokenized[request_id], entry_id=entry_id)
            done, changed = self.pool.call(pool, call)
            rest = tuple(job for job in me.jobs if job[0] != entry_id)
            yield Move(f"{self.name}: tokenized {done}", me._replace(jobs=rest), changed)
        if not self.pool.view(pool).lengths.get(prompts):
            return
        for what, call in (
            ("reads", ReadGroup(prompts, k.TOKENIZERS, consumer, 1)),
            ("reads what another left", Reclaim(prompts, k.TOKENIZERS, consumer, 0, 1)),
        ):
            entries, changed = self.pool.call(pool, call)
            known = {entry_id for entry_id, _ in me.jobs}
            jobs = tuple((entry.entry_id, entry.fields[k.REQUEST]) for entry in entries)
            if jobs and not known & {entry_id for entry_id, _ in jobs}:
                yield Move(f"{self.name}: {what}", me._replace(jobs=me.jobs + jobs), changed)
