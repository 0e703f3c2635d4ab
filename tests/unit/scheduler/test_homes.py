"""The shards of workers, and with them the work of detokenizers."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.homes import home_shards

NAMES = st.sets(st.text(max_size=3), max_size=20)


@st.composite
def held(draw: st.DrawFn) -> list[bytes]:
    """The holder of each shard, as detokenizers share them: none has two more than another."""
    num_detokenizers = draw(st.integers(1, 4))
    shards = [bytes([number % num_detokenizers]) for number in range(draw(st.integers(num_detokenizers, 9)))]
    return draw(st.permutations(shards))


@given(NAMES, held())
def test_no_shard_has_two_workers_more_than_another(workers: set[str], holders: list[bytes]) -> None:
    homes = home_shards(workers, dict(enumerate(holders)), len(holders))
    assert homes.keys() == workers
    num_workers = Counter(homes.values())
    loads = [num_workers[shard] for shard in range(len(holders))]
    assert max(loads) - min(loads) <= 1


@given(NAMES, held())
def test_no_detokenizer_is_without_work_while_another_has_two_workers(workers: set[str], holders: list[bytes]) -> None:
    homes = home_shards(workers, dict(enumerate(holders)), len(holders))
    num_workers = Counter(holders[shard] for shard in homes.values())
    loads = [num_workers[holder] for holder in set(holders)]
    assert min(loads) > 0 or max(loads, default=0) <= 1


@given(NAMES, held())
def test_the_order_in_which_workers_are_known_does_not_matter(workers: set[str], holders: list[bytes]) -> None:
    known, in_order = dict(enumerate(holders)), sorted(workers)
    assert home_shards(in_order[::-1], known, len(holders)) == home_shards(in_order, known, len(holders))


def test_shards_that_nobody_leases_yet_are_given_too() -> None:
    assert home_shards(["a", "b", "c"], {}, 2) == {"a": 0, "b": 1, "c": 0}
    assert home_shards(["a", "b", "c", "d"], {1: b"x", 2: b"x"}, 4) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert home_shards(["a", "b"], {0: b"x", 1: b"x", 2: b"y"}, 3) == {"a": 0, "b": 2}
    assert home_shards([], {0: b"x"}, 3) == {}
