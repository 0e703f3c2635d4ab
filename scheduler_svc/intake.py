"""The ways in which requests come to a scheduler: claimed, taken over, handed over, loaded again."""

import time
from collections.abc import Sequence

import structlog

from contract.domain.errors import PoisonMessageError
from contract.domain.finish import CancelReason
from contract.domain.request import format_request_id
from scheduler_svc.arrival import damaged_rows, read_arrival
from scheduler_svc.claiming import CLAIM_COUNT, Claiming
from scheduler_svc.core.history import History
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.gathering import Gathering
from scheduler_svc.metrics import Meters
from scheduler_svc.outbox import Outbox
from scheduler_svc.shards import Shards
from scheduler_svc.wire import read_loaded
from servicekit.bus import keys
from servicekit.bus.calls import NOT_YET, Claim, Claimed, Load, Loaded, Owned, Settling, StoredRequest
from servicekit.logs import is_debugging

_log = structlog.stdlib.get_logger(__name__)


class Intake:
    """Asks the bus for requests and hands them to the core."""

    def __init__(self, sid: bytes, scheduler: Scheduler, shards: Shards, outbox: Outbox, meters: Meters) -> None:
        self.claiming = Claiming()
        self.gathering = Gathering()
        self._sid = sid
        self._scheduler = scheduler
        self._shards = shards
        self._outbox = outbox
        self._meters = meters
        self._must_look = False

    def claim(self, shard: int) -> None:
        """Ask for requests that nobody has; they are opened in this shard of the log."""
        self.claiming.is_due = False
        self._outbox.put(Claim(self._sid, CLAIM_COUNT, shard), self._claimed)

    def expect(self) -> None:
        """Note that the session may own requests that are not here."""
        self._must_look = True

    def look(self) -> None:
        """Ask for what is owned and is not here, if there may be any."""
        if self._must_look:
            self._must_look = False
            self._outbox.put(Owned(self._sid), self.load)

    def ask_again(self) -> None:
        """Ask for all that answers may have brought which were lost."""
        self.claiming.is_due = True
        self._outbox.put(Owned(self._sid), self.load)

    def load(self, request_ids: list[bytes]) -> None:
        """Ask for those of the session's requests that are not here."""
        unknown = [each for each in request_ids if each not in self._scheduler.requests]
        if unknown:
            self._outbox.put(Load(self._sid, tuple(unknown)), self._loaded)

    def _claimed(self, claimed: Claimed | Settling) -> None:
        if claimed is NOT_YET:
            self.claiming.settles(time.monotonic_ns())
            return
        if claimed.num_buried:
            _log.error("dead letters", stream="requests", count=claimed.num_buried, why=keys.NO_REQUEST.decode())
            self._meters.dead_letters["requests"] += claimed.num_buried
        self.claiming.is_due = len(claimed) == CLAIM_COUNT
        for request, sent_ns in zip(claimed, claimed.sent_ns, strict=True):
            self._add(request, sent_ns=sent_ns)
        held = self._scheduler.requests
        num_tokens = sum(held[each.request_id].num_prompt_tokens for each in claimed if each.request_id in held)
        self.gathering.note(num_tokens, claimed.num_coming, time.monotonic_ns())

    def _loaded(self, loaded: Loaded | Settling) -> None:
        """Go on with requests that another session began, after what checkpoints and log hold of them."""
        if loaded is NOT_YET:
            self._must_look = True
            return
        for request, histories in read_loaded(loaded):
            self._add(request, histories)

    def _add(self, stored: StoredRequest, histories: Sequence[History] = (), sent_ns: int = 0) -> None:
        """Hand a request to the core, after what is known of it: by the log, and by its gateway if that is more.

        `sent_ns` says when its hint was sent, Unix nanoseconds; 0: it came without one.
        """
        now_ns, start_s = time.time_ns(), time.perf_counter()
        request_id = stored.request_id
        self._shards.open(request_id, stored.shard or 0)
        try:
            request, rows = read_arrival(stored, histories)
        except PoisonMessageError as error:
            self._outbox.bury("requests", {keys.REQUEST: request_id}, str(error))
            self._shards.log(damaged_rows(stored))
            return
        self._shards.log(rows)
        if request is None:
            _log.error("what was logged and what was delivered differ", request_id=format_request_id(request_id))
            return
        self._meters.num_restored_tokens += len(rows.token_ids)
        self._shards.log(self._scheduler.add(request, now_ns))
        if stored.cancel_reason and request_id in self._scheduler.requests:
            self._shards.log(self._scheduler.cancel(request_id, CancelReason(stored.cancel_reason), now_ns))
        if is_debugging():
            num_tokens = len(request.prompt_token_ids)
            _log.debug("queued", request_id=format_request_id(request_id), num_prompt_tokens=num_tokens)
        self._meters.requests.observe(sent_ns or now_ns, now_ns, time.perf_counter() - start_s)
