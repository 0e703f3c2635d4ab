"""Workers are paired by incarnation; shards are leased by one living session."""

from bus_flow import AWKWARD, DEAD_MS, LONG_MS, Flow, sid_of

from servicekit.bus.calls import (
    UNWANTED,
    Append,
    Commit,
    Compact,
    LeaseShard,
    Leave,
    ListShards,
    ListWorkers,
    LogBacklogs,
    Pair,
    Pairing,
    RegisterWorker,
    ReleaseShard,
    Renew,
    Renewed,
    SessionKind,
    Take,
    Unpair,
    WorkerEntry,
)
from servicekit.bus.keys import PAYLOAD


def test_a_registered_worker_is_listed_with_its_state(flow: Flow) -> None:
    worker, scheduler = flow.session(SessionKind.WORKER), flow.session()
    assert flow.connection.call(ListWorkers()) == []
    assert flow.connection.call(RegisterWorker(worker, "wörker:1", AWKWARD)) == b"0-0"
    entry = WorkerEntry("wörker:1", worker, alive=True, info=AWKWARD, owner=None)
    assert flow.connection.call(ListWorkers()) == [entry]
    assert flow.connection.call(Pair(scheduler, "wörker:1")) == Pairing(worker, AWKWARD, b"0-0")
    assert flow.connection.call(ListWorkers())[0].owner == scheduler
    flow.expire(worker)
    flow.expire(scheduler)
    (listed,) = flow.connection.call(ListWorkers())
    assert (listed.alive, listed.owner) == (False, None)


def test_a_pairing_reads_after_what_came_before(flow: Flow) -> None:
    worker, scheduler = flow.session(SessionKind.WORKER), flow.session()
    keys = flow.bus.keys
    flow.connection.call(Commit(scheduler, (), "w", b"plan of an earlier epoch"))
    assert flow.connection.call(RegisterWorker(worker, "w", b"")) == flow.entries(keys.steps("w"))[-1].entry_id
    result_id = flow.connection.call(Append(keys.results("w"), {PAYLOAD: b"result of an earlier epoch"}))
    pairing = flow.connection.call(Pair(scheduler, "w"))
    assert pairing is not None
    assert pairing.results_after == result_id


def test_a_worker_has_one_scheduler(flow: Flow) -> None:
    worker, first, second = flow.session(SessionKind.WORKER), flow.session(), flow.session()
    flow.connection.call(RegisterWorker(worker, "w", b""))
    assert flow.connection.call(Pair(first, "w")) is not None
    assert flow.connection.call(Pair(second, "w")) is None
    assert flow.connection.call(Pair(first, "w")) is not None, "asked again after a lost answer"


def test_the_worker_of_an_expired_scheduler_is_free_once_that_was_taken_over(flow: Flow) -> None:
    worker, dead, living = flow.session(SessionKind.WORKER), flow.session(), flow.session()
    flow.connection.call(RegisterWorker(worker, "w", b""))
    assert flow.connection.call(Pair(dead, "w"))
    flow.expire(dead)
    assert flow.connection.call(Pair(living, "w")) is None, "its scheduler may still go on"
    flow.connection.call(Take(living, dead))
    assert flow.connection.call(Pair(living, "w")) is not None


def test_a_dead_or_unknown_worker_cannot_be_paired(flow: Flow) -> None:
    worker, scheduler = flow.session(SessionKind.WORKER), flow.session()
    assert flow.connection.call(Pair(scheduler, "w")) is None
    flow.connection.call(RegisterWorker(worker, "w", b""))
    flow.expire(worker)
    assert flow.connection.call(Pair(scheduler, "w")) is None


def test_registering_ends_the_pairing_as_no_plan_of_it_is_read(flow: Flow) -> None:
    old, new, scheduler = flow.session(SessionKind.WORKER), flow.session(SessionKind.WORKER), flow.session()
    flow.connection.call(RegisterWorker(old, "w", b"old"))
    flow.connection.call(Pair(scheduler, "w"))
    flow.connection.call(Commit(scheduler, (), "w", b"the first plan"))
    sent = flow.entries(flow.bus.keys.steps("w"))[-1].entry_id
    assert flow.connection.call(RegisterWorker(old, "w", b"again")) == sent
    assert flow.connection.call(ListWorkers()) == [WorkerEntry("w", old, alive=True, info=b"again", owner=None)]
    flow.connection.call(Pair(scheduler, "w"))
    flow.connection.call(RegisterWorker(new, "w", b"new"))
    assert flow.connection.call(ListWorkers()) == [WorkerEntry("w", new, alive=True, info=b"new", owner=None)]
    flow.connection.call(Leave(old))
    assert flow.connection.call(ListWorkers())[0].alive


