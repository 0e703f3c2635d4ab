"""The policy `fair`: shares by weights, floods that stay their sender's problem, strict classes, nobody starves."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import Scheduling, make_request, request_id

from contract.domain.finish import FinishReason
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.settings import SchedulerSettings
from servicekit.settings import load

NUM_SLOTS = 4
PROMPT = 3
OUTPUT = 8
REQUEST = PROMPT + OUTPUT  # tokens of the longest request here


class Tenants:
    """Requests of several tenants on one worker with few slots and many blocks."""

    def __init__(self, policy: str = "fair", **weights: float) -> None:
        limits = WorkerLimits(num_blocks=200, block_size=2, max_num_seqs=NUM_SLOTS, max_model_len=40)
        self.scheduling = Scheduling(
            {"a": limits},
            scheduling_policy=policy,
            plans_in_flight=1,
            tenant_weights=weights,
            enable_prefix_caching=False,
        )
        self.numbers = count(1)
        self.tenants: dict[int, str] = {}

    def send(self, tenant: str, num_requests: int = 1, output: int = OUTPUT, priority: int = 0) -> int:
        """The number of the last request."""
        for _ in range(num_requests):
            number = next(self.numbers)
            self.tenants[number] = tenant
            self.scheduling.add(
                make_request(number, [1 + number % 7] * PROMPT, max_tokens=output, tenant=tenant, priority=priority)
            )
        return number

    def served(self, tenant: str) -> int:
        """Tokens: prompts of requests that have begun, and outputs."""
        outputs = [len(self.scheduling.output(n)) for n, sender in self.tenants.items() if sender == tenant]
        return sum(PROMPT + output for output in outputs if output)

    def num_waiting(self, tenant: str) -> int:
        requests = self.scheduling.scheduler.requests
        return sum(request.sequences[0].slot < 0 for request in requests.values() if request.queued.tenant == tenant)

    def steps_to_first_token(self, number: int) -> int:
        for step in range(5000):
            if self.scheduling.output(number):
                return step
            self.scheduling.step()
        raise AssertionError("it starves")

    def finish(self) -> None:
        self.scheduling.run()
        self.scheduling.assert_nothing_is_left()


def test_backlogged_tenants_share_by_their_weights() -> None:
    tenants = Tenants(b=2)
    tenants.send("a", 150)
    tenants.send("b", 300)
    for _ in range(400):
        tenants.scheduling.step()
    assert tenants.num_waiting("a")
    assert tenants.num_waiting("b")
    served = tenants.served("a"), tenants.served("b")
    assert sum(served) > 1200
    assert abs(served[1] - 2 * served[0]) <= 2 * NUM_SLOTS * REQUEST
    tenants.finish()


@settings(max_examples=25)
@given(
    weights=st.lists(st.sampled_from([0.5, 1, 2, 3]), min_size=2, max_size=4),
    outputs=st.lists(st.integers(1, OUTPUT), min_size=1, max_size=8),
)
def test_no_backlogged_tenant_leads_another_by_more_than_what_fits_into_the_slots(
    weights: list[float], outputs: list[int]
) -> None:
    names = [f"t{index}" for index in range(len(weights))]
    tenants = Tenants(**dict(zip(names, weights, strict=True)))
    for output in outputs * 6:
        for name in names:
            tenants.send(name, output=output)
    while all(tenants.num_waiting(name) for name in names):
        tenants.scheduling.step()
        shares = [tenants.served(name) / weight for name, weight in zip(names, weights, strict=True)]
        # A tenant begins only while it is the least served; what it can gain from there on is what then runs.
        assert max(shares) - min(shares) <= NUM_SLOTS * REQUEST / min(weights)
    tenants.finish()


@pytest.mark.parametrize(("policy", "is_bounded"), [("fair", True), ("priority", False), ("fcfs", False)])
def test_a_flood_delays_anothers_single_requests_by_one_request_of_the_flood(policy: str, is_bounded: bool) -> None:
    tenants = Tenants(policy)
    tenants.send("flood", 100)
    steps = []
    for pause in (0, 1, 5, 2, 9):
        for _ in range(pause):
            tenants.scheduling.step()
        steps.append(tenants.steps_to_first_token(tenants.send("single")))
    # At worst all slots have just been taken: one is free after the steps of a request, the next step serves.
    assert (max(steps) <= OUTPUT + 2) == is_bounded
    assert is_bounded == (tenants.num_waiting("flood") > 0)
    tenants.finish()


def test_a_tenant_that_was_idle_gets_no_credit_for_idling() -> None:
    tenants = Tenants()
    tenants.send("late")
    tenants.send("busy", 400)
    for _ in range(200):
        tenants.scheduling.step()
    before = tenants.served("late"), tenants.served("busy")
    assert before[1] - before[0] > 10 * NUM_SLOTS * REQUEST
    tenants.send("late", 100)
    for _ in range(100):
        tenants.scheduling.step()
        gained = tenants.served("late") - before[0], tenants.served("busy") - before[1]
        assert abs(gained[0] - gained[1]) <= 2 * NUM_SLOTS * REQUEST
    assert tenants.num_waiting("late")
    tenants.finish()


def test_classes_are_strict_however_much_a_tenant_was_served() -> None:
    tenants = Tenants(urgent=0.01)
    tenants.send("patient", 8, priority=1)
    tenants.send("urgent", 40, priority=-1)
    while tenants.num_waiting("urgent"):
        tenants.scheduling.step()
        assert not tenants.served("patient")
    tenants.finish()
    assert tenants.served("patient") == 8 * REQUEST


def test_what_is_served_in_one_class_is_not_held_against_a_tenant_in_another() -> None:
    tenants = Tenants()
    tenants.send("a", 30, priority=0)
    tenants.send("a", 60, priority=1)
    tenants.send("b", 60, priority=1)
    while len(tenants.scheduling.scheduler.requests) > 50:
        tenants.scheduling.step()
    assert abs(tenants.served("a") - 30 * REQUEST - tenants.served("b")) <= NUM_SLOTS * REQUEST
    tenants.finish()


@settings(max_examples=25)
@given(
    weights=st.lists(st.sampled_from([0.1, 1, 2, 50]), min_size=2, max_size=4),
    warm_up=st.lists(st.tuples(st.integers(0, 3), st.integers(1, OUTPUT)), max_size=12),
    num_steps=st.integers(0, 30),
    quiet_weight=st.sampled_from([0.1, 1, 5]),
)
def test_nothing_starves_while_others_never_stop_sending(
    weights: list[float], warm_up: list[tuple[int, int]], num_steps: int, quiet_weight: float
) -> None:
    names = [f"t{index}" for index in range(len(weights))]
    tenants = Tenants(quiet=quiet_weight, **dict(zip(names, weights, strict=True)))

    def step() -> None:
        for name in names:
            if not tenants.num_waiting(name):
                tenants.send(name, NUM_SLOTS)
        tenants.scheduling.step()

    for index, output in warm_up:
        tenants.send(names[index % len(names)], output=output)
    for _ in range(num_steps):
        step()
    number = tenants.send("quiet")
    for _ in range((len(names) + 2) * (OUTPUT + 2)):  # each of the others may come first once; slots free up in between
        step()
    assert tenants.scheduling.finish(number) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("priorities", "victim"),
    [
        ((0, 0, 0), 2),  # "much" has the smallest weight: the newer of its two
        ((0, 0, 1), 3),  # the least important class, however little it was served
        ((1, 0, 0), 1),
    ],
)
def test_the_newest_of_the_most_served_tenant_in_the_least_important_class_is_preempted(
    priorities: tuple[int, int, int], victim: int
) -> None:
    limits = WorkerLimits(num_blocks=9, block_size=2, max_num_seqs=3, max_model_len=18)
    weights = {"much": 1, "little": 10}
    scheduling = Scheduling({"a": limits}, scheduling_policy="fair", plans_in_flight=1, tenant_weights=weights)
    for number, (tenant, priority) in enumerate(zip(("much", "much", "little"), priorities, strict=True), 1):
        scheduling.add(make_request(number, [number] * 3, max_tokens=12, tenant=tenant, priority=priority))
    while not scheduling.scheduler.stats().counters.num_preemptions:
        scheduling.step()
    preempted = [r.request_id for r in scheduling.scheduler.requests.values() if r.num_preemptions]
    assert preempted == [request_id(victim)]
    scheduling.run()
    scheduling.assert_nothing_is_left()


def test_a_prompt_is_charged_once_and_only_for_what_must_be_computed() -> None:
    limits = WorkerLimits(num_blocks=40, block_size=2, max_num_seqs=4, max_model_len=40)
    scheduling = Scheduling({"a": limits}, scheduling_policy="fair", plans_in_flight=1)
    scheduling.add(make_request(9, [5], max_tokens=20, tenant="other"))  # keeps the class alive
    charged = []
    for number, n in ((1, 1), (2, 1), (3, 2)):
        scheduling.add(make_request(number, [1, 2, 3, 4, 5, 6, 7], n=n, max_tokens=2, tenant="a"))
        before = scheduling.scheduler.policy.waiting.peek()
        assert before is not None
        while request_id(number) in scheduling.scheduler.requests:
            scheduling.step()
        charged.append(scheduling.scheduler.policy._queue.counter(0, "a") - before[0][1])  # type: ignore[attr-defined]
    # 7 + 2; 6 in full blocks were found; the second sample computes the last token of the prompt only.
    assert charged == [9, 3, 6]
    scheduling.run()
    scheduling.assert_nothing_is_left()


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="tenant 'a'"):
        SchedulerConfig(scheduling_policy="fair", tenant_weights={"a": weight})


def test_weights_are_read_from_the_flag() -> None:
    settings = load(SchedulerSettings, ["--scheduling-policy", "fair", "--tenant-weights", "name=2, a=b=0.5,=3"], {})
    assert settings.scheduling.scheduling_policy == "fair"
    assert settings.scheduling.tenant_weights == {"name": 2, "a=b": 0.5, "": 3}


@pytest.mark.parametrize("weights", ["name", "name=", "name=0", "name=0.0", "name=-1", "name=nan", "a=1,b=x"])
def test_a_malformed_weight_is_refused_at_the_start(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(SchedulerSettings, ["--tenant-weights", weights], {})
    assert "--tenant-weights" in capsys.readouterr().err
