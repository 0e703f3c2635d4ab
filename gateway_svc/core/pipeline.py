"""A pool as a page draws it: its services, the hops between them, and the KV blocks of its workers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# In the order of a request's way; who writes a hop, and who reads it.
HOPS = {
    "prompts": ("gateway", "tokenizer"),
    "requests": ("tokenizer", "scheduler"),
    "steps": ("scheduler", "worker"),
    "results": ("worker", "scheduler"),
    "tokens": ("scheduler", "detokenizer"),
    "text": ("detokenizer", "gateway"),
}
_FIGURES = {
    "waiting": "waiting",
    "running": "running",
    "generated_tokens": "generated_tokens_total",
    "cached_tokens": "cached_tokens_total",
    "preemptions": "preemptions_total",
    "blocks_used": "blocks_used",
    "blocks_cached": "blocks_cached",
    "blocks_total": "blocks_total",
}
_FULL = 255


@dataclass(frozen=True, slots=True)
class HopReading:
    """One hop as one of its readers tells it; seconds, messages a second."""

    hop: str
    wait_p50_s: float
    wait_p99_s: float
    work_p50_s: float
    work_p99_s: float
    rate: float


@dataclass(frozen=True, slots=True)
class WorkerBlocks:
    """The KV blocks of a worker in groups; shares from 0 to 255."""

    worker: str
    num_blocks: int
    group_size: int
    used: bytes
    cached: bytes


@dataclass(frozen=True, slots=True)
class ServiceReading:
    """One process as it told of itself last."""

    kind: str
    name: str
    state: str  # ready, not_ready, draining, or gone
    num_requests: int
    note: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    hops: Sequence[HopReading] = ()
    blocks: Sequence[WorkerBlocks] = ()

    @property
    def is_alive(self) -> bool:
        """Return whether its lease runs."""
        return self.state != "gone"


def pipeline_fields(pool: str, services: Sequence[ServiceReading], lengths: Mapping[str, int]) -> dict[str, Any]:
    """The body of a pool's picture.

    Args:
        pool: its name.
        services: in any order.
        lengths: entries by stream, named without the pool, `steps:{worker}` and the like.
    """
    alive = [each for each in services if each.is_alive]
    return {
        "object": "pipeline",
        "pool": pool,
        "figures": {
            name: round(sum(each.figures.get(figure, 0.0) for each in alive)) for name, figure in _FIGURES.items()
        },
        "hops": list(_hops(alive, lengths)),
        "services": [
            {
                "kind": each.kind,
                "name": each.name,
                "state": each.state,
                "requests": each.num_requests,
                "note": each.note,
            }
            for each in sorted(services, key=lambda each: (each.kind, each.name))
        ],
        "blocks": [_block_fields(blocks) for each in alive for blocks in each.blocks],
    }


def _hops(services: Sequence[ServiceReading], lengths: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for hop, (writer, reader) in HOPS.items():
        read = [each for service in services for each in service.hops if each.hop == hop]
        yield {
            "hop": hop,
            "from": writer,
            "to": reader,
            # Of some streams what was read stays until it is trimmed, so what waits is told beside it, by Little's law.
            "entries": sum(length for stream, length in lengths.items() if stream.partition(":")[0] == hop),
            "waiting": round(sum(each.rate * each.wait_p50_s for each in read), 3),
            "rate": round(sum(each.rate for each in read), 3),
            # Of several readers the slowest.
            "wait_p50_ms": _most_ms(each.wait_p50_s for each in read),
            "wait_p99_ms": _most_ms(each.wait_p99_s for each in read),
            "work_p50_ms": _most_ms(each.work_p50_s for each in read),
            "work_p99_ms": _most_ms(each.work_p99_s for each in read),
        }


def _most_ms(seconds: Iterator[float]) -> float:
    return round(max(seconds, default=0.0) * 1e3, 3)


def _block_fields(blocks: WorkerBlocks) -> dict[str, Any]:
    return {
        "worker": blocks.worker,
        "num_blocks": blocks.num_blocks,
        "group_size": blocks.group_size,
        "used": _shares(blocks.used),
        "cached": _shares(blocks.cached),
    }


def _shares(shares: bytes) -> list[float]:
    return [round(share / _FULL, 3) for share in shares]