def test_a_fenced_incarnation_does_not_take_its_name_back(flow: Flow) -> None:
    old, new = flow.session(SessionKind.WORKER), flow.session(SessionKind.WORKER)
    flow.connection.call(RegisterWorker(old, "w", b"old"))
    flow.connection.execute([Leave(old), RegisterWorker(new, "w", b"new")])
    assert flow.connection.call(RegisterWorker(old, "w", b"old")) == b""
    assert flow.connection.call(ListWorkers())[0].incarnation == new


def test_a_shard_has_one_living_holder(flow: Flow) -> None:
    first, second = flow.session(SessionKind.DETOKENIZER), flow.session(SessionKind.DETOKENIZER)
    assert flow.connection.execute(
        [LeaseShard(first, 0), LeaseShard(first, 0), LeaseShard(second, 0), LeaseShard(second, 1)]
    ) == [True, True, False, True]
    flow.connection.execute([ReleaseShard(second, 0), ReleaseShard(first, 0)])
    assert flow.connection.call(LeaseShard(second, 0))


def test_releasing_anothers_shard_does_nothing(flow: Flow) -> None:
    first, second = flow.session(), flow.session()
    flow.connection.execute([LeaseShard(first, 0), ReleaseShard(second, 0)])
    assert not flow.connection.call(LeaseShard(second, 0))


def test_an_expired_holder_keeps_its_shard_until_another_wants_it(flow: Flow) -> None:
    first, second = flow.session(ttl_ms=DEAD_MS), flow.session()
    keys = flow.bus.keys
    last = flow.connection.call(Append(keys.tokens(0), {PAYLOAD: b"row"}))
    assert flow.connection.execute([LeaseShard(first, 0), Compact(first, 0, last)]) == [True, True]
    assert flow.connection.call(LeaseShard(second, 0))
    assert flow.connection.call(Renew(first, LONG_MS))
    assert flow.connection.execute([LeaseShard(first, 0), Compact(first, 0, last)]) == [False, False]


def test_the_shard_of_a_session_that_was_taken_is_free(flow: Flow) -> None:
    dead, living = flow.session(), flow.session()
    flow.connection.call(LeaseShard(dead, 0))
    flow.expire(dead)
    flow.connection.call(Take(living, dead))
    assert flow.connection.call(LeaseShard(living, 0))


def test_a_shard_that_is_held_is_confirmed_and_one_that_was_lost_is_not(flow: Flow) -> None:
    first, second = flow.session(), flow.session()
    assert not flow.connection.call(LeaseShard(first, 0, held=True)), "it was never leased"
    assert flow.connection.execute([LeaseShard(first, 0), LeaseShard(first, 0, held=True)]) == [True, True]
    flow.expire(first)
    assert flow.connection.call(LeaseShard(first, 0, held=True)), "nobody took it"
    assert flow.connection.execute([LeaseShard(second, 0), ReleaseShard(second, 0)]) == [True, None]
    assert flow.connection.call(Renew(first, LONG_MS))
    assert not flow.connection.call(LeaseShard(first, 0, held=True)), "it is free, but was another's meanwhile"
    assert flow.connection.call(LeaseShard(first, 0))


def test_a_shard_is_nobodys_for_an_unknown_session(flow: Flow) -> None:
    assert not flow.connection.call(LeaseShard(sid_of(99), 0))
    assert flow.connection.call(LeaseShard(flow.session(), 0))


def test_shards_are_told_with_who_leases_them(flow: Flow) -> None:
    first, second = flow.session(SessionKind.DETOKENIZER), flow.session(SessionKind.DETOKENIZER)
    assert flow.connection.call(ListShards()) == {}
    flow.connection.execute([LeaseShard(first, 0), LeaseShard(first, 3), LeaseShard(second, 1)])
    assert flow.connection.call(ListShards()) == {0: first, 3: first, 1: second}
    flow.connection.execute([ReleaseShard(first, 3), Leave(second)])
    assert flow.connection.call(ListShards()) == {0: first}


def test_a_backlog_is_what_the_holder_of_a_shard_has_not_told_to_have_read(flow: Flow) -> None:
    owner, holder = flow.session(), flow.session(SessionKind.DETOKENIZER)
    flow.connection.call(Commit(owner, tuple((shard, b"row") for shard in (0, 0, 0, 1))))
    assert flow.connection.call(LogBacklogs((0, 1, 2))) == [3, 1, 0]
    assert flow.connection.call(LeaseShard(holder, 0, num_read=2))
    assert flow.connection.call(LogBacklogs((0,))) == [1]
    assert flow.connection.call(Compact(holder, 0, b"9999999999999-0"))
    assert flow.connection.call(LogBacklogs((0,))) == [0], "what it has dropped it need not read"
    flow.connection.execute([Leave(holder), Commit(owner, tuple((0, b"row") for _ in range(4)))])
    successor = flow.session(SessionKind.DETOKENIZER)
    assert flow.connection.call(LeaseShard(successor, 0))
    assert flow.connection.call(LogBacklogs((0,))) == [4], "who takes a shard has read nothing"


