"""The order in which Kubernetes' controllers replace the pods of an upgrade.

It is taken from a watch of a control plane, kept in rollout.json, and followed by processes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kube import Object, example, settings

RECORD = Path(__file__).parent / "rollout.json"
# A release that a small machine runs whole, with more than one pod where the order of pods matters. A busy one takes
# longer than five seconds until another Valkey is the primary.
VALUES = (
    *example("several-tenants"),
    *settings(
        worker__settings={"runner": "simulated", "num-blocks": 2048, "max-num-seqs": 64, "step-ms": 10},
        gateway__preStopSleepSeconds=5,
        gateway__settings={"outage-patience-s": 60},
        detokenizer__settings={"orphan-grace-s": 600},
        tokenizer__replicas=1,
        scheduler__replicas=1,
        detokenizer__replicas=1,
        workers__main__replicas=1,
        workers__spare__replicas=0,
    ),
)


class Act(Enum):
    """One thing that happens to a pod."""

    END = "end"  # it is told to end, and nobody is sent to it any more
    START = "start"  # it is made; one that takes another's name, when the other is gone
    READY = "ready"  # its probes say so


@dataclass(frozen=True, slots=True)
class Turn:
    """An act on one pod of a workload.

    `number` is the pod's ordinal in a StatefulSet; in a Deployment, pods are numbered in the order of their first act,
    those from before the upgrade and those that take their places each for themselves.
    """

    act: Act
    is_new: bool
    number: int

    def __str__(self) -> str:
        return f"{self.act.value} {'new' if self.is_new else 'old'}-{self.number}"


Rollout = Mapping[str, Sequence[Turn]]  # by workload: component, and group of workers


def workload(labels: Mapping[str, str]) -> str:
    """The name under which a pod's workload is recorded."""
    names = (labels["app.kubernetes.io/component"], labels.get("penstock/worker-group"))
    return "-".join(each for each in names if each)


def read_record() -> Rollout:
    """The recorded order."""
    found = json.loads(RECORD.read_text("utf-8"))
    return {name: [_parse_turn(each) for each in turns] for name, turns in found.items()}


def write_record(rollout: Rollout) -> None:
    """Replace the recorded order."""
    RECORD.write_text(
        json.dumps({name: [str(each) for each in rollout[name]] for name in sorted(rollout)}, indent=2) + "\n", "utf-8"
    )


def _parse_turn(text: str) -> Turn:
    act, pod = text.split(" ")
    age, number = pod.split("-")
    return Turn(Act(act), {"old": False, "new": True}[age], int(number))


def watch_events(text: str) -> Iterator[tuple[str, Object]]:
    """Kinds of events and pods in what `kubectl get pods --watch --output-watch-events -o json` has printed so far."""
    decoder, position = json.JSONDecoder(), 0
    while text[position:].strip():
        position += len(text[position:]) - len(text[position:].lstrip())
        try:
            event, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:  # of the last one only the beginning is there
            return
        yield event["type"], event["object"]


def ready_pods(events: Sequence[tuple[str, Object]]) -> frozenset[str]:
    """Uids of the pods that are ready after these events."""
    last = {pod["metadata"]["uid"]: (kind, pod) for kind, pod in events}
    return frozenset(
        uid for uid, (kind, pod) in last.items() if _is_ready(pod) and Act.END not in _acts(kind, pod, is_new=True)
    )


def rollout_of(events: Sequence[tuple[str, Object]], before: frozenset[str]) -> Rollout:
    """The order in which controllers treated the pods of each workload.

    Workloads are independent of each other, and what a controller does without waiting for a pod to become ready is
    one step of it: it comes in whatever order, and is told here as ends and then starts.

    Args:
        events: of a watch, from before the upgrade to its end.
        before: uids of the pods that were there before it.
    """
    told = list(_told(events))
    last = {uid: (kind, pod) for uid, kind, pod in told}
    # A pod that came and did not stay is no part of the order: a StatefulSet may make one of the former revision.
    left = {uid for uid, (kind, pod) in last.items() if uid not in before and Act.END in _acts(kind, pod, is_new=True)}
    turns: dict[str, list[Turn]] = {}
    numbers: dict[str, int] = {}  # by uid
    seen: set[tuple[str, Act]] = set()
    for uid, kind, pod in told:
        is_new = uid not in before
        if uid in left:
            continue
        of_workload = turns.setdefault(workload(pod["metadata"]["labels"]), [])
        for act in _acts(kind, pod, is_new=is_new):
            if (uid, act) not in seen:
                seen.add((uid, act))
                number = numbers.setdefault(uid, _number(pod, [each for each in of_workload if each.is_new is is_new]))
                of_workload.append(Turn(act, is_new, number))
    return {name: list(_in_steps(each)) for name, each in turns.items() if each}


def _told(events: Sequence[tuple[str, Object]]) -> Iterator[tuple[str, str, Object]]:
    """The events with the uids of their pods, but for what controllers have no part in: a simulated node that ends a
    pod late does so by its name, and may take the next one of a StatefulSet, which was not told to end. The pod that
    then comes again has the uid of the one that was taken.
    """
    firsts: dict[str, str] = {}  # by uid
    taken: dict[str, str] = {}  # by name
    for kind, pod in events:
        name = pod["metadata"]["name"]
        uid = firsts.setdefault(pod["metadata"]["uid"], taken.pop(name, pod["metadata"]["uid"]))
        if kind == "DELETED" and "deletionTimestamp" not in pod["metadata"] and _owner(pod) == "StatefulSet":
            taken[name] = uid
        else:
            yield uid, kind, pod


def _acts(kind: str, pod: Object, *, is_new: bool) -> Iterator[Act]:
    if is_new:
        yield Act.START
        if _is_ready(pod):
            yield Act.READY
    if kind == "DELETED" or "deletionTimestamp" in pod["metadata"]:
        yield Act.END


def _is_ready(pod: Object) -> bool:
    conditions: list[Object] = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _owner(pod: Object) -> str:
    (owner,) = pod["metadata"]["ownerReferences"]
    kind: str = owner["kind"]
    return kind


def _number(pod: Object, turns: Sequence[Turn]) -> int:
    if _owner(pod) == "StatefulSet":
        return int(pod["metadata"]["name"].rpartition("-")[2])
    return len({each.number for each in turns})


def _in_steps(turns: Sequence[Turn]) -> Iterator[Turn]:
    step: list[Turn] = []
    for each in turns:
        if each.act is Act.READY:
            yield from sorted(step, key=lambda turn: turn.act is Act.START)
            step = []
            yield each
        else:
            step.append(each)
    yield from sorted(step, key=lambda turn: turn.act is Act.START)
