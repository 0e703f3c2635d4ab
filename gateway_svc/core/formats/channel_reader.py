"""The reader of outputs that are messages on channels."""

import re

from gateway_svc.core.formats.channels import Channels
from gateway_svc.core.formats.heads import MAX_HEAD_CHARS
from gateway_svc.core.formats.output_format import OutputFormat
from gateway_svc.core.formats.pieces import Kind
from gateway_svc.core.formats.teller import Teller, any_of, num_held

_TO = " to="


class ChannelReader(Teller):
    """One output: thoughts, calls of functions, and content, which is whatever else messages say.

    Headers and marks are never told; between two messages of a kind there is a line break. Text where a header should
    stand is content, so a prompt may end inside of an answer.
    """

    __slots__ = (
        "_any",
        "_ends",
        "_form",
        "_is_thought",
        "_kind",
        "_marks",
        "_recipient",
        "_thoughts",
        "_told",
        "_words",
    )

    def __init__(self, form: OutputFormat, words: Channels) -> None:
        super().__init__(self._body if form.is_reasoning else self._begin)
        self._form = form
        self._words = words
        self._kind = Kind.REASONING if form.is_reasoning else Kind.CONTENT  # of the message that is read
        self._told: set[Kind] = {self._kind} if form.is_reasoning else set()  # kinds of messages that there were
        self._thoughts: list[bool] = []
        self._is_thought = form.is_reasoning
        self._marks = (*words.marks, *form.hidden)
        self._any = any_of(self._marks)
        self._ends = any_of((words.message, words.end, *words.last))
        self._recipient = re.compile(rf"to={re.escape(words.functions)}([^\s<]+)")

    @property
    def thoughts(self) -> tuple[bool, ...]:
        """Implement `Teller.thoughts`: a message each."""
        return (*self._thoughts, self._is_thought)

    def _begin(self) -> bool:
        """A header begins here, or else content."""
        text, beginnings = self._held, (self._words.start, self._words.channel, self._words.message, _TO)
        if not text:
            return False
        if text.startswith(beginnings):
            self._step = self._header
            return True
        if not self._is_last and any(each.startswith(text) for each in beginnings):
            return False
        self._open(Kind.CONTENT, 0)
        return True

    def _header(self) -> bool:
        text = self._held
        found = self._ends.search(text)
        if found is None:
            if len(text) > MAX_HEAD_CHARS:
                beginning = self._any.match(text)
                self._open(Kind.CONTENT, beginning.end() if beginning is not None else 0)
                return True
            self._drop(len(text) if self._is_last else 0)
            return False
        if found[0] != self._words.message:  # a message without text
            self._close(found[0], found.end())
            return True
        self._read_header(text[: found.start()].rpartition(self._words.start)[2], found.end())
        return True

    def _read_header(self, header: str, size: int) -> None:
        function = self._recipient.search(header)
        if function is not None and self._form.tools is not None:
            self._tell_whole(Kind.CALL, function[1], size)
            self._kind, self._step = Kind.ARGUMENTS, self._body
            return
        _, _, channel = header.partition(self._words.channel)
        is_thought = channel.split(maxsplit=1)[:1] == [self._words.thoughts] and self._form.reasoning is not None
        self._is_thought = is_thought
        self._open(Kind.REASONING if is_thought else Kind.CONTENT, size)

    def _open(self, kind: Kind, size: int) -> None:
        """A message of this kind begins after so many characters."""
        if size and kind in self._told:
            self._tell_whole(kind, "\n", size)
        else:
            self._drop(size)
        self._told.add(kind)
        self._kind, self._step = kind, self._body

    def _body(self) -> bool:
        text = self._held
        found = self._any.search(text)
        if found is None:
            self._tell(self._kind, len(text) - (0 if self._is_last else num_held(text, self._marks, holds_space=False)))
            return False
        self._tell(self._kind, found.start())
        if found[0] in (self._words.start, self._words.channel):
            self._step = self._header
        elif found[0] in (self._words.end, *self._words.last):
            self._close(found[0], len(found[0]))
        else:
            self._drop(len(found[0]))
        return True

    def _close(self, mark: str, size: int) -> None:
        """The message ends with a mark, which ends after so many characters."""
        self._drop(size)
        if mark == self._words.end:
            self._thoughts.append(self._is_thought)
        self._is_thought, self._step = False, self._begin
