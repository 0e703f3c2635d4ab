import math
from itertools import pairwise

import numpy as np
import pytest

from penstock.benchmark.arrivals import arrival_times


def test_all_come_at_once_where_there_is_no_rate() -> None:
    assert list(arrival_times(3, math.inf, 1.0, 0)) == [0.0, 0.0, 0.0]


def test_a_fixed_pace_is_even() -> None:
    assert list(arrival_times(4, 2.0, math.inf, 0)) == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_times_between_requests_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    gaps = [later - earlier for earlier, later in pairwise(arrival_times(20_000, 8.0, burstiness, 5))]
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_the_same_seed_gives_the_same_times() -> None:
    first, again, other = (list(arrival_times(5, 1.0, 1.0, seed)) for seed in (1, 1, 2))
    assert first == again != other
