"""The engines that `bench.gpu` compares: ours in one process and as the pipeline, and a peer."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.rig.children import ChildError, ask
from bench.rig.served import Load, Server, answers_at, pipeline_phases, pipeline_ports
from bench.rig.work import Work
from penstock.launcher.ports import free_ports

START_TIMEOUT_S = 240.0
MAX_MODEL_LEN = 4096  # for rows that need no more
MAX_LONG_LEN = 16_384  # of an engine that has the row `long`
MEMORY_SHARE = 0.85
_PEER_SCRIPT = Path(__file__).with_name("vllm_engine.py")
_PEER_ENVIRON = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_RUST_FRONTEND": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Options:
    """The settings with which the engines are run."""

    chunk: int  # tokens of a step at most; 0: as is the default
    gateways: int
    simulated_ms: float  # 0: on the GPU
    profiled: tuple[int, ...]  # batches whose decode steps are looked into
    peer_path: str  # a folder with the peer's packages; empty: as installed
    limit_s: float  # for an engine in one process
    more: list[str]  # flags of `penstock serve`
    quantization: str | None = None  # to which every engine rounds weights; None: as they are stored
    kv_cache_dtype: str = "auto"  # of keys and values in every engine


@dataclass
class Measured:
    """The result of one engine."""

    name: str
    start: dict[str, Any] = field(default_factory=dict)  # seconds from its start, and phases
    rounds: dict[str, list[float]] = field(default_factory=dict)  # by row, seconds of each
    loads: dict[str, Load] = field(default_factory=dict)  # by row, what clients saw of the fastest
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        """For a file."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "Measured":
        """The inverse of `as_json`."""
        fields = json.loads(text)
        return Measured(**fields | {"loads": {row: Load(**load) for row, load in fields["loads"].items()}})

    def summary(self) -> str:
        """While the others are still to come."""
        rows = ", ".join(f"{row} {min(rounds):.3f} s" for row, rounds in self.rounds.items())
        return f"first token after {self.start['first_s']:.1f} s; {rows}"


def max_model_len(works: list[Work]) -> int:
    """Tokens of the longest sequence of any engine for these rows."""
    longest = max(
        len(prompt) + num for work in works for prompt, num in zip(work.prompts, work.num_tokens, strict=True)
    )
    return MAX_MODEL_LEN if longest <= MAX_MODEL_LEN else MAX_LONG_LEN


def in_process(folder: Path, works: list[Work], options: Options) -> Measured:
    """`LLM`.

    Raises:
        ChildError: it failed.
    """
    chosen: dict[str, Any] = {
        "max_model_len": max_model_len(works),
        "gpu_memory_utilization": MEMORY_SHARE,
        "max_num_batched_tokens": options.chunk,
        "enable_prefix_caching": False,
        "kv_cache_dtype": options.kv_cache_dtype,
    }
    if options.quantization:
        chosen["quantization"] = options.quantization
    if options.simulated_ms:
        chosen |= {"runner": "simulated", "step_ms": options.simulated_ms}
    asked = {
        "model": str(folder),
        "options": chosen,
        "works": [work.as_json() for work in works],
        "profiled": options.profiled,
    }
    return _measured("one process", [sys.executable, "-m", "bench.rig.in_process"], asked, options, {})


def pipeline(folder: Path, works: list[Work], options: Options) -> Measured:
    """`penstock serve`, streaming to clients.

    Raises:
        ChildError: it, a service or a client failed.
    """
    command = [
        *(sys.executable, "-m", "penstock.cli", "serve", f"--model={folder}", "--served-model-name=bench"),
        *("--port=0", "--grpc-port=0", f"--gateways={options.gateways}", f"--max-model-len={max_model_len(works)}"),
        "--no-enable-prefix-caching",
        f"--gpu-memory-utilization={MEMORY_SHARE}",
        f"--kv-cache-dtype={options.kv_cache_dtype}",
        *options.more,
    ]
    if options.quantization:
        command += [f"--quantization={options.quantization}"]
    if options.chunk:
        command += [f"--max-num-batched-tokens={options.chunk}"]
    if options.simulated_ms:
        command += ["--runner=simulated", f"--step-ms={options.simulated_ms}"]
    measured = Measured("pipeline")
    with Server(command, "bench", pipeline_ports, START_TIMEOUT_S) as server:
        _load(server, works, measured)
        measured.start["phases"] = pipeline_phases(server.said())
    return measured


