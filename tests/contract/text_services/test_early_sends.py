"""Much at once: the first of it is sent while the last is made, and what is not answered is sent again."""

import time
from pathlib import Path

import numpy as np
import pytest
from text_pipeline import SCHEDULER, Pool, eventually, running

from penstock.domain import chain
from penstock.domain.finish import FinishReason
from penstock.domain.request import Prompt
from penstock.v1 import common_pb2, tokens_pb2
from servicekit.bus import BusUnavailable, MemoryBus
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, Call, Length, RequestState, Retire, Tokenized
from servicekit.bus.memory_bus import MemoryConnection

NUM_REQUESTS = 70


class EarlyBus(MemoryBus):
    """Keeps what connections sent without waiting for the answers; loses some of these."""

    def __init__(self, num_lost: int) -> None:
        super().__init__()
        self.num_lost = num_lost
        self.early: list[list[Call[object]]] = []

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

    def receive(self) -> list[object]:
        """The answers, unless they are lost."""
        if self._early_bus.num_lost >= 0:
            raise BusUnavailable("lost behind")
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


@pytest.mark.parametrize("num_lost", [0, 1, 2])
def test_many_requests_that_end_at_once_end_once_each(pool: Pool, num_lost: int) -> None:
    bus = EarlyBus(num_lost)
    pool = Pool(Path(pool.model), bus)
    ids = [pool.open(number) for number in range(1, NUM_REQUESTS)]
    with running(pool.detokenizer_service()):
        pool.commit(_ends(ids, pool.ids("brook")[0]))
        eventually(lambda: all(pool.fetch(each).state is RequestState.ENDED for each in ids))
        rows = [row for row in pool.read_text() if row.finish]
    ends, *results = bus.early
    assert all(isinstance(call, Append) for call in ends), "gateways get the ends before any result is made"
    assert any(isinstance(call, Retire) and call.others for calls in results for call in calls)
    # Who is told of an end again knows it already.
    assert sorted({row.request_id for row in rows}) == ids
    assert num_lost or len(rows) == len(ids)
    assert all(pool.result(each)[0].token_ids for each in ids)


def _ends(request_ids: list[bytes], token_id: int) -> bytes:
    """A TokenBatch in which each of them gets its only token and ends."""
    num = len(request_ids)
    return tokens_pb2.TokenBatch(
        origin=common_pb2.Origin(session=SCHEDULER, sent_unix_ns=time.time_ns()),
        request_ids=b"".join(request_ids),
        sequences=np.zeros(num, "<u4").tobytes(),
        positions=np.zeros(num, "<u4").tobytes(),
        chains=np.full(num, chain.CHAIN_START, "<u8").tobytes(),
        counts=np.ones(num, "<u4").tobytes(),
        token_ids=np.full(num, token_id, "<u4").tobytes(),
        finishes=bytes([FinishReason.LENGTH]) * num,
    ).SerializeToString()
