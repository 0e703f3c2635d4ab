"""The reader of an output: raw text in, pieces out. What it tells is a function of the text, however it is cut."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from gateway_svc.core.formats.heads import MAX_HEAD_CHARS, MORE, Found, Head, find_head, skip_space
from gateway_svc.core.formats.json_values import JsonSpan
from gateway_svc.core.formats.output_format import OutputFormat
from gateway_svc.core.formats.pieces import Kind
from gateway_svc.core.formats.table import Body, KeyedCall
from gateway_svc.core.formats.teller import SPACE, Teller, any_of, num_held


class Reader(Teller):
    """One output: a thought, content, and calls of functions between marks."""

    __slots__ = (
        *("_after_call", "_body", "_format", "_function", "_has_content", "_has_reasoned", "_marks", "_may_think"),
        *("_num_keys", "_span", "_strips"),
    )

    def __init__(self, form: OutputFormat) -> None:
        super().__init__(self._reasoning if form.is_reasoning else self._start)
        self._format = form
        self._may_think = form.reasoning is not None and not form.is_reasoning
        self._strips = form.is_reasoning  # white space at the front of what comes next
        self._after_call = False
        self._has_content = False
        self._marks = _marks_of(form)
        self._body: Body = Body(KeyedCall())
        self._function = ""
        self._num_keys = 0
        self._span = JsonSpan()
        self._has_reasoned = form.is_reasoning  # the output has a thought, or begins in one

    @property
    def thoughts(self) -> tuple[bool, ...]:
        """Implement `Teller.thoughts`: one, at the beginning."""
        return (self._has_reasoned,)

    def _start(self) -> bool:
        """Nothing but white space was seen: a thought may begin here, or calls that have no mark."""
        form, text = self._format, self._held
        first = skip_space(text, 0)
        if first == len(text) and not self._is_last:
            return False
        if form.reasoning is not None and self._may_think:
            mark = form.reasoning.opens
            if text.startswith(mark, first):
                self._drop(first + len(mark))
                self._step, self._strips, self._has_reasoned = self._reasoning, True, True
                return True
            if mark.startswith(text[first:]) and not self._is_last:
                return False
        if form.tools is not None and form.tools.is_bare:
            found = self._find_call(form.tools.bodies, first, is_first=True)
            if isinstance(found, Head):
                self._begin_call(found)
            if found is not None:
                return found is not MORE
        self._step = self._content
        return True

    def _reasoning(self) -> bool:
        assert self._format.reasoning is not None
        if self._strips:
            self._drop(skip_space(self._held, 0))
            self._strips = not self._held
        closes, text = self._format.reasoning.closes, self._held
        end, hidden = text.find(closes), self._marks.hidden.search(text)
        if hidden is not None and (end < 0 or hidden.start() < end):
            self._tell(Kind.REASONING, hidden.start())
            self._drop(len(hidden[0]))
            return True
        if end >= 0:
            self._tell(Kind.REASONING, len(text[:end].rstrip(SPACE)))
            self._drop(self._held.index(closes) + len(closes))
            self._step, self._strips, self._may_think = self._start, True, False
            return True
        held = 0 if self._is_last else num_held(text, (closes, *self._format.hidden), holds_space=True)
        self._tell(Kind.REASONING, len(text) - held)
        return False

    def _content(self) -> bool:
        text = self._held
        found = self._marks.all.search(text)
        if found is None:
            self._go_on_with_content()
            return False
        if found[0] in self._format.hidden:
            self._tell_content(found.start())
            self._drop(len(found[0]))
            return True
        self._tell_content(len(text[: found.start()].rstrip(SPACE)))
        assert self._format.tools is not None
        if found[0] in self._format.tools.opens:
            self._step = self._open
        else:
            self._drop(self._held.index(found[0]) + len(found[0]))
            self._leave_call()
        return True

    def _go_on_with_content(self) -> None:
        text = self._held
        if self._is_last:
            if self._after_call and not text.strip(SPACE):
                self._drop(len(text))
            self._tell_content(len(self._held))
            return
        holds_space = self._strips or self._format.tools is not None
        self._tell_content(len(text) - num_held(text, self._marks.texts, holds_space=holds_space))

    def _tell_content(self, size: int) -> None:
        if self._strips:
            num_space = min(skip_space(self._held, 0), size)
            self._drop(num_space)
            size -= num_space
        if size:
            self._has_content, self._strips, self._after_call = True, False, False
            self._tell(Kind.CONTENT, size)

    def _open(self) -> bool:
        """The next mark opens calls, or is text if none follows."""
        assert self._format.tools is not None
        mark = self._marks.all.search(self._held)
        assert mark is not None
        found = self._find_call(self._format.tools.bodies, mark.end(), is_first=True)
        if isinstance(found, Head):
            self._begin_call(found)
        elif found is None:
            self._tell_content(mark.end())
            self._step = self._content
        return found is not MORE

    def _find_call(self, bodies: Iterable[Body], at: int, *, is_first: bool) -> Found:
        text = self._held[: at + MAX_HEAD_CHARS]
        for body in bodies:
            found = find_head(body, text, at, is_first=is_first)
            if isinstance(found, Head):
                self._body = body
                return found
            if found is MORE and len(self._held) < at + MAX_HEAD_CHARS and not self._is_last:
                return MORE
        return None

    def _begin_call(self, head: Head) -> None:
        self._function = head.name
        self._tell_whole(Kind.CALL, head.name, head.end)
        if head.arguments is not None:
            self._tell_whole(Kind.ARGUMENTS, head.arguments, 0)
            self._step = self._tail
        elif isinstance(self._body.call, KeyedCall):
            self._num_keys = 0
            self._step = self._keys
        else:
            self._span = JsonSpan(self._body.end if self._body.end.startswith("<") else "")
            self._step = self._arguments

    def _arguments(self) -> bool:
        self._tell(Kind.ARGUMENTS, self._span.advance(self._held, is_last=self._is_last))
        if self._span.is_over:
            self._step = self._tail
        return self._span.is_over

    def _tail(self) -> bool:
        """The end of a call, after its arguments; text that does not belong there is content."""
        body, text = self._body, self._held
        used, at = 0, skip_space(text, 0)
        if body.closes and text.startswith(body.closes, at):
            used = at + len(body.closes)
            at = skip_space(text, used)
        rest = text[at:]
        marks = [mark for mark in (body.separator, body.end, "" if used else body.closes) if mark]
        if not self._is_last and any(mark.startswith(rest) and mark != rest for mark in marks):
            return False
        if body.separator and rest.startswith(body.separator):
            found = self._find_call([body], at + len(body.separator), is_first=False)
            if isinstance(found, Head):
                self._begin_call(found)
            if found is not None:
                return found is not MORE
        elif body.end and (rest.startswith(body.end) or (self._is_last and body.end.startswith(rest))):
            used = min(at + len(body.end), len(text))
        self._drop(used)
        self._leave_call()
        return True

    def _leave_call(self) -> None:
        self._step, self._after_call, self._strips = self._content, True, not self._has_content

    def _keys(self) -> bool:
        """The arguments of a `KeyedCall`, as JSON; what does not belong there is passed on as it is."""
        call, end, text = self._body.call, self._body.end, self._held
        assert isinstance(call, KeyedCall)
        at = skip_space(text, 0)
        rest = text[at:]
        if rest.startswith(end) or (self._is_last and end.startswith(rest)):
            self._tell_whole(Kind.ARGUMENTS, "}" if self._num_keys else "{}", min(at + len(end), len(text)))
            self._leave_call()
            return True
        if rest.startswith(call.key[0]):
            pair = _read_pair(call, text, at)
            if pair is not None:
                key, value, size = pair
                written = f"{json.dumps(key, ensure_ascii=False)}: {self._as_json(key, value)}"
                self._tell_whole(Kind.ARGUMENTS, f"{', ' if self._num_keys else '{'}{written}", size)
                self._num_keys += 1
                return True
            if not self._is_last:
                return False
        marks = (call.key[0], end)
        if not self._is_last and any(mark.startswith(rest) for mark in marks):
            return False
        found = [place for mark in marks if (place := text.find(mark, at + 1)) >= 0]
        held = 0 if self._is_last else num_held(text, marks, holds_space=True)
        size = len(text[: min(found)].rstrip(SPACE)) if found else len(text) - held
        self._tell(Kind.ARGUMENTS, size)
        return bool(found)

    def _as_json(self, key: str, value: str) -> str:
        if key not in self._format.texts.get(self._function, ()):
            try:
                json.loads(value, parse_constant=_refuse)
                return value.strip(SPACE)
            except (ValueError, RecursionError):
                pass
        return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Marks:
    """The marks that end a stretch of text."""

    texts: tuple[str, ...]  # of content
    all: re.Pattern[str]  # any of them
    hidden: re.Pattern[str]


def _marks_of(form: OutputFormat) -> _Marks:
    tools = form.tools
    return _compiled(form.hidden, () if tools is None else (*tools.opens, *tools.silent))


@lru_cache(64)
def _compiled(hidden: tuple[str, ...], of_tools: tuple[str, ...]) -> _Marks:
    return _Marks((*of_tools, *hidden), any_of((*of_tools, *hidden)), any_of(hidden))


def _read_pair(call: KeyedCall, text: str, at: int) -> tuple[str, str, int] | None:
    """A key, its value and where they end; None: they are not all there."""
    key_end = text.find(call.key[1], at)
    if key_end < 0:
        return None
    value_start = skip_space(text, key_end + len(call.key[1]))
    if not text.startswith(call.value[0], value_start):
        return None
    value_start += len(call.value[0])
    value_end = text.find(call.value[1], value_start)
    if value_end < 0:
        return None
    return text[at + len(call.key[0]) : key_end], text[value_start:value_end], value_end + len(call.value[1])


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
