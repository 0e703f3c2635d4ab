"""Ranks of a worker meet, and end when one of them has."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from contract.domain.errors import ErrorCode, PenstockError
from servicekit.bus.calls import SessionInfo, SessionKind
from worker_svc.meeting import connect, enter
from worker_svc.ranks import RankWatch

NAMES = ("w.1", "w.2")


def told(name: str, *, alive: bool = True) -> SessionInfo:
    return SessionInfo(name.encode(), SessionKind.WORKER, name, "", alive, 0, b"")


def test_ranks_that_live_or_are_away_for_a_moment_are_left_alone() -> None:
    watch = RankWatch(NAMES, 5.0, now_s=100.0)
    watch.note([told("w.1"), told("w.2"), told("other", alive=False)], 104.0)
    watch.note([told("w.1"), told("w.2", alive=False)], 106.0)
    watch.note([told("w.1")], 108.9)
    watch.note([told("w.1"), told("w.2")], 109.1)


@pytest.mark.parametrize("last", [[told("w.1")], [told("w.1"), told("w.2", alive=False)]], ids=["left", "dead"])
def test_a_rank_that_stays_away_ends_the_others_by_name(last: list[SessionInfo]) -> None:
    watch = RankWatch(NAMES, 5.0, now_s=100.0)
    watch.note([told("w.1"), told("w.2")], 101.0)
    watch.note(last, 105.9)
    with pytest.raises(PenstockError, match=r"^w\.2 has ended: all ranks of a worker start again together") as caught:
        watch.note(last, 106.1)
    assert caught.value.code is ErrorCode.INTERNAL


def test_after_the_server_was_away_ranks_have_time_to_come_back() -> None:
    watch = RankWatch(NAMES, 5.0, now_s=100.0)
    watch.forgive(200.0)
    watch.note([], 204.9)
    watch.note([told("w.1"), told("w.2")], 204.9)
    watch.forgive(300.0)
    with pytest.raises(PenstockError, match=r"w\.1, w\.2"):
        watch.note([], 305.1)


class Meeting:
    """A store in which ranks of threads meet."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.entered: dict[int, bool] = {}

    def begin(self, rank: int, world_size: int) -> threading.Thread:
        def run() -> None:
            self.entered[rank] = enter(self.store, rank, world_size)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def test_ranks_go_on_when_all_are_there_and_not_with_the_store_of_those_before() -> None:
    meeting = Meeting()
    first = [meeting.begin(rank, 3) for rank in (0, 2)]
    meeting.store.wait(["penstock/here/2"], timedelta(minutes=5))
    assert meeting.entered == {}
    for thread in (*first, meeting.begin(1, 3)):
        thread.join(300)
    assert meeting.entered == {0: True, 1: True, 2: True}
    # Rank 1 was started again, and the rank 0 that it knew has not ended yet.
    meeting.begin(1, 3).join(300)
    assert meeting.entered[1] is False


def test_a_rank_that_ends_before_all_are_there_may_come_again() -> None:
    meeting = Meeting()
    meeting.store.set("penstock/here/1", "")  # of the one that ended
    for thread in [meeting.begin(rank, 3) for rank in (1, 2, 0)]:
        thread.join(300)
    assert meeting.entered == {0: True, 1: True, 2: True}


@pytest.mark.parametrize("address", ["tcp://somewhere", "tcp://:29500"])
def test_an_address_without_a_host_or_a_port_is_refused(address: str) -> None:
    with pytest.raises(PenstockError, match="distributed_address") as caught:
        connect(1, 2, address, torch.device("cpu"))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "distributed_address")
