from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.ordered_queue import OrderedQueue


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "discard", "peek"]), st.integers(0, 9), st.integers(0, 5))))
def test_it_behaves_as_a_sorted_list(operations: list[tuple[str, int, int]]) -> None:
    queue: OrderedQueue[int] = OrderedQueue()
    model: list[tuple[int, int, int]] = []  # key, order, item
    for order, (operation, item, key) in enumerate(operations):
        if operation == "push" and item not in queue:
            queue.push(key, item)
            model = sorted([*model, (key, order, item)])
        elif operation == "discard":
            queue.discard(item)
            model = [entry for entry in model if entry[2] != item]
        elif operation == "peek":
            assert queue.peek() == ((model[0][0], model[0][2]) if model else None)
        elif operation == "pop":
            assert queue.pop() == (model.pop(0)[2] if model else None)
        assert len(queue) == len(model)
        assert all(entry[2] in queue for entry in model)


def test_memory_stays_linear_in_what_waits_when_items_are_discarded() -> None:
    queue: OrderedQueue[int] = OrderedQueue()
    queue.push(0, -1)
    for item in range(10_000):
        queue.push(1, item)
        queue.discard(item)
    assert len(queue._heap) < 200
    assert queue.pop() == -1
    assert queue.pop() is None
