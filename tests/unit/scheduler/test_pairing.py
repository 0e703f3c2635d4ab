"""Which workers are paired with, and which epochs are over."""

import pytest

from contract.v1 import status_pb2
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.pairing import (
    GAP_STEP,
    PairedWorker,
    Pairings,
    dead_schedulers,
    gap_plan,
    has_died,
    is_bereft,
    is_waited_for,
)
from scheduler_svc.wire import WorkerOffer
from servicekit.bus.calls import SessionInfo, SessionKind, WorkerEntry

ME, OTHER = b"m" * 16, b"o" * 16
OFFER = WorkerOffer("m", WorkerLimits(1, 1, 1, 1), 0)
SECOND = 10**9
NOW_NS = 10**12


def worker(name: str, incarnation: bytes = b"1", owner: bytes | None = None, alive: bool = True) -> WorkerEntry:
    return WorkerEntry(name, incarnation, alive, b"", owner)


DRAINING = status_pb2.ServiceStatus(draining=True).SerializeToString()


def session(
    sid: bytes, kind: SessionKind = SessionKind.SCHEDULER, alive: bool = True, status: bytes = b""
) -> SessionInfo:
    return SessionInfo(sid, kind, "n", "", alive, 0, status)


def paired(*names: str) -> Pairings:
    pairings = Pairings()
    for name in names:
        pairings.begin(PairedWorker(name, b"1", OFFER, b"0-0"))
    return pairings


def test_a_scheduler_takes_its_share_of_the_living_workers() -> None:
    workers = [worker(name) for name in "abcde"] + [worker("dead", alive=False)]
    sessions = [session(ME), session(OTHER), session(b"x" * 16, alive=False), session(b"g", SessionKind.GATEWAY)]
    assert paired().to_pair(workers, sessions, ME, NOW_NS) == ["a", "b", "c"]
    assert paired("a", "b").to_pair(workers, sessions, ME, NOW_NS) == ["c"]
    assert paired("a", "b", "c").to_pair(workers, sessions, ME, NOW_NS) == []
    assert paired("a", "b").to_pair(workers, [session(ME), session(OTHER, status=DRAINING)], ME, NOW_NS) == [
        "c",
        "d",
        "e",
    ]
    assert paired().to_pair(workers, [session(ME)], ME, NOW_NS) == ["a", "b", "c", "d", "e"]


def test_a_worker_whose_pairing_was_not_heard_of_is_not_served() -> None:
    workers = [worker("a", owner=ME), worker("b", owner=ME), worker("c", owner=OTHER), worker("d")]
    assert paired("a").unserved(workers, ME) == ["b"]
    assert paired("a").unserved([worker("b", owner=ME, alive=False)], ME) == []
    has_ended = paired("a", "b")
    has_ended.end("b")
    assert has_ended.unserved(workers, ME) == [], "it is told so, and registers anew"


def test_workers_of_another_living_scheduler_are_left_alone() -> None:
    assert paired().to_pair([worker("a", owner=OTHER), worker("b", owner=ME)], [session(ME)], ME, NOW_NS) == ["b"]


def test_a_worker_is_lost_when_it_is_dead_gone_anothers_or_begun_anew() -> None:
    pairings = paired("a", "b", "c", "d", "e")
    now = [
        worker("a", owner=ME),
        worker("b", owner=ME, alive=False),
        worker("c", owner=OTHER),
        worker("d", b"2", owner=ME),
    ]
    assert pairings.lost(now, ME) == ["b", "c", "d", "e"]


def test_an_epoch_that_is_over_never_begins_again() -> None:
    pairings = paired("a")
    pairings.end("a")
    assert pairings.has_ended(b"1")
    assert pairings.to_pair([worker("a", owner=ME)], [session(ME)], ME, NOW_NS) == []
    assert pairings.to_pair([worker("a", b"2")], [session(ME)], ME, NOW_NS) == ["a"]


