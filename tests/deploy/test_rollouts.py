"""The order of a roll-out, read from the events of a watch."""

from typing import Any

from kube import Object
from rollouts import rollout_of

BEFORE = frozenset({"old-1", "old-0"})


def event(kind: str, uid: str, *, ready: bool = False, told: bool = False) -> tuple[str, Object]:
    """Of a pod of one StatefulSet; `uid` ends with its ordinal, after which a letter may stand."""
    metadata: dict[str, Any] = {
        "uid": uid,
        "name": f"valkey-{uid.partition('-')[2][0]}",
        "labels": {"app.kubernetes.io/component": "valkey"},
        "ownerReferences": [{"kind": "StatefulSet"}],
    }
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    ends = {"deletionTimestamp": "2026-11-30T16:05:00Z"} if told else {}
    return kind, {"metadata": {**metadata, **ends}, "status": {"conditions": conditions}}


def ended(uid: str) -> list[tuple[str, Object]]:
    return [event("MODIFIED", uid, ready=True, told=True), event("DELETED", uid, told=True)]


def came(uid: str) -> list[tuple[str, Object]]:
    return [event("ADDED", uid), event("MODIFIED", uid, ready=True)]


def acts(events: list[tuple[str, Object]]) -> list[str]:
    return [str(turn) for turn in rollout_of(events, BEFORE)["valkey"]]


ORDER = ["end old-1", "start new-1", "ready new-1", "end old-0", "start new-0", "ready new-0"]


def test_a_pod_that_a_node_took_by_its_name_is_the_one_that_comes_again() -> None:
    taken = event("DELETED", "new-1", ready=True)
    assert acts([*ended("old-1"), *came("new-1"), *ended("old-0"), *came("new-0")]) == ORDER
    assert acts([*ended("old-1"), *came("new-1"), taken, *ended("old-0"), *came("new-1b"), *came("new-0")]) == ORDER


def test_a_pod_that_was_told_to_end_is_no_part_of_the_order() -> None:
    left = [*came("new-1"), *ended("new-1")]
    assert acts([*ended("old-1"), *left, *came("new-1b"), *ended("old-0"), *came("new-0")]) == ORDER
