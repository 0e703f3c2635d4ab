"""Recovery times as a metric."""

from servicekit.recovery import BOUNDS_S, Recoveries

S = 10**9


def counted(recoveries: Recoveries, suffix: str = "count") -> dict[str, float]:
    (family,) = recoveries.collect()
    return {s.labels["lost"]: s.value for s in family.samples if s.name == f"penstock_recovery_seconds_{suffix}"}


def test_the_first_request_that_goes_on_ends_a_loss() -> None:
    recoveries = Recoveries("worker", "scheduler")
    recoveries.lose("worker", 1 * S, [b"a", b"b"])
    recoveries.resume(b"x", 2 * S)
    assert counted(recoveries) == {"worker": 0, "scheduler": 0}
    recoveries.resume(b"b", 3 * S)
    recoveries.resume(b"a", 60 * S)
    assert counted(recoveries) == {"worker": 1, "scheduler": 0}
    assert counted(recoveries, "sum") == {"worker": 2.0, "scheduler": 0.0}


def test_a_request_may_have_been_lost_twice() -> None:
    recoveries = Recoveries("worker", "scheduler")
    recoveries.lose("worker", 1 * S, [b"a"])
    recoveries.lose("scheduler", 2 * S, [b"a"])
    recoveries.resume(b"a", 4 * S)
    assert counted(recoveries, "sum") == {"worker": 3.0, "scheduler": 2.0}


def test_losses_that_never_end_do_not_pile_up() -> None:
    recoveries = Recoveries("worker")
    for number in range(1000):
        recoveries.lose("worker", 0, [number.to_bytes(16, "big")])
    recoveries.resume((0).to_bytes(16, "big"), S)
    assert counted(recoveries) == {"worker": 0}
    recoveries.resume((999).to_bytes(16, "big"), S)
    assert counted(recoveries) == {"worker": 1}


def test_observations_fall_into_buckets() -> None:
    recoveries = Recoveries("worker")
    for seconds in (0.05, 2.0, 1000.0):
        recoveries.observe("worker", seconds)
    (family,) = recoveries.collect()
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert buckets["0.1"] == buckets["1.5"] == 1
    assert buckets["2.0"] == buckets[repr(BOUNDS_S[-1])] == 2
    assert buckets["+Inf"] == 3
