"""KV that is there already: found by content, or shared by the samples of one request."""

import numpy as np
import pytest
from scheduling import Scheduling, make_request, request_id

from contract.domain.finish import CancelReason
from scheduler_svc.core.limits import WorkerLimits

SIZE = 4


def limits(num_blocks: int = 64, max_num_seqs: int = 8, max_model_len: int = 128) -> WorkerLimits:
    return WorkerLimits(num_blocks, SIZE, max_num_seqs, max_model_len)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + position) % 11 for position in range(length)]


def cached(scheduling: Scheduling, number: int, sequence: int = 0) -> list[int]:
    return scheduling.written[request_id(number), sequence].cached_tokens


def test_a_prompt_is_found_again_and_told_in_the_first_row_only() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    scheduling.add(make_request(1, prompt(10), max_tokens=1))
    scheduling.run()
    scheduling.add(make_request(2, prompt(10), max_tokens=3))
    plan = scheduling.schedule()
    assert plan is not None
    assert plan.admissions[0].num_computed_tokens == 8
    assert plan.num_tokens.tolist() == [2]
    scheduling.run()
    assert cached(scheduling, 1) == [0]
    assert cached(scheduling, 2) == [8, 0, 0]
    assert scheduling.scheduler.stats().counters.num_cached_tokens == 8
    scheduling.assert_nothing_is_left()


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_hit_never_covers_the_whole_prompt(num_blocks: int) -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    for number in (1, 2):
        scheduling.add(make_request(number, prompt(num_blocks * SIZE), max_tokens=1))
        scheduling.run()
    assert cached(scheduling, 2) == [(num_blocks - 1) * SIZE]


def test_a_prompt_is_shared_as_soon_as_its_plan_was_issued() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=2)
    scheduling.add(make_request(1, prompt(9), max_tokens=5))
    scheduling.schedule()
    scheduling.add(make_request(2, prompt(9), max_tokens=5))
    plan = scheduling.schedule()
    assert plan is not None
    assert plan.admissions[0].num_computed_tokens == 8
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_prompt_is_not_shared_within_the_plan_that_computes_it() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    for number in (1, 2):
        scheduling.add(make_request(number, prompt(9), max_tokens=5))
    plan = scheduling.schedule()
    assert plan is not None
    assert [admission.num_computed_tokens for admission in plan.admissions] == [0, 0]
    scheduling.run()
    scheduling.assert_nothing_is_left()


@pytest.mark.parametrize("window", [1, 3])
def test_generated_tokens_are_found_again(window: int) -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=window)
    scheduling.add(make_request(1, prompt(5), max_tokens=12))
    scheduling.run()
    conversation = prompt(5) + scheduling.output(1) + [1]
    scheduling.add(make_request(2, conversation, max_tokens=2))
    scheduling.run()
    assert cached(scheduling, 2)[0] == 16
    scheduling.assert_nothing_is_left()


def test_salts_keep_requests_apart() -> None:
    scheduling = Scheduling({"a": limits()})
    for number, salt in ((1, ""), (2, "x"), (3, "x")):
        scheduling.add(make_request(number, prompt(9), max_tokens=1, cache_salt=salt))
        scheduling.run()
    assert [cached(scheduling, number) for number in (1, 2, 3)] == [[0], [0], [8]]


@pytest.mark.parametrize("shares", [False, True])
def test_a_tenant_finds_what_another_has_asked_only_if_that_is_wanted(shares: bool) -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1, share_prefixes_between_tenants=shares)
    for number, tenant in ((1, "a"), (2, "b"), (3, ""), (4, "a")):
        scheduling.add(make_request(number, prompt(9), max_tokens=1, tenant=tenant))
        scheduling.run()
    assert [cached(scheduling, number) for number in (1, 2, 3, 4)] == [[0], *([[8 * shares]] * 2), [8]]


def test_salts_keep_requests_apart_where_tenants_share() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1, share_prefixes_between_tenants=True)
    for number, tenant, salt in ((1, "a", "x"), (2, "b", ""), (3, "b", "x")):
        scheduling.add(make_request(number, prompt(9), max_tokens=1, tenant=tenant, cache_salt=salt))
        scheduling.run()
    assert [cached(scheduling, number) for number in (1, 2, 3)] == [[0], [0], [8]]


def test_without_the_cache_nothing_is_found() -> None:
    scheduling = Scheduling({"a": limits()}, enable_prefix_caching=False)
    for number in (1, 2):
        scheduling.add(make_request(number, prompt(9), max_tokens=1))
        scheduling.run()
    assert cached(scheduling, 2) == [0]


def test_content_that_was_used_last_is_evicted_last() -> None:
    scheduling = Scheduling({"a": limits(num_blocks=6)}, plans_in_flight=1)
    for number, start in ((1, 0), (2, 5), (3, 0)):  # the second use makes the first prompt the newer one
        scheduling.add(make_request(number, prompt(9, start), max_tokens=1))
        scheduling.run()
    scheduling.add(make_request(4, prompt(9, 3), max_tokens=1))
    scheduling.run()
    for number, start in ((5, 0), (6, 5)):
        scheduling.add(make_request(number, prompt(9, start), max_tokens=1))
        scheduling.run()
    assert cached(scheduling, 5) == [8]
    assert cached(scheduling, 6) == [4], "of the older prompt the last full block went first"


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("caching", [True, False])
def test_samples_share_the_prompt_and_equal_requests_with_derived_seeds(length: int, caching: bool) -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=2, enable_prefix_caching=caching)
    scheduling.add(make_request(1, prompt(length), n=3, max_tokens=9))
    scheduling.run()
    scheduling.assert_nothing_is_left()
    assert len({tuple(scheduling.output(1, sequence)) for sequence in range(3)}) > 1
    worker = scheduling.paged["a"]
    assert worker.num_computed == length + 2 * 1 + 3 * 8, "the prompt is computed once, its last token by each sample"
    assert worker.num_copies == (2 if (length - 1) % SIZE else 0)
    assert [sum(cached(scheduling, 1, sequence)) for sequence in range(3)] == [0, 0, 0]