def test_a_worker_that_is_given_back_can_be_paired_with_by_another(flow: Flow) -> None:
    first, second, worker = flow.session(), flow.session(), flow.session(SessionKind.WORKER)
    flow.connection.call(RegisterWorker(worker, "w", b"info"))
    assert flow.connection.call(Pair(first, "w"))
    flow.connection.call(Unpair(second, "w"))
    assert flow.connection.call(Pair(second, "w")) is None
    flow.connection.execute([Unpair(first, "w"), Unpair(first, "w"), Unpair(first, "unknown")])
    assert flow.connection.call(Pair(second, "w"))
    flow.connection.call(Unpair(first, "w"))
    assert flow.connection.call(ListWorkers())[0].owner == second


OLD, NEW, THIRD = b"old-----", b"new-----", b"third---"


def register(flow: Flow, name: str, model_digest: bytes) -> bytes:
    worker = flow.session(SessionKind.WORKER)
    flow.connection.call(RegisterWorker(worker, name, b"", model_digest))
    return worker


def test_a_pool_takes_in_two_models_and_a_worker_of_a_third_learns_that_it_is_unwanted(flow: Flow) -> None:
    scheduler = flow.session()
    for name, model_digest in (("a", OLD), ("b", NEW), ("c", NEW)):
        register(flow, name, model_digest)
        assert isinstance(flow.connection.call(Pair(scheduler, name)), Pairing)
    third = register(flow, "d", THIRD)
    assert flow.connection.call(Renew(third, LONG_MS)) is Renewed.YES
    assert flow.connection.call(Pair(scheduler, "d")) is UNWANTED
    assert flow.connection.call(Renew(third, LONG_MS)) is Renewed.UNWANTED
    listed = {entry.worker: entry for entry in flow.connection.call(ListWorkers())}
    assert listed["d"].owner is None


def test_a_model_goes_with_its_last_worker(flow: Flow) -> None:
    scheduler = flow.session()
    old = register(flow, "a", OLD)
    register(flow, "b", NEW)
    third = register(flow, "c", THIRD)
    for name in ("a", "b"):
        assert isinstance(flow.connection.call(Pair(scheduler, name)), Pairing)
    assert flow.connection.call(Pair(scheduler, "c")) is UNWANTED
    flow.expire(old)
    assert isinstance(flow.connection.call(Pair(scheduler, "c")), Pairing)
    assert flow.connection.call(Renew(third, LONG_MS)) is Renewed.YES
    register(flow, "a", OLD)
    assert flow.connection.call(Pair(scheduler, "a")) is UNWANTED, "now it is the third"


def test_a_model_stays_while_a_scheduler_holds_requests_that_began_on_it(flow: Flow) -> None:
    scheduler = flow.session()
    old = register(flow, "a", OLD)
    for name, model_digest in (("b", NEW), ("c", THIRD)):
        register(flow, name, model_digest)
    for name in ("a", "b"):
        assert isinstance(flow.connection.call(Pair(scheduler, name)), Pairing)
    flow.connection.call(Renew(scheduler, LONG_MS, models=OLD + NEW))
    flow.expire(old)
    flow.connection.call(Renew(scheduler, LONG_MS))
    assert flow.connection.call(Pair(scheduler, "c")) is UNWANTED
    flow.connection.call(Renew(scheduler, LONG_MS, models=NEW))
    assert isinstance(flow.connection.call(Pair(scheduler, "c")), Pairing)


def test_the_models_of_a_dead_scheduler_stay_as_long_as_nobody_took_its_requests(flow: Flow) -> None:
    dead, living = flow.session(), flow.session()
    request_id = flow.running(dead)
    flow.connection.call(Renew(dead, LONG_MS, models=OLD))
    for name, model_digest in (("b", NEW), ("c", THIRD)):
        register(flow, name, model_digest)
    assert isinstance(flow.connection.call(Pair(living, "b")), Pairing)
    flow.expire(dead)
    assert flow.connection.call(Pair(living, "c")) is UNWANTED
    assert flow.connection.call(Take(living, dead)) == [request_id]
    assert isinstance(flow.connection.call(Pair(living, "c")), Pairing)
