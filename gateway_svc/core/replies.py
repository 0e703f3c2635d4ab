"""Plain (not streamed) replies, and the error body."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from contract.domain.errors import PenstockError
from contract.domain.finish import FinishReason, Usage
from contract.domain.rows import TextRow
from gateway_svc.core.ask import Form
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.logprobs import chat_logprobs, completion_logprobs
from gateway_svc.core.prompt_logprobs import SpelledPrompt
from gateway_svc.core.prompt_outputs import PromptOutput
from gateway_svc.core.streams import merge
from gateway_svc.core.told import FINISH_REASONS, ToldChoice

_encode = msgspec.json.Encoder().encode


def encode(value: object) -> bytes:
    """JSON that is one line to every client: many split a stream where Python's `str.splitlines` does, as httpx's
    `iter_lines`, which is also at U+0085, U+2028 and U+2029. These are escaped.
    """
    text = _encode(value)
    if text.isascii():
        return text
    return (
        text.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


@dataclass(frozen=True, slots=True)
class ToldPrompt:
    """A prompt as a reply tells it."""

    text: str = ""  # before that of the output; empty: it is not told
    token_ids: tuple[int, ...] = ()  # empty: they are not told


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The beginning of every chunk and reply of one call."""

    form: Form
    call_id: str  # with OpenAI's prefix
    model: str
    created_s: int  # Unix time, seconds
    num_choices: int
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False  # told by themselves
    echoes_logprobs: bool = False  # of a completion: logprobs begin with those of the prompt
    without_output: bool = False  # of a completion: the prompt alone is told
    tokens_as_ids: bool = False
    include_usage: bool = False  # of a stream
    continuous_usage: bool = False  # of a stream, in every chunk
    prompts: tuple[ToldPrompt, ...] = ()  # none: nothing is told of them
    returns_token_ids: bool = False

    reading: OutputReading | None = None  # of a chat; None: outputs are content as they are
    request_id: bytes = b""  # of the call's first request
    context: bytes = b""  # JSON, what the reply repeats of the call; empty: nothing

    def told_row(self, row: TextRow) -> TextRow:
        """The part of an output's row that is told."""
        if not self.without_output:
            return row
        finish = FinishReason.LENGTH if row.finish else row.finish
        return replace(row, text="", token_ids=(), logprobs=(), finish=finish, stop_reason=None)

    def told_usages(self, usages: Sequence[Usage]) -> Sequence[Usage]:
        """The part of what requests used that is told."""
        return [replace(each, num_output_tokens=0) for each in usages] if self.without_output else usages

    def logprobs(self, choice: int, row: TextRow, before: SpelledPrompt | None) -> dict[str, Any] | None:
        """The logprobs of a row, after those of its prompt if they are told with it."""
        if not self.wants_logprobs or not (row.logprobs or before):
            return None
        if self.form is Form.CHAT:
            return chat_logprobs(row.logprobs, as_ids=self.tokens_as_ids)
        columns = completion_logprobs(row.logprobs, as_ids=self.tokens_as_ids)
        if text := self.prompt(choice).text:
            columns["text_offset"] = [len(text) + each for each in columns["text_offset"]]
        if before is None:
            return columns
        of_prompt = before.columns(as_ids=self.tokens_as_ids)
        return {name: of_prompt[name] + values for name, values in columns.items()}

    def prompt(self, choice: int) -> ToldPrompt:
        """The part of a choice's prompt that is told."""
        return self.prompts[choice * len(self.prompts) // self.num_choices] if self.prompts else ToldPrompt()

    def told(self, choice: int, place: int = 0) -> ToldChoice | None:
        """One choice as its client, who was told all up to this place, is told of it; None: as it is."""
        return None if self.reading is None else ToldChoice(self.reading, self.request_id, choice, place)


class Reply:
    """Gathers the rows of a call until it has ended."""

    __slots__ = ("_head", "_prompts", "_rows")

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._prompts: dict[int, SpelledPrompt] = {}  # by choice
        self._rows: list[list[TextRow]] = [[] for _ in range(head.num_choices)]

    def learn_prompt(self, choices: Iterable[int], output: PromptOutput) -> None:
        """The prompt of these choices has these logprobs."""
        if isinstance(output, SpelledPrompt):
            self._prompts |= dict.fromkeys(choices, output)

    def add(self, choice: int, row: TextRow) -> None:
        """Takes the next row of a choice."""
        self._rows[choice].append(row)

    def fields(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """The body; every choice has ended."""
        head = self._head
        chat = head.form is Form.CHAT
        models = {row.model_digest for rows in self._rows for row in rows if row.model_digest}
        told = [head.told(index) for index in range(head.num_choices)]
        return {
            "id": head.call_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": head.created_s,
            "model": head.model,
            # Prompts of one call may be answered by two models, while one replaces the other.
            **({"system_fingerprint": models.pop().hex()} if len(models) == 1 else {}),
            "choices": [
                self._choice(index, head.told_row(merge(rows)), told[index]) for index, rows in enumerate(self._rows)
            ],
            "usage": usage_fields(head.told_usages(usages), told),
            # vLLM's clients read these where it has them: of a chat here, of a completion in its choices.
            **({"prompt_logprobs": self._prompt_logprobs(0)} if chat else {}),
            **({"prompt_token_ids": head.prompt(0).token_ids} if chat and head.returns_token_ids else {}),
        }

    def _choice(self, index: int, row: TextRow, told: ToldChoice | None) -> dict[str, Any]:
        head = self._head
        choice: dict[str, Any] = {"index": index}
        if head.form is Form.CHAT:
            plain = {"role": "assistant", "content": row.text, "refusal": None}
            choice["message"] = plain if told is None else told.message(row)
        else:
            choice["text"] = head.prompt(index).text + row.text
        choice["logprobs"] = head.logprobs(index, row, self._prompts.get(index) if head.echoes_logprobs else None)
        choice |= finish_fields(row) if told is None else told.finish_fields(row)
        if head.form is not Form.CHAT:
            choice["prompt_logprobs"] = self._prompt_logprobs(index)
            if head.returns_token_ids:
                choice["prompt_token_ids"] = head.prompt(index).token_ids
        if head.returns_token_ids:
            choice["token_ids"] = row.token_ids
        return choice

    def _prompt_logprobs(self, index: int) -> list[dict[str, Any] | None] | None:
        known = self._prompts.get(index) if self._head.wants_prompt_logprobs else None
        return None if known is None else known.by_token


def finish_fields(row: TextRow) -> dict[str, Any]:
    """Why a choice ended, if it did with this row."""
    fields: dict[str, Any] = {"finish_reason": FINISH_REASONS.get(row.finish)}
    return fields | {"stop_reason": row.stop_reason} if row.finish else fields


def usage_fields(usages: Sequence[Usage], told: Sequence[ToldChoice | None] = ()) -> dict[str, Any]:
    """OpenAI's usage object: sums over the requests of a call, and over its choices as they were told."""
    prompt = sum(usage.num_prompt_tokens for usage in usages)
    output = sum(usage.num_output_tokens for usage in usages)
    reasoning = [each.num_reasoning_tokens for each in told if each is not None]
    known = [count for count in reasoning if count is not None]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in usages)},
        **({"completion_tokens_details": {"reasoning_tokens": sum(known)}} if known else {}),
    }


def error_fields(error: PenstockError) -> dict[str, Any]:
    """OpenAI's error object; `code` is the lower-case name of Penstock's code."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind.openai_type,
            "param": error.param,
            "code": error.code.name.lower(),
        }
    }