def peer(folder: Path, works: list[Work], options: Options) -> Measured | None:
    """vLLM's offline engine; None where there is none.

    Raises:
        ChildError: it failed.
    """
    if not _has_peer(options):
        return None
    asked = {
        "model": str(folder),
        "options": {
            "max_model_len": max_model_len(works),
            "quantization": options.quantization,
            "kv_cache_dtype": options.kv_cache_dtype,
        },
        # It makes vectors with an engine that does nothing else.
        "works": [work.as_json() for work in works if not work.pools],
    }
    return _measured("vLLM", [sys.executable, str(_PEER_SCRIPT)], asked, options, _peer_environ(options))


def peer_server(folder: Path, works: list[Work], options: Options) -> Measured | None:
    """vLLM's server with its Rust front end, under the same clients; None where there is none.

    Raises:
        ChildError: it or a client failed.
    """
    if not _has_peer(options):
        return None
    [port] = free_ports(1)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--served-model-name", "bench"),
        *("--max-model-len", str(max_model_len(works)), "--max-num-seqs", "512"),
        *("--gpu-memory-utilization", str(MEMORY_SHARE), "--no-enable-prefix-caching", "--port", str(port)),
    ]
    measured = Measured("vLLM, Rust front end")
    with Server(command, "bench", answers_at(port), START_TIMEOUT_S, _peer_environ(options)) as server:
        _load(server, works, measured)
    return measured


def _load(server: Server, works: list[Work], measured: Measured) -> None:
    measured.start = {"first_s": server.first_s}
    for work in works:
        before_s = server.cpu_s()
        loads = [server.load(work) for _ in range(work.num_rounds)]
        after_s = server.cpu_s()
        measured.rounds[work.name] = [load.seconds for load in loads]
        best = measured.loads[work.name] = min(loads, key=lambda load: load.seconds)
        wall_s = sum(measured.rounds[work.name])
        cores = {name: (seconds - before_s.get(name, 0.0)) / wall_s for name, seconds in after_s.items()}
        busiest = sorted(cores.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {used:.2f}" for name, used in busiest if used > 0.02)
        measured.notes.append(f"{work.name}: cores used: {shown}; {best.events_per_token:.2f} events a token")


def _measured(
    name: str, command: list[str], asked: dict[str, Any], options: Options, environ: dict[str, str]
) -> Measured:
    notes: list[str] = []
    try:
        found = ask(command, asked, options.limit_s, environ)
    except ChildError as error:
        if len(error.answers) < 2:
            raise
        found = error.answers
        notes.append(f"ended early: {error}")
    version = found[0].get("version", "")
    measured = Measured(f"{name} {version}".strip(), start=found[0], notes=notes)
    for each in found[1:]:
        if "row" in each:
            measured.rounds[each["row"]] = each["seconds"]
        else:
            measured.notes += each["profile"]
    return measured


def peer_environ(path: str) -> dict[str, str]:
    """The environment of vLLM's processes; `path`: of its packages, empty where they are installed."""
    return _PEER_ENVIRON | ({"PYTHONPATH": path} if path else {})


def _peer_environ(options: Options) -> dict[str, str]:
    return peer_environ(options.peer_path)


def _has_peer(options: Options) -> bool:
    command = [sys.executable, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"]
    return subprocess.run(command, env=os.environ | _peer_environ(options), check=False).returncode == 0
