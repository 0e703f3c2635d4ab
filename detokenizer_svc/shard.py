"""One shard of the log: how far it is read, which requests are open in it, and what is to be done about its entries."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from contract.domain.errors import ErrorCode, PoisonMessageError
from contract.domain.finish import RequestError
from detokenizer_svc import wire
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.effects import Effects
from detokenizer_svc.core.extent import Compaction, LogExtent
from detokenizer_svc.core.sequence import Offset
from detokenizer_svc.core.textrows import NewRow, text_rows
from servicekit.bus import keys as k
from servicekit.bus.calls import Checkpoint, Compact, Entry
from servicekit.bus.keys import Keys

START = b"0-0"
COMPACT_BYTES = 1 << 20  # of checkpoints in one call, about: no call may keep the server busy for long
_MAX_EARLY_ATTACHMENTS = 1024


@dataclass(frozen=True, slots=True)
class Taken:
    """The consequences of one entry of the log."""

    effects: Effects
    sent_ns: int = 0  # when its rows were sent; 0: it had none
    poison: str = ""  # why it could not be read


class Shard:
    """A leased shard. Gives out effects and leaves it to its service to perform them."""

    def __init__(self, number: int, keys: Keys, detokenizer: Detokenizer) -> None:
        self.number = number
        self.detokenizer = detokenizer
        self.log_stream = keys.tokens(number)
        self.attach_stream = keys.attach(number)
        self.log_position = START
        self.attach_position = START
        self.extent = LogExtent()
        # A client may come back through another gateway before the opening of its request is read.
        self._early: dict[bytes, tuple[bytes, list[Offset]]] = {}
        # Live when an entry came that says of nobody that it is theirs: one of them that turns out to lack rows ends.
        self._doubtful: set[bytes] = set()

    def take(self, entry: Entry, routes: Mapping[bytes, bytes | None] | None = None) -> Taken:
        """Reads the next entry of the log.

        Args:
            entry: in the log's order, each once.
            routes: while the shard is rebuilt and texts are not given out, who will get the text of each request that
                is opened now; None: it has ended. Without it the opening itself says who.
        """
        self.log_position = entry.entry_id
        self.extent.read(entry.entry_id, sum(len(name) + len(value) for name, value in entry.fields.items()))
        if (payload := entry.fields.get(k.PAYLOAD)) is not None:
            return self._take_rows(payload, gives_texts=routes is None)
        request_id = entry.fields.get(k.REQUEST, b"")
        if len(request_id) != 16:
            return Taken(Effects(), poison="an entry of the log that is neither rows nor an opening")
        if self.detokenizer.is_known(request_id):  # the entry came twice, or the request has a checkpoint
            return Taken(Effects())
        route: bytes | None = entry.fields.get(k.ROUTE, b"")
        if routes is not None:
            route = routes.get(request_id)
        if route is None:
            self.detokenizer.forget(request_id)
            return Taken(Effects())
        self.extent.open(request_id)
        return self._open(request_id, entry.fields, route, _opened_ns(entry.entry_id))

    def restore(self, checkpoint: Checkpoint) -> Taken:
        """Reads a checkpoint, before anything of the log; texts are not given out."""
        request, request_id = checkpoint.request, checkpoint.request.request_id
        self.extent.restore(request_id)
        opening = {k.REQUEST: request_id, k.HEADER: request.header, k.BODY: request.body, k.META: request.meta}
        opened = self._open(request_id, opening, request.route)
        if opened.poison:
            return opened
        try:
            computed, rows = wire.decode_tokens(checkpoint.rows)
        except PoisonMessageError as error:
            return self._poisoned(PoisonMessageError(f"a checkpoint: {error}", [request_id]))
        if rows.timeline is not None:
            self.detokenizer.recall(request_id, rows.timeline)
        return Taken(self._drop_ended(self.detokenizer.push(rows, computed, gives_texts=False)))

    def compact(self, compaction: Compaction, sid: bytes, sent_ns: int) -> list[Compact]:
        """The calls of a compaction, the last of which drops what they all have made superfluous."""
        calls: list[Compact] = []
        checkpoints: list[tuple[bytes, bytes]] = []
        num_bytes = 0
        for request_id in compaction.request_ids:
            payload = wire.encode_checkpoint(self.detokenizer.checkpoint(request_id), sid, sent_ns)
            checkpoints.append((request_id, payload))
            num_bytes += len(payload)
            if num_bytes >= COMPACT_BYTES:
                calls.append(Compact(sid, self.number, START, tuple(checkpoints)))
                checkpoints, num_bytes = [], 0
        return [*calls, Compact(sid, self.number, compaction.before.min_id, tuple(checkpoints))]

    def attach(self, entry: Entry) -> Taken:
        """Reads the next entry of the attachments, after all of the log that came with it."""
        self.attach_position = entry.entry_id
        request_id, route = entry.fields.get(k.REQUEST, b""), entry.fields.get(k.ROUTE, b"")
        if len(request_id) != 16 or not route:
            return Taken(Effects(), poison="an attachment without request or route")
        try:
            offsets = wire.decode_offsets(entry.fields.get(k.OFFSETS, b""))
        except PoisonMessageError as error:
            return Taken(Effects(), poison=str(error))
        if not self.detokenizer.is_known(request_id):
            self._early[request_id] = (route, offsets)
            if len(self._early) > _MAX_EARLY_ATTACHMENTS:
                del self._early[next(iter(self._early))]
        return Taken(self.detokenizer.attach(request_id, route, offsets))

    def _take_rows(self, payload: bytes, *, gives_texts: bool) -> Taken:
        try:
            computed, rows = wire.decode_tokens(payload)
        except PoisonMessageError as error:
            return self._poisoned(error)
        if not len(rows):
            return self._poisoned(PoisonMessageError("a TokenBatch that names no request"))
        effects = self._drop_ended(self.detokenizer.push(rows, computed, gives_texts=gives_texts))
        if self._doubtful and (lacking := self._doubtful.intersection(effects.gaps)):
            effects.add(self._failed(sorted(lacking)))
        return Taken(effects, computed.sent_ns)

    def _open(self, request_id: bytes, opening: Mapping[bytes, bytes], route: bytes, opened_ns: int = 0) -> Taken:
        offsets: list[Offset] = []
        if request_id in self._early:
            route, offsets = self._early.pop(request_id)
        try:
            self.detokenizer.open(wire.decode_opening(opening, opened_ns), route)
        except PoisonMessageError as error:
            self.detokenizer.open(wire.unreadable_request(request_id), route)
            return self._poisoned(error)
        return Taken(self.detokenizer.attach(request_id, route, offsets) if offsets else Effects())

    def _poisoned(self, error: PoisonMessageError) -> Taken:
        """The requests that an unreadable entry concerns cannot be continued: their log has a hole.

        Every batch of a scheduler says whose it is, apart from its rows. An entry that does not was written by somebody
        else, and nobody need end by it. Should it have held rows after all, then the next rows of these requests show
        a gap. A successor decides the same.
        """
        if error.request_ids is None:
            self._doubtful.update(self.detokenizer.live_requests())
            return Taken(Effects(), poison=str(error))
        return Taken(self._failed(error.request_ids), poison=str(error))

    def _failed(self, request_ids: Iterable[bytes]) -> Effects:
        value = RequestError(
            ErrorCode.INTERNAL, "a part of what was generated cannot be read; see the detokenizer's log"
        )
        effects = Effects()
        for request_id in dict.fromkeys(request_ids):
            failed = self.detokenizer.fail(request_id, value)
            effects.cancels += failed.cancels
            effects.retirements += failed.retirements
        # With the whole text of all samples: who has a part of it takes the rest and the ends.
        whole: dict[bytes, list[NewRow]] = {}
        for each in effects.retirements:
            whole.setdefault(each.route, []).extend(each.result.new_rows())
        effects.texts = {route: text_rows(rows) for route, rows in whole.items()}
        return self._drop_ended(effects)

    def _drop_ended(self, effects: Effects) -> Effects:
        for retirement in effects.retirements:
            self.extent.close(retirement.request_id)
            self._doubtful.discard(retirement.request_id)
        return effects


def _opened_ns(entry_id: bytes) -> int:
    """The time at which an entry was written, Unix time by the server's clock, which it tells in milliseconds."""
    return int(entry_id.split(b"-")[0]) * 1_000_000
