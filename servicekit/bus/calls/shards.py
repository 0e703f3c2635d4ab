"""Shards of the log: who has them, how far they are read, and how they are shortened."""

from dataclasses import dataclass

from servicekit.bus.calls.call import Call
from servicekit.bus.calls.requests import StoredRequest


@dataclass(frozen=True, slots=True)
class LeaseShard(Call[bool]):
    """Leases a shard for as long as the session is alive. False: another living session has it, or fenced.

    With `held`, only if the session has it already: who lost a shard meanwhile may have missed what another holder
    compacted, and must not get it back without rebuilding it.
    """

    sid: bytes
    shard: int
    held: bool = False
    num_read: int = 0  # entries that its log still has and the session has read, see `LogBacklogs`


@dataclass(frozen=True, slots=True)
class ReleaseShard(Call[None]):
    """Gives a shard back; nothing happens if another session has it."""

    sid: bytes
    shard: int


@dataclass(frozen=True, slots=True)
class ListShards(Call[dict[int, bytes]]):
    """The sessions that lease shards, by shard; a shard that nobody leases is left out."""


@dataclass(frozen=True, slots=True)
class LogBacklogs(Call[list[int]]):
    """The number of entries of each shard's log that its detokenizer has not read, as far as it has told."""

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compact(Call[bool]):
    """Replaces the beginning of a shard's log: stores checkpoints, then drops entries of `tokens:{shard}` before
    `min_id`. False: `sid` does not lease the shard.

    Of every running request that was opened before `min_id` there must be a checkpoint, given here or before, that has
    its rows before `min_id`. One of a request that does not run in this shard (any more) is passed over. `retire`
    deletes checkpoints.
    """

    sid: bytes
    shard: int
    min_id: bytes  # `0-0`: nothing is dropped
    checkpoints: tuple[tuple[bytes, bytes], ...] = ()  # (request, penstock.v1.TokenBatch)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The part of a running request that a compaction has kept: all that its opening had, and its rows."""

    request: StoredRequest
    rows: bytes  # penstock.v1.TokenBatch


@dataclass(frozen=True, slots=True)
class ReadCheckpoints(Call[list[Checkpoint] | None]):
    """Checkpoints of a shard in order of request ids, from the first one after `after` on; none are left: empty.

    None: `sid` does not lease the shard. For the lease holder several reads are as good as one: nobody else compacts
    or retires, and of what is committed meanwhile it finds all in the log.
    """

    sid: bytes
    shard: int
    after: bytes = b""  # a request id; empty: from the beginning
    count: int = 64
