"""The connections that network policies let through between the pods of a rendered chart, as Kubernetes reads them."""

from collections.abc import Iterator

from kube import Object, Pod

OUTSIDE = "outside"  # a pod or host that is not the release's


def selects(selector: Object, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}, "this reader knows no matchExpressions"
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def allows(policies: list[Object], source: Pod, target: Pod, port: int) -> bool:
    """Return whether both sides let a connection from one pod of the release to a TCP port of another through."""
    named = {each["name"]: each["containerPort"] for each in target.container["ports"]}

    def is_let_through(pod: Pod, other: Pod, direction: str, key: str) -> bool:
        for rule in _rules(policies, pod, direction):
            numbers = [named.get(each["port"], each["port"]) for each in rule.get("ports", [])]
            peers = rule.get(key)
            if (not numbers or port in numbers) and (peers is None or any(_is_pod(each, other) for each in peers)):
                return True
        return False

    return is_let_through(source, target, "egress", "to") and is_let_through(target, source, "ingress", "from")


def outside_rules(policies: list[Object], pod: Pod, direction: str) -> Iterator[tuple[str, Object | None]]:
    """The ports (numbers or names; empty: all) that are open to what is not the release's, and to whom (None: all)."""
    for rule in _rules(policies, pod, direction):
        peers = rule.get("from" if direction == "ingress" else "to")
        ports = [str(each["port"]) for each in rule.get("ports", [])] or [""]
        for peer in [None] if peers is None else peers:
            if peer is None or "podSelector" not in peer:
                yield from ((port, peer) for port in ports)


def _rules(policies: list[Object], pod: Pod, direction: str) -> Iterator[Object]:
    mine = [each["spec"] for each in policies if selects(each["spec"]["podSelector"], pod.labels)]
    restricted = [each for each in mine if direction.capitalize() in each["policyTypes"]]
    assert restricted, f"{pod.name}: {direction} is not restricted"
    for spec in restricted:
        yield from spec.get(direction) or []


def _is_pod(peer: Object, pod: Pod) -> bool:
    if "ipBlock" in peer:
        return bool(peer["ipBlock"]["cidr"] in ("0.0.0.0/0", "::/0"))
    return "namespaceSelector" not in peer and selects(peer["podSelector"], pod.labels)
