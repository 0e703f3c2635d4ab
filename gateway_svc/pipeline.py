"""The state of the whole pool, as `penstock status` shows it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from servicekit.bus.calls import Call, Length, ListSessions, ListWorkers, SessionInfo, SessionKind
from servicekit.bus.keys import Keys

Execute = Callable[[Sequence[Call[Any]]], Awaitable[list[Any]]]


@dataclass(frozen=True, slots=True)
class PipelineReading:
    """The state of a pool as the bus tells it."""

    pool: str
    sessions: list[SessionInfo]
    lengths: dict[str, int]  # entries by stream, named without the pool


async def read_pipeline(execute: Execute, keys: Keys, num_shards: int) -> PipelineReading:
    """All sessions and the lengths of all streams.

    Raises:
        BusUnavailable: the server is gone.
    """
    sessions, workers = await execute((ListSessions(), ListWorkers()))
    names = {
        "prompts": keys.prompts,
        "requests": keys.requests,
        "cancels": keys.cancels,
        "dead": keys.dead,
        **{f"tokens:{shard}": keys.tokens(shard) for shard in range(num_shards)},
        **{f"attach:{shard}": keys.attach(shard) for shard in range(num_shards)},
        **{f"steps:{each.worker}": keys.steps(each.worker) for each in workers},
        **{f"results:{each.worker}": keys.results(each.worker) for each in workers},
        **{f"text:{each.name}": keys.text(each.sid) for each in sessions if each.kind is SessionKind.GATEWAY},
    }
    lengths = await execute([Length(stream) for stream in names.values()])
    return PipelineReading(keys.pool, sessions, dict(zip(names, lengths, strict=True)))
