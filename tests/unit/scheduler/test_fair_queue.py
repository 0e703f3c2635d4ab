import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.fair_queue import _MAX_IDLE_TENANTS, FairQueue

TENANTS = ("a", "b", "c")
WEIGHTS = {"b": 2.0, "c": 0.5}


class Comparisons:
    """An order that counts how often it is asked."""

    num = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __lt__(self, other: "Comparisons") -> bool:
        Comparisons.num += 1
        return self.value < other.value


def opened(*tenants: str, priority: int = 0) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue(WEIGHTS)
    for tenant in tenants:
        queue.open(priority, tenant)
    return queue


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "pop", "discard", "charge", "put back"]),
            st.integers(0, 1),
            st.sampled_from(TENANTS),
            st.integers(0, 9),
        ),
        max_size=60,
    )
)
def test_it_behaves_as_a_list_searched_for_the_smallest_counter(operations: list[tuple[str, int, str, int]]) -> None:
    queue: FairQueue[int] = FairQueue(WEIGHTS)
    counters = {(priority, tenant): 0.0 for priority in (0, 1) for tenant in TENANTS}
    for priority, tenant in counters:
        queue.open(priority, tenant)
    waiting: dict[int, tuple[int, str]] = {}  # in the order of pushes, which is that within a tenant
    last_left: dict[int, str] = {}

    def leave(item: int) -> None:
        priority, tenant = waiting.pop(item)
        if (priority, tenant) not in waiting.values():
            last_left[priority] = tenant

    for number, (operation, priority, tenant, amount) in enumerate(operations):
        if operation == "push":
            others = [counters[place] for place in waiting.values() if place[0] == priority]
            if (priority, tenant) not in waiting.values() and (others or priority in last_left):
                floor = min(others) if others else counters[priority, last_left[priority]]
                counters[priority, tenant] = max(counters[priority, tenant], floor)
            queue.lift(priority, tenant)
            queue.push((priority, 0.0, tenant, number), number)
            waiting[number] = priority, tenant
        elif operation == "discard":
            item = list(waiting)[amount] if amount < len(waiting) else -1
            queue.discard(item)
            if item in waiting:
                leave(item)
        elif operation == "charge":
            counters[priority, tenant] += amount / WEIGHTS.get(tenant, 1)
            queue.charge(priority, tenant, amount)
        elif first := queue.peek():
            assert queue.pop() == first[1]
            if operation == "put back":
                before = waiting[first[1]]
                leave(first[1])
                queue.push(first[0], first[1])
                waiting = dict(sorted({**waiting, first[1]: before}.items()))
            else:
                leave(first[1])
        assert {place: queue.counter(*place) for place in counters} == counters
        assert len(queue) == len(waiting)
        assert all(item in queue for item in waiting)
        first = queue.peek()
        assert (first is None) == (not waiting)
        if first is not None:
            (chosen_priority, counter, chosen, _), item = first
            assert (chosen_priority, counter) == min((p, counters[p, t]) for p, t in waiting.values())
            assert item == next(item for item, place in waiting.items() if place == (chosen_priority, chosen))


def test_the_cost_of_taking_turns_does_not_grow_with_what_waits() -> None:
    queue: FairQueue[int] = FairQueue({})
    for item in range(10_000):
        queue.open(0, str(item % 100))
        queue.push((0, 0.0, str(item % 100), Comparisons(item)), item)
    Comparisons.num = 0
    for _ in range(500):
        first = queue.peek()
        assert first is not None
        assert queue.pop() == first[1]
        queue.charge(0, first[0][2], 10)
    assert Comparisons.num < 500 * 2 * 14  # a sift is two comparisons at each of at most log2(10,000) levels


def test_turns_follow_charges_and_weights() -> None:
    queue = opened("a", "b")
    for number in range(6):
        queue.push((0, 0.0, "a", number), f"a{number}")
        queue.push((0, 0.0, "b", number), f"b{number}")
    turns = ""
    while item := queue.pop():
        turns += item[0]
        queue.charge(0, item[0], 6)
    assert turns[:9].count("b") == 2 * turns[:9].count("a") == 6


def test_putting_back_what_was_taken_out_keeps_the_tenants_turn() -> None:
    queue = opened("a", "b")
    queue.charge(0, "b", 100)
    queue.push((0, 0.0, "a", 1), "a1")
    queue.push((0, 0.0, "b", 1), "b1")
    first = queue.peek()
    assert first is not None
    assert queue.pop() == "a1"
    queue.push(*first)
    assert queue.pop() == "a1"


@pytest.mark.parametrize("others_wait", [True, False])
def test_a_debt_outlives_a_tenants_absence_while_its_class_lives(others_wait: bool) -> None:
    queue = opened("a", "b")
    if others_wait:
        queue.push((0, 0.0, "b", 1), "b1")
    queue.charge(0, "a", 100)
    queue.close(0, "a")
    queue.open(0, "a")
    queue.lift(0, "a")
    assert queue.counter(0, "a") == 100
    assert queue.counter(0, "b") == 0


def test_memory_is_bounded_whatever_tenants_and_classes_come() -> None:
    queue = opened("a")
    for number in range(2 * _MAX_IDLE_TENANTS):
        queue.open(0, f"t{number}")
        queue.push((0, 0.0, f"t{number}", 0), "item")
        queue.discard("item")
        queue.close(0, f"t{number}")
        queue.open(number + 1, "a")
        queue.close(number + 1, "a")
    assert len(queue._classes) == 1
    assert len(queue._classes[0].accounts) == _MAX_IDLE_TENANTS + 1
    queue.close(0, "a")
    assert not queue._classes
