"""Ids of events: what a client has of each choice once it has the event, so that any gateway can go on after it.

An id is a version and base64 of columns of little-endian values: a u32 check sum, then for each choice u32 output
tokens, u32 characters, u64 hash over the tokens, u8 finish reason; where events are numbered, then the u64 number of
the event. To clients it is opaque. The check sum covers the
request's id too, so that what was damaged, or belongs to another request, is told from what the pipeline has no longer.
"""

import struct
from binascii import Error, a2b_base64, b2a_base64, crc32
from collections.abc import Sequence

from contract.domain.chain import CHAIN_START
from contract.domain.errors import PenstockError, invalid
from contract.domain.finish import FinishReason
from gateway_svc.core.streams import DeliveredSequence

LAST_EVENT_ID = "last-event-id"
MAX_CHOICES_WITH_IDS = 32  # of a call whose events have ids; they grow by 23 characters a choice
_VERSION = "1"
_HAVE = struct.Struct("<IIQB")
_SUM = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_ENDS = (FinishReason.UNSPECIFIED, FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


class EventIds:
    """Writes the ids of one call's events."""

    __slots__ = ("_haves", "_start")

    def __init__(self, request_id: bytes, have: Sequence[DeliveredSequence]) -> None:
        """From what the client has of each choice (`MAX_CHOICES_WITH_IDS` at most), and the call's first request."""
        self._start = crc32(request_id)
        self._haves = [_HAVE.pack(each.num_tokens, each.num_chars, each.chain, each.finish) for each in have]

    def after(self, choice: int, num_tokens: int, num_chars: int, chain: int, finish: int) -> bytes:
        """The line of the event that brings a choice to this point."""
        self.bring(choice, num_tokens, num_chars, chain, finish)
        return self.line()

    def bring(self, choice: int, num_tokens: int, num_chars: int, chain: int, finish: int) -> None:
        """Take a choice to this point, for the next events."""
        self._haves[choice] = _HAVE.pack(num_tokens, num_chars, chain, finish)

    def line(self, number: int | None = None) -> bytes:
        """The line of the next event; with its number, where events have one."""
        have = b"".join(self._haves)
        if number is not None:
            have += _NUMBER.pack(number)
        return b"id: 1" + b2a_base64(_SUM.pack(crc32(have, self._start)) + have)


def parse_event_id(
    text: str, request_id: bytes, num_choices: int, *, is_numbered: bool = False
) -> list[DeliveredSequence]:
    """Read what the client claims to have of each choice, and of a stream whose events are numbered the event's number.

    Raises:
        PenstockError: INVALID_ARGUMENT: not an id of an event of this request.
    """
    if not text.startswith(_VERSION):
        raise _wrong("is not one of this version's event ids")
    try:
        packed = a2b_base64(text[len(_VERSION) :].encode("ascii"), strict_mode=True)
    except (Error, UnicodeEncodeError) as error:
        raise _wrong("is damaged") from error
    if b2a_base64(packed, newline=False).decode() != text[len(_VERSION) :]:  # bits that stand for nothing
        raise _wrong("is damaged")
    have = packed[_SUM.size :]
    if len(packed) < _SUM.size or _SUM.unpack_from(packed)[0] != crc32(have, crc32(request_id)):
        raise _wrong("is damaged, or of another request")
    size = num_choices * _HAVE.size
    if len(have) != size + is_numbered * _NUMBER.size:
        raise _wrong("has another number of choices than the request")
    found = [_state(*values) for values in _HAVE.iter_unpack(have[:size])]
    if is_numbered:
        found[0].last_event = _NUMBER.unpack(have[size:])[0]
    return found


def _state(num_tokens: int, num_chars: int, chain: int, finish: int) -> DeliveredSequence:
    if finish >= len(_ENDS) or (num_tokens == 0 and (num_chars or chain != CHAIN_START)):
        raise _wrong("says what cannot be")
    return DeliveredSequence(num_tokens, num_chars, chain, _ENDS[finish], claim=num_tokens)


def _wrong(what: str) -> PenstockError:
    return invalid(f"Last-Event-ID {what}: send the last `id` that came, or none to begin anew", LAST_EVENT_ID)
