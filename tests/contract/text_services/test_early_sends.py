"""Much at once: the first of it is sent while the last is made, and what is not answered is sent again."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from memory_bus import MemoryBus
from memory_connections import MemoryConnection
from text_pipeline import SCHEDULER, Pool, eventually, running

from contract.domain import chain
from contract.domain.finish import FinishReason
from contract.domain.request import Prompt
from contract.v1 import common_pb2, tokens_pb2
from detokenizer_svc.outbox import MANY_ENDS
from servicekit.bus import BusUnavailable
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, Call, Compact, Length, RequestState, Retire, Tokenized

NUM_REQUESTS = 70


class EarlyBus(MemoryBus):
    """Keeps what connections sent without waiting for the answers; loses some of these."""

    def __init__(self, num_lost: int) -> None:
        super().__init__()
        self.num_lost = num_lost
        self.early: list[list[Call[object]]] = []
        self.calls: list[Call[object]] = []  # all that were carried out, in order
        self.at_first_end: Callable[[], object] = lambda: None

    def connect(self) -> MemoryConnection:
        """A connection that tells of its early sends."""
        return EarlyConnection(self)


class EarlyConnection(MemoryConnection):
    """Of an `EarlyBus`."""

    def __init__(self, bus: EarlyBus) -> None:
        super().__init__(bus)
        self._early_bus = bus

    def send(self, calls: list[Call[object]]) -> None:  # type: ignore[override]
        """Notes them, and loses them if that is still to be done: half of the time after they were carried out."""
        self._early_bus.early.append(list(calls))
        self._early_bus.num_lost -= 1
        if self._early_bus.num_lost >= 0 and self._early_bus.num_lost % 2:
            raise BusUnavailable("lost before")
        super().send(calls)

    def execute(self, calls: Sequence[Call[object]]) -> list[object]:
        """Notes them."""
        if any(map(_retires, calls)) and not any(map(_retires, self._early_bus.calls)):
            self._early_bus.at_first_end()
        self._early_bus.calls += calls
        return super().execute(calls)

    def receive(self) -> list[object]:
        """The answers, unless they are lost."""
        if self._early_bus.num_lost >= 0:
            raise BusUnavailable("lost after")
        return super().receive()


@pytest.mark.parametrize("num_lost", [0, 1, 2, 4])
def test_many_prompts_are_tokenized_once_each(pool: Pool, num_lost: int) -> None:
    bus = EarlyBus(num_lost)
    pool = Pool(Path(pool.model), bus)
    ids = [pool.submit(number, Prompt(text=f"brook {number}")) for number in range(1, NUM_REQUESTS)]
    with running(pool.tokenizer_service()):
        eventually(lambda: pool.fetch(ids[-1]).state is RequestState.READY)
        eventually(lambda: pool.connection.call(Length(bus.keys.prompts)) == 0)
    assert len(bus.early) > 1
    assert all(isinstance(call, Tokenized) for calls in bus.early for call in calls)
    assert sorted(hint.fields[k.REQUEST] for hint in pool.entries(bus.keys.requests)) == ids


@pytest.mark.parametrize(("num_prompts", "num_early"), [(1, 1), (5, 0)])
def test_the_outcome_of_one_prompt_leaves_alone_and_those_of_several_with_the_next_read(
    pool: Pool, num_prompts: int, num_early: int
) -> None:
    bus = EarlyBus(0)
    pool = Pool(Path(pool.model), bus)
    ids = [pool.submit(number, Prompt(text=f"brook {number}")) for number in range(1, num_prompts + 1)]
    with running(pool.tokenizer_service()):
        eventually(lambda: pool.fetch(ids[-1]).state is RequestState.READY)
    assert len(bus.early) == num_early


@pytest.mark.parametrize("num_lost", [0, 1, 2])
def test_many_requests_that_end_at_once_end_once_each(pool: Pool, num_lost: int) -> None:
    bus = EarlyBus(num_lost)
    pool = Pool(Path(pool.model), bus)
    ids = [pool.open(number) for number in range(1, NUM_REQUESTS)]
    with running(pool.detokenizer_service()):
        pool.commit(_ends(ids, pool.ids("brook")[0]))
        eventually(lambda: all(pool.fetch(each).state is RequestState.ENDED for each in ids))
        rows = [row for row in pool.read_text() if row.finish]
    retired = [call for call in bus.calls if isinstance(call, Retire)]
    assert all(isinstance(call, Append) for call in bus.early[0]), "gateways get the ends before any result is made"
    assert max(1 + len(call.others) for call in retired) == MANY_ENDS
    # Who is told of an end again knows it already.
    assert sorted({row.request_id for row in rows}) == ids
    assert num_lost or len(rows) == len(ids)
    assert all(pool.result(each)[0].token_ids for each in ids)


def test_text_does_not_wait_for_requests_that_are_to_be_retired(pool: Pool) -> None:
    bus = EarlyBus(0)
    pool = Pool(Path(pool.model), bus)
    last, *ids = (pool.open(number) for number in range(1, NUM_REQUESTS))
    token_id = pool.ids("brook")[0]
    bus.at_first_end = lambda: pool.commit(_ends([last], token_id))
    # Nobody looks after leases meanwhile: all who have ended are retired before.
    with running(pool.detokenizer_service(session_ttl_s=60.0)):
        pool.commit(_ends(ids, token_id))
        eventually(lambda: all(pool.fetch(each).state is RequestState.ENDED for each in (*ids, last)))
    [told] = [number for number, call in enumerate(bus.calls) if isinstance(call, Append) and _tells(call, last)]
    assert sum(map(_retires, bus.calls[told:])) > 2


def test_rows_are_dropped_when_all_who_ended_are_retired(pool: Pool) -> None:
    bus = EarlyBus(0)
    pool = Pool(Path(pool.model), bus)
    ids = [pool.open(number) for number in range(1, NUM_REQUESTS)]
    # Nobody looks after leases but when that is asked for.
    service = pool.detokenizer_service(session_ttl_s=600.0)

    def look_around() -> None:
        service._keep_at_s = 0.0

    bus.at_first_end = look_around
    with running(service):
        pool.commit(_ends(ids, pool.ids("brook")[0]))
        eventually(lambda: pool.connection.call(Length(bus.keys.tokens(0))) == 0)
    retired = [number for number, call in enumerate(bus.calls) if isinstance(call, Retire)]
    first = min(number for number, call in enumerate(bus.calls) if isinstance(call, Compact) and number > retired[0])
    assert retired[-1] < first
    assert all(pool.fetch(each).state is RequestState.ENDED for each in ids)


def _retires(call: Call[object]) -> bool:
    return isinstance(call, Retire)


def _tells(call: Append, request_id: bytes) -> bool:
    return call.stream.startswith(b"{penstock}:text:") and request_id in call.fields.get(k.PAYLOAD, b"")


def _ends(request_ids: list[bytes], token_id: int) -> bytes:
    """A TokenBatch in which each of them gets its only token and ends."""
    num = len(request_ids)
    columns = tokens_pb2.TokenColumns(
        sequences=np.zeros(num, "<u4").tobytes(),
        positions=np.zeros(num, "<u4").tobytes(),
        chains=np.full(num, chain.CHAIN_START, "<u8").tobytes(),
        counts=np.ones(num, "<u4").tobytes(),
        token_ids=np.full(num, token_id, "<u4").tobytes(),
        finishes=bytes([FinishReason.LENGTH]) * num,
    )
    return tokens_pb2.TokenBatch(
        origin=common_pb2.Origin(session=SCHEDULER, sent_unix_ns=time.time_ns()),
        request_ids=b"".join(request_ids),
        columns=columns.SerializeToString(),
    ).SerializeToString()
