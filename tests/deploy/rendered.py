"""Pods of a rendered chart as their processes see them, and the triggers of its scalers."""

import re

from kube import Object, Pod, of_kind

from servicekit.settings import ServiceSettings, load
from tools import helm_values

SERVICES = ("gateway", "tokenizer", "scheduler", "detokenizer", "worker")
# What a kubelet, the downward API and LeaderWorkerSet put in.
INJECTED = {
    "POD_NAME": "llm-0",
    "WORKER_SET": "llm-large",
    "WORKER_INDEX": "0",
    "LWS_WORKER_INDEX": "3",
    "LWS_GROUP_SIZE": "16",
    "LWS_LEADER_ADDRESS": "llm-large-0.llm-large.serving",
}


def started_settings(pod: Pod) -> ServiceSettings:
    """The settings that a pod's process reads from its arguments and environment; an unknown flag fails."""
    environment = {each["name"]: str(each.get("value", "redis://secret:6379/0")) for each in pod.container["env"]}
    environment |= {name: value for name, value in INJECTED.items() if name in environment or name.startswith("LWS_")}
    arguments = [_expand(each, environment) for each in pod.container["args"]]
    assert pod.container["command"] == ["python", "-m", f"{pod.component}_svc"]
    return load(helm_values.settings_of(pod.component), arguments, environment)


def _expand(text: str, environment: dict[str, str]) -> str:
    return re.sub(r"\$\(([A-Z_]+)\)", lambda match: environment[match[1]], text)


def triggers(objects: tuple[Object, ...], component: str) -> dict[str, Object]:
    scaled = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in of_kind(objects, "ScaledObject")
    }
    return {each["name"]: each for each in scaled[component]["spec"]["triggers"]}
