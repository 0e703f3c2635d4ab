"""A sequence's first row from a slot tells since when it has that slot, and why it got it."""

import numpy as np
from scheduling import Scheduling, make_request

from contract.domain.timeline import Start, StartReason
from scheduler_svc.core.limits import WorkerLimits

ROOMY = WorkerLimits(num_blocks=64, block_size=4, max_num_seqs=4, max_model_len=200)
TIGHT = WorkerLimits(num_blocks=6, block_size=4, max_num_seqs=4, max_model_len=24)


def test_the_first_row_of_each_sample_tells_when_it_was_admitted_and_later_ones_nothing() -> None:
    scheduling = Scheduling({"a": ROOMY})
    scheduling.now_ns = 50
    scheduling.add(make_request(1, [1, 2, 3], max_tokens=4, n=2))
    scheduling.schedule()
    scheduling.now_ns = 90
    scheduling.run()
    first, second = sorted(scheduling.starts)
    assert first == (1, 0, 0, Start(50, StartReason.FIRST))
    assert second == (1, 1, 0, Start(90, StartReason.FIRST))


def test_a_preempted_sequence_tells_that_it_was() -> None:
    scheduling = Scheduling({"a": TIGHT})
    for number in (1, 2, 3):
        scheduling.add(make_request(number, [number] * 4, max_tokens=16))
    scheduling.run()
    again = [start for *_, position, start in scheduling.starts if position]
    assert again, "six blocks are too few for three sequences of five"
    assert {start.reason for start in again} == {StartReason.PREEMPTED}


def test_a_sequence_whose_worker_died_tells_where_it_goes_on() -> None:
    scheduling = Scheduling({"a": ROOMY})
    scheduling.add(make_request(1, [1, 2], max_tokens=9))
    for _ in range(3):
        scheduling.step()
    scheduling.lose_worker("a")
    scheduling.now_ns = 70
    num_tokens = len(scheduling.output(1))
    scheduling.add_worker("a")
    scheduling.run()
    assert scheduling.starts[1:] == [(1, 0, num_tokens, Start(70, StartReason.WORKER_LOST))]


def test_a_sequence_that_another_scheduler_began_tells_that_it_was_taken_over() -> None:
    scheduling = Scheduling({"a": ROOMY})
    begun = make_request(1, [1, 2], max_tokens=9)
    output, _ = scheduling.expected(begun, 0)
    scheduling.add(make_request(1, [1, 2], max_tokens=9, output_token_ids=(np.array(output[:3], np.uint32),)))
    scheduling.run()
    assert scheduling.starts == [(1, 0, 3, Start(1, StartReason.TAKEN_OVER))]


def test_a_start_that_was_not_told_is_forgotten_with_its_slot() -> None:
    scheduling = Scheduling({"a": ROOMY})
    scheduling.add(make_request(1, [1, 2], max_tokens=9))
    scheduling.schedule()
    scheduling.cancel(1)
    scheduling.add(make_request(2, [3, 4], max_tokens=2))
    scheduling.now_ns = 80
    scheduling.run()
    assert scheduling.starts == [(2, 0, 0, Start(80, StartReason.FIRST))]