def test_a_worker_in_an_epoch_that_is_over_is_told_now_and_then_until_it_begins_anew() -> None:
    pairings = paired("a")
    pairings.end("a")
    now = [worker("a", owner=ME)]
    assert pairings.to_end(now, ME, 10 * SECOND) == now
    assert pairings.to_end(now, ME, 11 * SECOND) == []
    assert pairings.to_end(now, ME, 13 * SECOND) == now
    assert pairings.to_end([worker("a", b"2")], ME, 20 * SECOND) == []
    assert not pairings.has_ended(b"1"), "incarnations that are gone are forgotten"


def test_a_refused_worker_is_neither_paired_with_nor_told() -> None:
    pairings = paired()
    pairings.refuse(b"1")
    assert pairings.to_pair([worker("a")], [session(ME)], ME, NOW_NS) == []
    assert pairings.to_end([worker("a")], ME, 100 * SECOND) == []


def test_what_a_dead_scheduler_had_can_be_taken() -> None:
    sessions = [session(ME, alive=False), session(OTHER, alive=False), session(b"w", SessionKind.WORKER, alive=False)]
    assert [dead.sid for dead in dead_schedulers([*sessions, session(b"l")], ME)] == [OTHER]


@pytest.mark.parametrize(("alive", "left", "died"), [(True, False, False), (False, True, False), (False, False, True)])
def test_a_worker_has_died_if_its_session_ran_out_without_leaving(alive: bool, left: bool, died: bool) -> None:
    sessions = [session(OTHER), SessionInfo(b"1", SessionKind.WORKER, "w", "", alive, 0, b"", left)]
    assert has_died(b"1", sessions) == died


def test_a_worker_that_is_forgotten_has_died() -> None:
    assert has_died(b"1", [session(ME)])


def test_who_drains_pairs_with_nothing_while_somebody_stays() -> None:
    drained = session(ME, status=DRAINING)
    assert paired().to_pair([worker("a")], [drained, session(OTHER)], ME, NOW_NS) == []
    assert paired().to_pair([worker("a")], [drained], ME, NOW_NS) == ["a"]


def test_a_worker_beyond_the_share_is_for_a_scheduler_without_any() -> None:
    both = [session(ME), session(OTHER)]
    workers = [worker("a", owner=ME), worker("b", owner=ME), worker("dead", alive=False)]
    assert paired("a", "b").has_one_for_another(workers, both)
    assert not paired("a", "b").has_one_for_another(workers, [session(ME)])
    assert not paired("a", "b").has_one_for_another(workers, [session(ME), session(OTHER, status=DRAINING)])
    assert not paired("a").has_one_for_another(workers[:1], both)
    third = worker("c", owner=OTHER)
    assert not paired("a", "b").has_one_for_another([*workers, third], both)


def test_a_worker_that_was_given_back_is_not_told_unless_nobody_takes_it() -> None:
    pairings = paired("a")
    pairings.give_back("a", 10 * SECOND)
    assert pairings.to_end([worker("a")], ME, 11 * SECOND) == []
    assert pairings.to_end([worker("a", owner=OTHER)], ME, 20 * SECOND) == []
    assert pairings.to_end([worker("a")], ME, 20 * SECOND) == [worker("a")]
    assert pairings.to_pair([worker("a")], [session(ME)], ME, NOW_NS) == []


def test_bereft_is_who_has_no_worker_to_wait_for() -> None:
    assert is_bereft([worker("a", owner=OTHER), worker("dead", alive=False)], ME)
    assert not is_bereft([worker("a", owner=OTHER), worker("b")], ME)
    assert not is_bereft([worker("a", owner=ME)], ME)
    assert not is_bereft([worker("dead", alive=False)], ME)


def test_a_successor_without_workers_waits_for_those_of_who_drains() -> None:
    both = [session(ME, status=DRAINING), session(OTHER)]
    assert is_waited_for([worker("a", owner=ME)], both, ME)
    assert not is_waited_for([worker("a", owner=ME), worker("b", owner=OTHER)], both, ME)
    assert not is_waited_for([worker("a", owner=ME)], both[:1], ME)


def test_no_epoch_reaches_the_step_that_ends_it() -> None:
    plan = gap_plan()
    assert plan.step == GAP_STEP > 10**15
    assert not len(plan.slots)
