"""Taking a shard over: its checkpoints first, then its log from the start; what they led to is given out in order."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from detokenizer_svc.shard import Shard, Taken
from servicekit.bus import BusUnavailable
from servicekit.bus import keys as k
from servicekit.bus.calls import Call, Checkpoint, Entry, Fetch, LastId, Read, ReadCheckpoints, RequestState

NUM_CHECKPOINTS = 16  # in one read
NUM_ENTRIES = 512  # of the log in one read

Execute = Callable[[Sequence[Call[Any]]], list[Any]]


def rebuild(execute: Execute, sid: bytes, shard: Shard) -> Iterator[tuple[Entry, Taken]]:
    """Reads all that there is of a shard that `sid` has just leased, into a new `shard`.

    Yields:
        What was read and what it led to, ends and cancels first of all: texts are sent whole once everything is read.

    Raises:
        BusUnavailable: the bus is away, or the shard was lost meanwhile.
    """
    # Re-attachments before this moment are in the requests' own routes.
    (shard.attach_position,) = execute([LastId(shard.attach_stream)])
    after = b""
    while checkpoints := _checkpoints(execute, sid, shard.number, after):
        for checkpoint in checkpoints:
            after = checkpoint.request.request_id
            letter = {k.REQUEST: after, k.PAYLOAD: checkpoint.rows}
            yield Entry(b"", letter), shard.restore(checkpoint)
    while entries := _entries(execute, shard):
        routes = _routes(execute, shard, entries)
        for entry in entries:
            yield entry, shard.take(entry, routes)


def _checkpoints(execute: Execute, sid: bytes, number: int, after: bytes) -> list[Checkpoint]:
    found: list[Checkpoint] | None
    (found,) = execute([ReadCheckpoints(sid, number, after, NUM_CHECKPOINTS)])
    if found is None:
        raise BusUnavailable("the shard was lost while it was taken")
    return found


def _entries(execute: Execute, shard: Shard) -> list[Entry]:
    (found,) = execute([Read({shard.log_stream: shard.log_position}, NUM_ENTRIES)])
    entries: list[Entry] = found.get(shard.log_stream, [])
    return entries


def _routes(execute: Execute, shard: Shard, entries: list[Entry]) -> dict[bytes, bytes | None]:
    """The gateway that gets the text of the requests that these entries open; None: it has ended."""
    opened = [entry.fields[k.REQUEST] for entry in entries if k.REQUEST in entry.fields]
    routes: dict[bytes, bytes | None] = {}
    for request_id, stored in zip(opened, execute([Fetch(each) for each in opened]), strict=True):
        lives = stored is not None and stored.state is RequestState.RUNNING and stored.shard == shard.number
        routes[request_id] = stored.route if lives and stored is not None else None
    return routes
