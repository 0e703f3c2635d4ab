"""Checks of a pipeline before it is started: each part is looked at, and nothing is changed.

Only Penstock's functions are stored on a Redis server that lacks them, as every connection does.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from contract.domain.errors import PenstockError
from gateway_svc.core.auth import parse_keys
from gateway_svc.core.pool_entries import parse_pools
from gateway_svc.settings import GatewaySettings
from penstock.launcher.layout import Child, Launch, check_free, children
from servicekit.bus import open_bus
from servicekit.bus.calls import ListSessions, SessionKind
from servicekit.bus.embedded import find_server
from servicekit.bus.interface import BusUnavailable
from servicekit.bus.probe import ask, find_address, read_info
from servicekit.settings import ServiceSettings, load
from servicekit.tls import open_identity
from tokenizer_svc.loading import load_vocabulary
from tokenizer_svc.settings import TokenizerSettings

OLDEST_SERVER = (7, 0)  # the first with functions
_INSPECTION_S = 300.0  # torch from a cold disk


class Verdict(Enum):
    """The weight of a finding."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"  # nothing starts, or nothing works


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check."""

    part: str
    text: str
    verdict: Verdict = Verdict.OK


def check(launch: Launch, environ: Mapping[str, str]) -> tuple[list[Finding], list[Child]]:
    """Everything that was found, and the processes that would be started."""
    url = launch.redis_url or "unix:///the/started/server"
    try:
        made = children(launch, url)
    except PenstockError as error:
        return [Finding("settings", error.message, Verdict.WRONG)], []
    settings, findings = _settings(made, environ)
    if settings:
        findings += _files(settings)
        findings += _of("model", lambda: _model(settings, made))
    findings += _of("redis", lambda: _server(launch))
    findings += _of("ports", lambda: _ports(made))
    return findings, made


def _of(part: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of a check; an error is its last one."""
    found: list[Finding] = []
    try:
        found.extend(look())
    except (PenstockError, BusUnavailable, OSError) as error:
        found.append(Finding(part, str(error), Verdict.WRONG))
    return found


def _settings(made: Sequence[Child], environ: Mapping[str, str]) -> tuple[dict[SessionKind, Any], list[Finding]]:
    """Each service's settings as its processes would read them. Who reads malformed ones says so itself, and ends."""
    read: dict[SessionKind, Any] = {}
    for child in made:
        if child.kind not in read:
            module = import_module(f"{child.module}.settings")
            kind: type[Any] = getattr(module, f"{child.kind.value.capitalize()}Settings")
            environment = {**environ, "PENSTOCK_REDIS_URL": child.redis_url}
            read[child.kind] = load(kind, child.flags, environment)
    counts = {child.kind: sum(each.kind is child.kind for each in made) for child in made}
    said = ", ".join(f"{count} {kind.value}{'s' if count > 1 else ''}" for kind, count in counts.items())
    return read, [Finding("settings", f"{len(made)} processes: {said}")]


def _files(settings: Mapping[SessionKind, Any]) -> Iterator[Finding]:
    """Keys, pools, tokens and certificates."""
    gateway: GatewaySettings = settings[SessionKind.GATEWAY]
    if (path := gateway.api_keys_file) is not None:
        yield from _of("api keys", lambda: _keys(path))
    if (pools := gateway.pools) is not None:
        yield from _of("pools", lambda: _pools(pools))
    yield from _of("tokens", lambda: _tokens(gateway))
    yield from _of("tls", lambda: _tls(gateway))


def _keys(path: Path) -> Iterator[Finding]:
    try:
        number = len(parse_keys(path.read_bytes()))
    except ValueError as error:
        yield Finding("api keys", f"{path}: {error}", Verdict.WRONG)
        return
    if number:
        yield Finding("api keys", f"{path}: {number} keys")
    else:
        yield Finding("api keys", f"{path} has no key: nobody may call", Verdict.WARNING)


def _pools(path: Path) -> Iterator[Finding]:
    try:
        entries = parse_pools(path.read_bytes())
    except ValueError as error:
        yield Finding("pools", f"{path}: {error}", Verdict.WRONG)
        return
    yield Finding("pools", f"{path}: {', '.join(entry.name for entry in entries)}")


def _tokens(settings: ServiceSettings) -> Iterator[Finding]:
    for path, token in (
        (settings.control_token_file, settings.control_token),
        (settings.metrics_token_file, settings.metrics_token),
    ):
        if token is not None:
            yield Finding("tokens", f"{path}: can be read")


