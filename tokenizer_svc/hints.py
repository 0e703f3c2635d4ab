"""The hints on `prompts`, each for one tokenizer: those that are new, and those that others were given and left."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from servicekit.bus import keys as k
from servicekit.bus.calls import Acknowledge, Call, Entry, Read, ReadGroup, Reclaim, SessionInfo, SessionKind
from servicekit.bus.keys import Keys
from servicekit.doorbell import Doorbell

READ_COUNT = 32  # hints in one read
READ_BLOCK_MS = 250


class Hints(NamedTuple):
    """Hints that a read has brought."""

    all: list[Entry]
    left_behind: list[Entry]  # those among them that others were given


class HintReader:
    """One tokenizer's reads; used by one thread.

    Args:
        names: of the pool.
        name: by which the group knows this tokenizer.
        reclaim_after_s: hints that somebody was given so long ago are taken from whoever it was.
        stay_awake_s: as the `Doorbell` takes it; for so long after a hint no ring is waited for.
        clock_s: a clock that never goes back, in seconds.
    """

    def __init__(
        self,
        names: Keys,
        name: str,
        reclaim_after_s: float,
        stay_awake_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prompts = names.prompts
        self._name = name
        self._reclaim_after_s = reclaim_after_s
        self._reclaim_at_s = 0.0
        self._clock_s = clock_s
        self._bell = Doorbell(names, stay_awake_s, clock_s)
        self._stay_awake_s = stay_awake_s
        self._hinted_s = -math.inf  # when the last hint came
        self._peeked = b"0-0"  # entry of `prompts` that was seen last
        self._must_ask = False  # a prompt was seen that the group has not been asked for yet
        self._num_read = 0  # hints in the last read
        # Who was given hints and does not work on them; at first, whoever had this name before.
        self._leftover_names: list[str] = [name]

    def reads(self, *, may_wait: bool, is_idle: bool) -> list[Call[Any]]:
        """Read what others left, and last, waited for, what is new.

        Args:
            may_wait: nothing else is to be done.
            is_idle: nor is anything written with the reads.
        """
        prompts, consumer = self._prompts, self._name.encode()
        names, self._leftover_names = self._leftover_names, []
        reads: list[Call[Any]] = [
            ReadGroup(prompts, k.TOKENIZERS, name.encode(), READ_COUNT, pending=True) for name in names
        ]
        now_s = self._clock_s()
        if now_s >= self._reclaim_at_s:
            # Whatever became of who took them, and of what is known about it.
            self._reclaim_at_s = now_s + self._reclaim_after_s / 2
            abandoned_ms = int(self._reclaim_after_s * 1000)
            reads.append(Reclaim(prompts, k.TOKENIZERS, consumer, abandoned_ms, READ_COUNT))
        block_ms = READ_BLOCK_MS if may_wait and not (names or self._must_ask) else 0
        self._must_ask = False
        awake_s = self._bell.awake_s(self._num_read)
        listening = self._bell.listen(is_idle=is_idle and block_ms > 0 and not awake_s)
        expected_s = self._hinted_s + self._stay_awake_s - now_s
        if listening and expected_s > 0:
            # Who waits for the bell needs one exchange more for a hint. Gateways that have streams do not ring: shortly
            # after a hint the next is waited for alone, and the bell heard of with it.
            reads.append(Read(listening, 1, 0))
            block_ms, listening = min(block_ms, math.ceil(expected_s * 1000)), {}
        reads.append(ReadGroup(prompts, k.TOKENIZERS, consumer, READ_COUNT, 0 if listening else block_ms, awake_s))
        if listening:
            # A group's read cannot wait for the doorbell: wait for either, then ask the group, and wait for nothing
            # with it: its prompts would wait too. Who is awake asks the group alone, and hears afterwards who has rung.
            reads.append(Read({prompts: self._peeked} | listening, 1, block_ms))
        return reads

    def take(self, answers: Sequence[Any], working: Iterable[bytes]) -> Hints:
        """The hints that the answers to `reads` have brought, without those of the entries that are worked on."""
        found = [each for each in answers if not isinstance(each, dict)]
        for each in answers:
            if isinstance(each, dict):
                self._hear(each)
        if found and found[-1]:
            self._peeked = found[-1][-1].entry_id
        known = set(working)
        read = {entry.entry_id: entry for entries in found for entry in entries if entry.entry_id not in known}
        self._num_read = len(read)
        if read:
            self._hinted_s = self._clock_s()
        new = {entry.entry_id for entry in found[-1]} if found else set()
        return Hints(list(read.values()), [entry for entry_id, entry in read.items() if entry_id not in new])

    def take_over(self, sessions: Iterable[SessionInfo], sid: bytes) -> None:
        """Read next what dead tokenizers were given, if it is for the session `sid` to do so."""
        self._leftover_names = _leftovers(sessions, sid)

    def read_own(self) -> None:
        """Read next what this one was given: the answer that brought it may have been lost."""
        self._leftover_names = [self._name]

    def acknowledge(self, hint: Entry) -> Acknowledge:
        """The call that ends a hint which leads nowhere."""
        return Acknowledge(self._prompts, k.TOKENIZERS, hint.entry_id)

    def _hear(self, entries: dict[bytes, list[Entry]]) -> None:
        """Take what came while idle: a prompt that the group is asked for next, or a ring."""
        for entry in entries.get(self._prompts, ()):
            self._peeked, self._must_ask = entry.entry_id, True
        self._bell.hear(entries)


def _leftovers(sessions: Iterable[SessionInfo], sid: bytes) -> list[str]:
    """The names of dead tokenizers, if it is this session that sees to what they were given: one of the living does."""
    tokenizers = [session for session in sessions if session.kind is SessionKind.TOKENIZER]
    living = [session for session in tokenizers if session.alive]
    if sid != min((session.sid for session in living), default=sid):
        return []
    # Who came back under its old name looks for itself.
    return sorted({session.name for session in tokenizers} - {session.name for session in living})
