"""The order of a roll-out, read from the events of a watch."""

from typing import Any

from kube import Object
from rollouts import rollout_of

BEFORE = frozenset({"old-1"})


def event(kind: str, uid: str, *, ready: bool = False, told: bool = False) -> tuple[str, Object]:
    """Of a pod of one StatefulSet, all of which have one name."""
    metadata: dict[str, Any] = {
        "uid": uid,
        "name": "valkey-1",
        "labels": {"app.kubernetes.io/component": "valkey"},
        "ownerReferences": [{"kind": "StatefulSet"}],
    }
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    ends = {"deletionTimestamp": "2026-11-30T16:05:00Z"} if told else {}
    return kind, {"metadata": {**metadata, **ends}, "status": {"conditions": conditions}}


ENDED = [
    event("ADDED", "old-1", ready=True),
    event("MODIFIED", "old-1", told=True),
    event("DELETED", "old-1", told=True),
]


def acts(events: list[tuple[str, Object]]) -> list[str]:
    return [str(turn) for turn in rollout_of(events, BEFORE)["valkey"]]


def test_a_pod_that_a_node_took_by_its_name_is_the_one_that_comes_again() -> None:
    came = [event("ADDED", "new-1"), event("MODIFIED", "new-1", ready=True)]
    again = [event("ADDED", "new-2"), event("MODIFIED", "new-2", ready=True)]
    expected = ["end old-1", "start new-1", "ready new-1"]
    assert acts([*ENDED, *came]) == expected
    assert acts([*ENDED, *came, event("DELETED", "new-1", ready=True), *again]) == expected


def test_a_pod_that_was_told_to_end_is_no_part_of_the_order() -> None:
    came = [event("ADDED", "new-1"), event("DELETED", "new-1", told=True)]
    assert acts([*ENDED, *came, event("ADDED", "new-2", ready=True)]) == ["end old-1", "start new-1", "ready new-1"]
