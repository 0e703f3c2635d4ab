"""Plans are made as late as the device allows: late enough for what comes meanwhile, early enough for the device."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from scheduler_svc.core.pacing import Pacing

MS = 1_000_000


@dataclass
class Device:
    """A worker on a clock of its own: steps one after the other, plans that take a while to get there."""

    way_ns: int = MS
    back_ns: int = MS // 2
    pacing: Pacing = field(default_factory=Pacing)
    now_ns: int = 1_000 * MS
    step: int = 0
    free_ns: int = 0
    idle_ns: int = 0
    untold_ns: int = 0  # that it does nothing after a step, which its times do not have
    astray_ns: int = 0  # less that its clock shows of the next time in which it does nothing
    on_their_way: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # came, step, step_ns, idle, slack

    def plan(self, step_ns: int, num_prompt_tokens: int = 0) -> int:
        """Make a plan when it is due, with two in flight at most; how long it then is until its step begins."""
        while len(self.on_their_way) == 2:
            self.take()
        while (due_ns := self.pacing.due_ns(self.now_ns)) > self.now_ns:
            if self.on_their_way and self.on_their_way[0][0] <= due_ns:
                self.take()
            else:
                self.now_ns = due_ns
        self.step += 1
        num_tokens = np.array([1] * 4 + [num_prompt_tokens] * bool(num_prompt_tokens), np.uint32)
        self.pacing.issue(self.step, num_tokens, self.now_ns)
        ready_ns = self.now_ns + self.way_ns
        slack_ns = self.free_ns - ready_ns
        idle_ns = max(0, -slack_ns) if self.step > 1 else 0
        self.idle_ns += idle_ns
        begin_ns = max(self.free_ns, ready_ns)
        self.free_ns = begin_ns + step_ns + self.untold_ns
        self.on_their_way.append((self.free_ns + self.back_ns, self.step, step_ns, idle_ns - self.astray_ns, slack_ns))
        self.astray_ns = 0
        return begin_ns - self.now_ns

    def take(self) -> None:
        came_ns, step, step_ns, idle_ns, slack_ns = self.on_their_way.pop(0)
        self.now_ns = max(self.now_ns, came_ns)
        self.pacing.answer(step, step_ns, idle_ns, slack_ns, self.now_ns)


def test_a_plan_before_long_steps_is_made_when_the_step_before_it_is_about_to_end() -> None:
    device = Device()
    waits_ns = [device.plan(12 * MS) for _ in range(200)]
    assert max(waits_ns[:8]) > 10 * MS  # nothing is known yet: at once
    assert max(waits_ns[100:]) <= 2 * MS
    assert device.idle_ns == 0


def test_steps_as_short_as_the_way_are_planned_at_once() -> None:
    device = Device()
    for _ in range(100):
        device.plan(MS)
        assert device.pacing.due_ns(device.now_ns) == device.now_ns


def test_a_way_that_becomes_longer_costs_a_few_steps_and_no_more() -> None:
    device = Device()
    for _ in range(200):
        device.plan(12 * MS)
    device.way_ns = 4 * MS
    for _ in range(100):
        device.plan(12 * MS)
    late_ns, device.idle_ns = device.idle_ns, 0
    assert 0 < late_ns <= 4 * 3 * MS
    for _ in range(200):
        device.plan(12 * MS)
    assert device.idle_ns == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_device_that_jitters_hardly_waits(seed: int) -> None:
    dice, device = random.Random(seed), Device()
    total_ns = 0
    for _ in range(2000):
        device.way_ns = MS + int(dice.expovariate(1 / (0.3 * MS)))
        step_ns = 10 * MS + dice.randrange(MS // 2)
        total_ns += step_ns
        device.plan(step_ns)
    assert device.idle_ns < 0.003 * total_ns


@pytest.mark.parametrize("seed", range(5))
def test_results_that_come_late_make_plans_neither_late_nor_early(seed: int) -> None:
    dice, device = random.Random(seed), Device()
    waits_ns = []
    for _ in range(1000):
        device.back_ns = MS // 2 + int(dice.expovariate(1 / (0.3 * MS)))
        waits_ns.append(device.plan(12 * MS))
    # What the way takes, the margin, and what the soonest of sixteen results is late itself.
    assert max(waits_ns[200:]) < 1.5 * MS
    assert device.idle_ns < 0.2 * MS


def test_a_device_that_had_to_wait_once_gets_its_next_plans_as_late_as_before() -> None:
    device = Device()
    for _ in range(200):
        device.plan(12 * MS)
    for _ in range(3):
        device.way_ns = 3 * MS
        device.plan(12 * MS)
        device.way_ns = MS
        waits_ns = [device.plan(12 * MS) for _ in range(60)]
        # The next one was made before anybody knew.
        assert max(waits_ns[1:]) < 1.5 * MS
    assert device.idle_ns > 3 * MS


@pytest.mark.parametrize("seed", range(5))
def test_single_results_that_come_far_too_late_delay_no_plans(seed: int) -> None:
    dice, device = random.Random(seed), Device()
    waits_ns = []
    for _ in range(2000):
        device.back_ns = MS // 2 + int(dice.expovariate(1 / MS)) + (8 * MS if dice.random() < 0.05 else 0)
        waits_ns.append(device.plan(12 * MS))
    # Two in a row are taken for time that the device did not tell of.
    assert sum(waits_ns[200:]) < 1.7 * MS * len(waits_ns[200:])
    assert device.idle_ns < 0.003 * 2000 * 12 * MS


@pytest.mark.parametrize("untold_ns", [3 * MS, 50 * MS])
def test_time_that_the_device_does_not_tell_of_makes_a_few_plans_early_and_none_late(untold_ns: int) -> None:
    device = Device()
    for _ in range(100):
        device.plan(12 * MS)
    idle_ns = device.idle_ns
    device.untold_ns = untold_ns
    device.plan(12 * MS)
    device.untold_ns = 0
    waits_ns = [device.plan(12 * MS) for _ in range(100)]
    num_early = sum(each > 2 * MS for each in waits_ns)
    assert num_early <= (17 if untold_ns < 5 * MS else 4)
    assert max(waits_ns[20:]) <= 2 * MS
    assert device.idle_ns - idle_ns <= untold_ns


def test_untold_time_in_every_step_is_forgotten_once_it_is_over() -> None:
    device = Device(untold_ns=MS // 3)
    for _ in range(400):
        device.plan(12 * MS)
    device.untold_ns = 0
    for _ in range(200):
        device.plan(12 * MS)
    idle_ns, waits_ns = device.idle_ns, [device.plan(12 * MS) for _ in range(200)]
    assert max(waits_ns) <= 2 * MS
    assert device.idle_ns == idle_ns


def test_a_clock_that_came_away_in_a_long_silence_makes_no_plan_early() -> None:
    device = Device()
    for _ in range(100):
        device.plan(12 * MS)
    while device.on_their_way:
        device.take()
    device.now_ns += 60_000 * MS
    device.astray_ns = 4 * MS
    waits_ns = [device.plan(12 * MS) for _ in range(100)]
    assert max(waits_ns[3:]) <= 2 * MS


def test_steps_with_prompts_are_predicted_by_their_tokens() -> None:
    device = Device()
    waits_ns = []
    for number in range(600):
        num_tokens = 0 if number % 3 else 1000
        waits_ns.append(device.plan(6 * MS + num_tokens * 20_000, num_tokens))
    # A plan after a step of 26 ms waits for it as little as one after a step of 6.
    assert max(waits_ns[300:]) <= 2 * MS
    assert device.idle_ns == 0


def test_a_few_tokens_that_cost_nothing_do_not_make_the_plans_after_long_prompts_early() -> None:
    device = Device()
    waits_ns = []
    for number in range(600):
        num_tokens = (1000, 0, 30, 0, 1500, 0)[number % 6]
        waits_ns.append(device.plan(6 * MS + max(0, num_tokens - 150) * 20_000, num_tokens))
    # By what thirty tokens took, a step with 1,000 would take 6 ms, and not 23.
    assert max(waits_ns[300:]) <= 4 * MS
    assert device.idle_ns == 0


def test_no_prompt_has_been_computed_yet() -> None:
    device = Device()
    for _ in range(50):
        device.plan(12 * MS)
    device.plan(12 * MS, num_prompt_tokens=100)
    assert device.pacing.due_ns(device.now_ns) == device.now_ns


@pytest.mark.parametrize("num_steps", [10, 40])
def test_one_step_that_was_far_shorter_than_predicted_does_not_make_the_next_plans_early(num_steps: int) -> None:
    device = Device()
    for _ in range(20):
        device.plan(12 * MS)
    # A token of the first prompt takes a millisecond, of all others two hundredths of one.
    device.plan(112 * MS, num_prompt_tokens=100)
    for number in range(2 * num_steps):
        device.plan(12 * MS + (number % 2) * 20 * MS, num_prompt_tokens=number % 2 * 1000)
    waits_ns = [device.plan(12 * MS), device.plan(32 * MS, num_prompt_tokens=1000), device.plan(12 * MS)]
    assert max(waits_ns) <= 2 * MS


def test_an_answer_to_no_plan_changes_nothing() -> None:
    pacing = Pacing()
    pacing.answer(5, MS, 0, 0, 0)
    assert pacing.due_ns(7) == 7
