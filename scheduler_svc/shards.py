"""The commits of one scheduler: rows of the log, each in its request's shard, plans, and requests that have started."""

import time
from collections.abc import Collection, Container, Iterable, Sequence

import numpy as np

from contract.domain.rows import TokenRows
from contract.domain.timeline import Computed
from scheduler_svc.core.homes import home_shards
from scheduler_svc.core.rows import select_rows
from scheduler_svc.wire import WorkerOffer, encode_rows
from servicekit.bus.calls import Commit

_NOBODY = Computed()
_MAX_ENDED = 4096  # requests that may be remembered in any case


class Shards:
    """Every request has the shard that it was opened in; its rows go there, whoever computes it."""

    def __init__(self, sid: bytes, num_shards: int) -> None:
        self._sid = sid
        self._num_shards = num_shards
        self._by_request: dict[bytes, int] = {}
        self._rows: list[tuple[int, bytes]] = []  # (shard, TokenBatch)
        self._started: list[bytes] = []  # requests in plans of the last commits, which the server counts as waiting
        self._turn = 0
        self._workers: tuple[str, ...] = ()  # that live in the pool
        self._holders: dict[int, bytes] = {}  # the detokenizers that lease shards
        self._homes: dict[str, int] = {}

    @property
    def has_rows(self) -> bool:
        """Return whether rows wait for a commit."""
        return bool(self._rows)

    def open(self, request_id: bytes, shard: int) -> None:
        """A request was opened in a shard."""
        self._by_request[request_id] = shard

    def forget_ended(self, held: Collection[bytes]) -> None:
        """Let go of the requests that are not held any more, once these are the larger part."""
        if len(self._by_request) > 2 * len(held) + _MAX_ENDED:
            self._by_request = {key: shard for key, shard in self._by_request.items() if key in held}

    def of(self, request_ids: Iterable[bytes]) -> set[int]:
        """The shards of requests."""
        return {self._by_request.get(request_id, 0) for request_id in request_ids}

    def in_use(self) -> set[int]:
        """The shards that requests were opened in."""
        return set(self._by_request.values())

    def note_workers(self, workers: Iterable[str]) -> None:
        """Take over from a survey which workers live in the pool."""
        self._workers = tuple(workers)
        self._homes = home_shards(self._workers, self._holders, self._num_shards)

    def note_holders(self, holders: dict[int, bytes]) -> None:
        """Take over which detokenizers lease shards."""
        if holders != self._holders:
            self._holders = holders
            self._homes = home_shards(self._workers, holders, self._num_shards)

    def home(self, worker: str, offer: WorkerOffer) -> int:
        """The shard in which requests for a worker are opened, so that a step writes one shard, not all."""
        told = offer.home_shard
        return (self._homes.get(worker, 0) if told is None else told) % self._num_shards

    def choose(self, homes: Sequence[int], behind: Container[int]) -> int:
        """The shard for the next requests: homes take turns, without those that are `behind` if others are there."""
        self._turn += 1
        homes = homes or range(self._num_shards)
        open_ones = [shard for shard in homes if shard not in behind] or homes
        return open_ones[self._turn % len(open_ones)]

    def log(self, rows: TokenRows, computed: Computed = _NOBODY) -> None:
        """Put rows into the next commit, each into its request's shard; of a result also who computed it."""
        if not len(rows):
            return
        shards = [self._by_request.get(request_id, 0) for request_id in rows.request_ids]
        distinct = set(shards)
        for shard in distinct:
            part = rows if len(distinct) == 1 else select_rows(rows, np.array(shards) == shard)
            self._rows.append((shard, encode_rows(part, self._sid, computed._replace(sent_ns=time.time_ns()))))

    def commits(self, plans: Sequence[tuple[str, bytes]], started: Sequence[bytes]) -> list[Commit]:
        """The call with all rows and these plans, each (worker, penstock.v1.StepPlan), in which `started` have slots.

        No worker waits until starts are counted: they are told with what follows, their first rows at the latest.
        """
        if not (self._rows or plans):
            return []
        first, *others = plans or [("", b"")]
        commits = [Commit(self._sid, tuple(self._rows), *first, b"".join(dict.fromkeys(self._started)))]
        commits += [Commit(self._sid, (), *each) for each in others]
        self._rows, self._started = [], list(started)
        return commits
