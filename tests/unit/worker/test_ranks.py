"""Ranks of a worker meet, and end when one of them has."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from contract.domain.errors import ErrorCode, PenstockError
from servicekit.bus.calls import SessionInfo, SessionKind
from worker_svc import meeting
from worker_svc.meeting import connect, enter
from worker_svc.ranks import RankWatch

NAMES = ("w.1", "w.2")
LIMIT = timedelta(minutes=5)


def told(name: str, *, alive: bool = True, kind: SessionKind = SessionKind.WORKER) -> SessionInfo:
    return SessionInfo(name.encode(), kind, name, "", alive, 0, b"")


BOTH = [told("w.1"), told("w.2")]


def test_ranks_that_live_or_are_away_for_a_moment_are_left_alone() -> None:
    watch = RankWatch(NAMES, patience_s=10.0)
    for now_s in range(100, 200):
        is_back = now_s % 10 == 0
        watch.note([told("w.1"), told("w.2", alive=is_back), told("other", alive=False)], now_s)


@pytest.mark.parametrize("last", [[told("w.1")], [told("w.1"), told("w.2", alive=False)]], ids=["left", "dead"])
def test_a_rank_that_stays_away_ends_the_others_by_name(last: list[SessionInfo]) -> None:
    watch = RankWatch(NAMES, patience_s=10.0)
    watch.note(BOTH, 100.0)
    for now_s in (104.0, 108.0, 112.0, 114.0):
        watch.note(last, now_s)
    with pytest.raises(PenstockError, match=r"^w\.2 has ended: all ranks of a worker start again together") as caught:
        watch.note(last, 114.1)
    assert caught.value.code is ErrorCode.INTERNAL


def test_a_rank_counts_once_the_pool_has_told_of_it_as_a_worker() -> None:
    watch = RankWatch(NAMES, patience_s=10.0)
    for now_s in range(100, 130, 4):
        watch.note([told("w.1"), told("w.2", alive=False, kind=SessionKind.GATEWAY)], now_s)
    watch.note([told("w.1"), told("w.2", alive=False)], 130.0)
    watch.note([told("w.1"), told("w.2", kind=SessionKind.GATEWAY)], 134.0)
    watch.note([told("w.1")], 138.0)
    with pytest.raises(PenstockError, match=r"w\.2"):
        watch.note([told("w.1")], 140.1)


def test_who_stood_still_itself_does_not_count_the_time_against_others() -> None:
    watch = RankWatch(NAMES, patience_s=10.0)
    dead = [told("w.1"), told("w.2", alive=False)]
    watch.note(BOTH, 100.0)
    watch.note(dead, 200.0)
    watch.note(dead, 205.0)
    watch.note(dead, 300.0)
    watch.note(dead, 304.0)
    watch.note(BOTH, 309.0)


def test_after_the_server_was_away_ranks_have_time_to_come_back() -> None:
    watch = RankWatch(NAMES, patience_s=10.0)
    watch.note(BOTH, 100.0)
    for now_s in (104.0, 108.0, 112.0):
        watch.note([], now_s)
    watch.forgive()
    for now_s in (115.0, 119.0, 123.0):
        watch.note([], now_s)
    with pytest.raises(PenstockError, match=r"w\.1, w\.2"):
        watch.note([], 125.1)


class Meeting:
    """A store in which ranks of threads meet."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.entered: dict[int, bool | str] = {}

    def begin(self, rank: int, world_size: int) -> threading.Thread:
        def run() -> None:
            try:
                self.entered[rank] = enter(self.store, rank, world_size)
            except dist.DistError as error:
                self.entered[rank] = str(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def wait_here(self, rank: int) -> None:
        self.store.wait([f"penstock/here/{rank}"], LIMIT)


def test_ranks_go_on_when_all_are_there_and_not_with_the_store_of_those_before() -> None:
    ranks = Meeting()
    first = [ranks.begin(rank, 3) for rank in (0, 2)]
    ranks.wait_here(2)
    assert ranks.entered == {}
    for thread in (*first, ranks.begin(1, 3)):
        thread.join(LIMIT.total_seconds())
    assert ranks.entered == {0: True, 1: True, 2: True}
    # Rank 1 was started again, and the rank 0 that it knew has not ended yet.
    ranks.begin(1, 3).join(LIMIT.total_seconds())
    assert ranks.entered[1] is False


def test_a_rank_that_ends_before_all_are_there_may_come_again() -> None:
    ranks = Meeting()
    ranks.store.set("penstock/here/1", "of the one that ended")
    again = ranks.begin(1, 3)
    while ranks.store.get("penstock/here/1") == b"of the one that ended":
        time.sleep(0.01)
    for thread in (again, ranks.begin(2, 3), ranks.begin(0, 3)):
        thread.join(LIMIT.total_seconds())
    assert ranks.entered == {0: True, 1: True, 2: True}


def test_rank_0_does_not_go_on_with_a_rank_that_has_ended_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_GOING_ON", timedelta(milliseconds=50))
    ranks = Meeting()
    ranks.store.set("penstock/here/1", "of the one that ended")
    for thread in (ranks.begin(2, 3), ranks.begin(0, 3)):
        thread.join(LIMIT.total_seconds())
    assert isinstance(ranks.entered[0], str)
    assert ranks.entered[2] is True  # and finds rank 0 gone when it goes on
    ranks.begin(1, 3).join(LIMIT.total_seconds())
    assert ranks.entered[1] is False


@pytest.mark.parametrize("address", ["tcp://somewhere", "tcp://:29500"])
def test_an_address_without_a_host_or_a_port_is_refused(address: str) -> None:
    with pytest.raises(PenstockError, match="distributed_address") as caught:
        connect(1, 2, address, torch.device("cpu"))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "distributed_address")