def _tls(settings: ServiceSettings) -> Iterator[Finding]:
    if open_identity(settings.tls_files) is not None:
        yield Finding("tls", f"{settings.tls_cert}: the certificate and its key belong together")


def _model(settings: Mapping[SessionKind, Any], made: Sequence[Child]) -> Iterator[Finding]:
    text: TokenizerSettings = settings[SessionKind.TOKENIZER]
    vocabulary = load_vocabulary(
        text.model,
        revision=text.revision,
        max_model_len=text.max_model_len,
        generation_config=text.generation_config,
    )
    templates = "a chat template" if vocabulary.chat else "no chat template: /v1/chat/completions is refused"
    yield Finding("tokenizer", f"{vocabulary.vocab_size} tokens, a context of {vocabulary.context_length}, {templates}")
    worker = next((child for child in made if child.kind is SessionKind.WORKER), None)
    if worker is None:
        yield Finding("model", "no worker is started here: requests wait for one that runs elsewhere")
        return
    command = [sys.executable, "-m", "worker_svc.inspection", *worker.flags]
    environment = {**os.environ, "PENSTOCK_REDIS_URL": worker.redis_url}
    # A process of its own: only workers import torch.
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_INSPECTION_S, check=False)
    if ended.returncode:
        yield Finding("model", f"cannot be looked at: {ended.stderr.strip()[-300:]}", Verdict.WRONG)
        return
    yield from _inspected(json.loads(ended.stdout.splitlines()[-1]))


def _inspected(found: Mapping[str, Any]) -> Iterator[Finding]:
    if "error" in found:
        yield Finding("model", found["error"], Verdict.WRONG)
        return
    if found.get("runner") == "simulated":
        yield Finding("model", "simulated: no weights are read")
        return
    shown, kept = _size(found["weight_bytes"]), _size(found["memory_bytes"])
    stored = f" ({found['quantization']}; {kept} in the memory of each rank)" if found["quantization"] else ""
    of_module = ", by transformers' own module, which has proved itself" if _is_module(found) else ""
    told = f"{found['architecture']}, {found['layers']} layers, {shown} of weights{stored}{of_module}"
    yield Finding("model", told)
    gpus = found["gpus"]
    if not gpus:
        yield Finding("device", f"torch {found['torch']} sees no GPU: workers run on the CPU")
        return
    memory = gpus[0]["bytes"] / 1e9
    yield Finding(
        "device",
        f"torch {found['torch']}, {len(gpus)} x {gpus[0]['name']} of {memory:.0f} GB",
    )


def _is_module(found: Mapping[str, Any]) -> bool:
    return bool(found["implementation"] == "transformers")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _server(launch: Launch) -> Iterator[Finding]:
    if launch.redis_url is None:
        where = launch.settings.data_dir or "a temporary directory, so nothing outlives the pipeline"
        yield Finding("redis", f"{find_server()} is started for this pipeline, with its data in {where}")
        return
    address = find_address(launch.redis_url)
    (reply,) = ask(address, [("INFO",)])
    if isinstance(reply, Exception):
        yield Finding("redis", f"{address} refuses INFO, by which its fitness is known: {reply}", Verdict.WRONG)
        return
    info = read_info(reply)
    version = info.get("valkey_version") or info.get("redis_version", "0")
    name = "Valkey" if "valkey_version" in info else "Redis"
    if tuple(map(int, info.get("redis_version", "0.0").split(".")[:2])) < OLDEST_SERVER:
        yield Finding("redis", f"{name} {version} at {address}: 7.0 is the first that has functions", Verdict.WRONG)
        return
    yield Finding("redis", f"{name} {version} at {address}")
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        yield Finding("redis", f"maxmemory-policy is {policy}: set it to noeviction", Verdict.WRONG)
    if info.get("aof_enabled") == "0":
        lost = "what the server holds is lost when it is restarted"
        yield Finding("redis", f"appendonly is off: {lost}", Verdict.WARNING)
    connection = open_bus(launch.redis_url, launch.pool).connect()
    try:
        alive = [each for each in connection.call(ListSessions()) if each.alive]
    finally:
        connection.close()
    yield Finding("redis", f"has Penstock's functions; {len(alive)} processes are in the pool {launch.pool!r}")


def _ports(made: Sequence[Child]) -> Iterator[Finding]:
    check_free(made)
    gateways = [child for child in made if child.http_address]
    yield Finding(
        "ports", ", ".join(f"{each.name} at {each.http_address}, gRPC {each.grpc_address}" for each in gateways)
    )
