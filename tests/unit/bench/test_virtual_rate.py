"""The row `rate` in virtual time: every token comes, when the formula says so."""

from itertools import pairwise

import pytest

from bench.rig.work import RATE_PER_S, make_work
from bench.virtual_rate import MS, Arrival, Times, arrivals, run
from scheduler_svc.core.config import SchedulerConfig

TIMES = Times(fixed=2, least=4, row=0.02, decode=0.5, to_scheduler=3, to_device=1, to_client=2)
CONFIG = SchedulerConfig(max_num_batched_tokens=512, enable_prefix_caching=False)


def test_one_request_takes_the_time_of_its_steps_and_of_its_ways() -> None:
    (times,) = run([Arrival(sent_ns=7 * MS, num_prompt_tokens=1000, num_tokens=3)], TIMES, CONFIG)
    # 512 rows, then 488: 12.24 and 11.76 ms; then steps with one sequence that decodes.
    assert times[0] == pytest.approx((7 + 3 + 1 + 12.24 + 11.76 + 2) * MS, abs=10)
    assert [after - before for before, after in pairwise(times)] == [round(6.5 * MS)] * 2


def test_a_sequence_that_decodes_waits_for_a_step_with_a_prompt() -> None:
    requests = [Arrival(0, 10, 20), Arrival(30 * MS, 400, 1)]
    times, other = run(requests, TIMES, CONFIG)
    assert (len(times), len(other)) == (20, 1)
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) == pytest.approx((2 + 0.02 * 401 + 0.5) * MS, abs=10)


def test_every_token_of_every_request_comes_in_order() -> None:
    requests = arrivals(seed=3, rate=40.0)[:120]
    told = run(requests, TIMES, CONFIG)
    assert [len(times) for times in told] == [each.num_tokens for each in requests]
    assert all(times == sorted(times) and times[0] > each.sent_ns for each, times in zip(requests, told, strict=True))


def test_the_first_seed_draws_the_requests_of_bench_gpu() -> None:
    work = make_work("rate")
    assert work.arrivals_s is not None
    expected = list(zip(work.arrivals_s, map(len, work.prompts), work.num_tokens, strict=True))
    drawn = arrivals(seed=0, rate=RATE_PER_S)
    assert [(each.sent_ns, each.num_prompt_tokens, each.num_tokens) for each in drawn] == [
        (round(sent_s * 1e9), *rest) for sent_s, *rest in expected
    ]
    assert drawn != arrivals(seed=1, rate=RATE_PER_S)