def test_samples_hold_the_same_whole_blocks() -> None:
    scheduling = Scheduling({"a": limits()}, plans_in_flight=1)
    scheduling.add(make_request(1, prompt(10), n=3, max_tokens=9))
    scheduling.step()
    scheduling.step()
    tables = [sequence.block_ids for sequence in scheduling.scheduler.block_table(request_id(1)) or ()]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3
    assert len({table[2] for table in tables}) == 3
    assert scheduling.scheduler.stats().workers["a"].num_used_blocks == 2 + 3


def test_samples_wait_for_slots_like_requests() -> None:
    scheduling = Scheduling({"a": limits(max_num_seqs=2)}, plans_in_flight=2)
    scheduling.add(make_request(1, prompt(6), n=5, max_tokens=4))
    scheduling.add(make_request(2, prompt(3), max_tokens=4))
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_samples_go_on_when_the_first_is_cancelled_before_the_prompt_is_computed() -> None:
    scheduling = Scheduling({"a": limits()}, max_num_batched_tokens=4)
    scheduling.add(make_request(1, prompt(10), n=3, max_tokens=4))
    scheduling.schedule()
    scheduling.cancel(1, CancelReason.CLIENT, 0)
    scheduling.run()
    scheduling.assert_nothing_is_left()
    assert len(scheduling.output(1, 2)) == 4


def test_a_waiting_sequence_goes_to_the_worker_that_has_its_prefix() -> None:
    scheduling = Scheduling({"a": limits(), "b": limits()}, plans_in_flight=1)
    scheduling.add(make_request(1, prompt(20), max_tokens=1))
    scheduling.step("b")
    scheduling.add(make_request(2, prompt(20), max_tokens=1))
    assert scheduling.schedule("a") is None
    plan = scheduling.schedule("b")
    assert plan is not None
    assert plan.admissions[0].num_computed_tokens == 16


def test_a_worker_with_the_prefix_is_not_waited_for_without_end() -> None:
    scheduling = Scheduling({"a": limits(), "b": limits()}, plans_in_flight=1)
    scheduling.add(make_request(1, prompt(20), max_tokens=40))
    scheduling.step("b")
    scheduling.schedule("b")  # and hangs
    scheduling.add(make_request(2, prompt(20), max_tokens=1))
    plans = [scheduling.schedule("a") for _ in range(20)]
    assert any(plans)


def test_a_worker_takes_what_another_is_full_for() -> None:
    scheduling = Scheduling({"a": limits(), "b": limits(max_num_seqs=1)}, plans_in_flight=1)
    scheduling.add(make_request(1, prompt(20), max_tokens=40))
    scheduling.step("b")
    scheduling.add(make_request(2, prompt(20), max_tokens=1))
    assert scheduling.schedule("a") is not None


def test_blocks_of_different_sizes_do_not_mix() -> None:
    scheduling = Scheduling({"a": limits(), "b": WorkerLimits(64, 3, 8, 128)}, plans_in_flight=1)
    for number, worker_id in ((1, "a"), (2, "b")):
        scheduling.add(make_request(number, prompt(13), n=2, max_tokens=8))
        for _ in range(3):
            scheduling.step(worker_id)
    scheduling.remove_worker("a")
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_recovered_request_goes_on_behind_its_tokens() -> None:
    whole = make_request(1, prompt(6), n=3, max_tokens=9)
    scheduling = Scheduling({"a": limits()})
    expected = [scheduling.expected(whole, sequence)[0] for sequence in range(3)]
    outputs = tuple(np.array(expected[i][:count], np.uint32) for i, count in enumerate((4, 0, 9)))
    recovered = make_request(1, prompt(6), n=3, max_tokens=9, output_token_ids=outputs)
    scheduling.add(recovered)
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_ended_sequences_of_a_recovered_request_stay_ended() -> None:
    outputs = (np.array([1, 2], np.uint32), np.empty(0, np.uint32))
    scheduling = Scheduling({"a": limits()})
    scheduling.add(
        make_request(1, prompt(6), n=2, max_tokens=9, output_token_ids=outputs, ended_sequences=frozenset({0}))
    )
    scheduling.run()
    assert len(scheduling.output(1, 0)) == 2
    assert len(scheduling.output(1, 1)) == 9


def test_cached_tokens_are_not_told_by_the_next_occupant_of_a_slot() -> None:
    scheduling = Scheduling({"a": limits(max_num_seqs=2)}, plans_in_flight=1)
    scheduling.add(make_request(1, prompt(9), max_tokens=1))
    scheduling.run()
    scheduling.add(make_request(3, prompt(5, 4), n=2, max_tokens=9))
    scheduling.add(make_request(2, prompt(9), max_tokens=9))
    scheduling.schedule()
    scheduling.cancel(2)
    scheduling.run()
    assert sum(cached(scheduling, 3, 1)) == 0
