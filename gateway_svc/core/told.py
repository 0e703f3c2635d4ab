"""Choices of chats as their clients are told of them: thoughts, content and calls instead of one text."""

from collections.abc import Iterable
from typing import Any

from contract.domain.finish import FinishReason
from contract.domain.rows import TextRow
from gateway_svc.core.formats.call_ids import call_id
from gateway_svc.core.formats.pieces import Kind, Piece
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.thinking_tokens import ThinkingTokens

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "repetition",
}
_REASONING = ("reasoning", "reasoning_content")  # vLLM's name, and the one that was first


class ToldChoice:
    """One choice. Rows come in order from its first token on; what is told is a function of them."""

    __slots__ = ("_choice", "_num_calls", "_place", "_reader", "_reading", "_request_id", "_thinking")

    def __init__(self, reading: OutputReading, request_id: bytes, choice: int, place: int = 0) -> None:
        """Nothing is read so far.

        Args:
            reading: how its text is read.
            request_id: its request's.
            choice: its index.
            place: characters of the raw text up to which its client was told all.
        """
        self._reading = reading
        self._request_id = request_id
        self._choice = choice
        self._place = place
        self._reader = reading.reader()
        self._num_calls = 0
        self._thinking = ThinkingTokens(reading.closing_token_id)

    @property
    def place(self) -> int:
        """The characters of the raw text up to which all was told."""
        return max(self._place, self._reader.at)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """The tokens that it thought with; None: they are not known."""
        return self._thinking.count(self._reader.thoughts)

    def recall(self, row: TextRow) -> None:
        """Read what the client has been told of already."""
        self._thinking.add(row.token_ids)
        self._num_calls += sum(each.kind is Kind.CALL for each in self._reader.feed(row.text))

    def delta(self, row: TextRow) -> dict[str, Any]:
        """OpenAI's `delta` of a row: its part that was not told before; empty: there is nothing to tell yet."""
        fields: dict[str, Any] = {}
        for piece in self._told(row):
            text = piece.text
            match piece.kind:
                case Kind.REASONING:
                    for name in () if self._reading.without_reasoning else _REASONING:
                        fields[name] = fields.get(name, "") + text
                case Kind.CONTENT:
                    fields["content"] = fields.get("content", "") + text
                case Kind.CALL:
                    function = {"name": text, "arguments": ""}
                    fields.setdefault("tool_calls", []).append({**self._call(), "function": function})
                    self._num_calls += 1
                case Kind.ARGUMENTS:
                    calls = fields.setdefault("tool_calls", [])
                    index = self._num_calls - 1
                    if not calls:
                        calls.append({"index": index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        return fields

    def message(self, row: TextRow) -> dict[str, Any]:
        """OpenAI's `message` of a whole choice."""
        fields = self.delta(row)
        calls = [
            {name: value for name, value in each.items() if name != "index"} for each in fields.pop("tool_calls", [])
        ]
        message: dict[str, Any] = {"role": "assistant", "content": fields.get("content"), "refusal": None}
        if self._reading.reasoning_format and not self._reading.without_reasoning:
            message |= {name: fields.get(name) for name in _REASONING}
        if calls:
            message["tool_calls"] = calls
        return message

    def finish_fields(self, row: TextRow) -> dict[str, Any]:
        """Why it ended, if it did."""
        reason = FINISH_REASONS.get(row.finish)
        fields: dict[str, Any] = {"finish_reason": "tool_calls" if reason == "stop" and self._num_calls else reason}
        if row.finish:
            fields["stop_reason"] = row.stop_reason
        return fields

    def _call(self) -> dict[str, Any]:
        index = self._num_calls
        return {"index": index, "id": call_id(self._request_id, self._choice, index), "type": "function"}

    def _told(self, row: TextRow) -> Iterable[Piece]:
        self._thinking.add(row.token_ids)
        for each in self._reader.feed(row.text):
            piece = each.after(self._place)
            if piece is not None:
                yield piece
            elif each.kind is Kind.CALL:
                self._num_calls += 1
        if row.finish:  # what was held back so long was not told anywhere
            yield from self._reader.end()
