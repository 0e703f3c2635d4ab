"""Chunks of a streamed reply as server-sent events: byte templates made once a call, filled once a row."""

from collections.abc import Iterable, Sequence
from typing import Any

from contract.domain.errors import PenstockError
from contract.domain.finish import Usage
from contract.domain.rows import TextRow
from gateway_svc.core.ask import Form
from gateway_svc.core.event_ids import MAX_CHOICES_WITH_IDS, EventIds
from gateway_svc.core.prompt_logprobs import SpelledPrompt
from gateway_svc.core.prompt_outputs import PromptOutput
from gateway_svc.core.replies import ReplyHead, encode, error_fields, finish_fields, usage_fields
from gateway_svc.core.streams import DeliveredSequence
from gateway_svc.core.told import ToldChoice

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients pass over it
_ROLE = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'


class SseFormat:
    """Writes the chunks of one call."""

    __slots__ = (
        *("_before_text", "_chat", "_fingerprints", "_has_opened", "_head", "_ids", "_num_prompt_tokens", "_opens"),
        *("_prefix", "_prompts", "_told", "_without_end"),
    )

    def __init__(
        self, head: ReplyHead, request_id: bytes, have: Sequence[DeliveredSequence], *, with_ids: bool = False
    ) -> None:
        """Begins, or goes on, after what the client has of each choice.

        Args:
            head: what its chunks begin with.
            request_id: the call's first.
            have: what the client has, by choice.
            with_ids: events have ids. Nobody gets them unasked: many clients take `data: ` off an event and know
                nothing else.
        """
        self._head = head
        self._chat = head.form is Form.CHAT
        has_ids = with_ids and head.num_choices <= MAX_CHOICES_WITH_IDS
        self._ids = EventIds(request_id, have) if has_ids else None
        kind = b"chat.completion.chunk" if self._chat else b"text_completion"
        self._prefix = b'data: {"id":%s,"object":"%s","created":%d,"model":%s,' % (
            encode(head.call_id),
            kind,
            head.created_s,
            encode(head.model),
        )
        self._opens = b',"delta":{"content":' if self._chat else b',"text":'
        self._fingerprints = [b""] * head.num_choices  # by choice: what its chunks tell of its model
        self._before_text = [self._choice_prefix(index) + self._opens for index in range(head.num_choices)]
        closes = b"}" if self._chat else b""
        self._without_end = closes + b',"logprobs":null,"finish_reason":null}]'
        if not head.continuous_usage:
            self._without_end += self._suffix()
        self._told = [head.told(index, each.num_chars) for index, each in enumerate(have)]
        self._num_prompt_tokens = [0] * head.num_choices
        self._prompts: dict[int, SpelledPrompt] = {}  # by choice, of those that have not begun: their logprobs
        # A chat begins each choice with its role. Each choice is heard of with its first token, though it has no text.
        self._has_opened = [bool(each.num_tokens or each.finish) for each in have]

    def learn(self, choices: Iterable[int], num_prompt_tokens: int) -> None:
        """Choices of one request have so many prompt tokens."""
        for choice in choices:
            self._num_prompt_tokens[choice] = num_prompt_tokens

    def learn_prompt(self, choices: Iterable[int], output: PromptOutput) -> None:
        """The prompt of these choices has these logprobs: told with the first chunk of each."""
        if isinstance(output, SpelledPrompt):
            self._prompts |= {choice: output for choice in choices if not self._has_opened[choice]}

    def learn_model(self, choices: Iterable[int], model_digest: bytes) -> None:
        """Choices of one request are answered by the model with this digest."""
        for choice in choices:
            self._fingerprints[choice] = _fingerprint(model_digest)
            self._before_text[choice] = self._choice_prefix(choice) + self._opens

    def recall(self, choice: int, row: TextRow) -> None:
        """The client has this row already, with all before it: what comes after goes on from there."""
        if (told := self._told[choice]) is not None:
            told.recall(row)

    def chunk(self, choice: int, row: TextRow, chain: int) -> bytes:
        """The event of a row, after the choice's opening if it is its first; empty if there is nothing to tell yet.

        Args:
            choice: prompt * n + sample.
            row: extends the choice's row before.
            chain: hash over the sample's tokens, those of the row included.
        """
        if (told := self._told[choice]) is not None:
            return self._told_chunk(told, choice, row, chain)
        head = self._head
        is_more = head.returns_token_ids or head.without_output or self._prompts
        if not row.finish and not row.logprobs and not is_more:
            if not row.text and (self._chat or self._has_opened[choice]):
                return self._opening(choice)
            event = self._before_text[choice] + encode(self._text(choice, row)) + self._without_end
            if head.continuous_usage:
                event += self._suffix(choice, row)
        else:
            event = self._full(choice, row)
        num_chars = row.text_offset + len(row.text)
        return self._opening(choice) + self._with_id(choice, row, num_chars, chain, event)

    def _told_chunk(self, told: ToldChoice, choice: int, row: TextRow, chain: int) -> bytes:
        """The event of a row whose text is not told as it is."""
        delta = told.delta(row)
        is_more = row.finish or row.logprobs or self._head.returns_token_ids
        if not delta and not is_more:
            return self._opening(choice)
        if is_more or delta.keys() != {"content"}:
            event = self._choice_prefix(choice) + b',"delta":' + encode(delta) + self._rest(choice, row, told)
        else:
            event = self._before_text[choice] + encode(delta["content"]) + self._without_end
            if self._head.continuous_usage:
                event += self._suffix(choice, row)
        num_chars = row.text_offset + len(row.text) if row.finish else told.place
        return self._opening(choice) + self._with_id(choice, row, num_chars, chain, event)

    def _with_id(self, choice: int, row: TextRow, num_chars: int, chain: int, event: bytes) -> bytes:
        if self._ids is None:
            return event
        return self._ids.after(choice, row.token_offset + len(row.token_ids), num_chars, chain, row.finish) + event

    def end(self, usages: Sequence[Usage]) -> bytes:
        """The bytes after the last chunk: the usage if it was asked for, and the end mark."""
        if not self._head.include_usage:
            return DONE
        usages = self._head.told_usages(usages)
        distinct = set(self._fingerprints)
        fingerprint = distinct.pop() if len(distinct) == 1 else b""
        return (
            self._prefix
            + fingerprint
            + b'"choices":[],"usage":'
            + encode(usage_fields(usages, self._told))
            + b"}\n\n"
            + DONE
        )

    def fail(self, error: PenstockError) -> bytes:
        """The end of a stream that fails after its first chunk."""
        return b"data: " + encode(error_fields(error)) + b"\n\n" + DONE

    def _opening(self, choice: int) -> bytes:
        if self._has_opened[choice]:
            return b""
        self._has_opened[choice] = True
        if not self._chat:
            return b""
        of_prompt = b""
        if self._head.returns_token_ids:
            of_prompt = b',"prompt_token_ids":' + encode(self._head.prompt(choice).token_ids)
        if (prompt := self._prompts.pop(choice, None)) is not None:
            of_prompt += b',"prompt_logprobs":' + encode(prompt.by_token)
        return self._choice_prefix(choice) + _ROLE + of_prompt + self._suffix(choice)

    def _text(self, choice: int, row: TextRow) -> str:
        """The text of a row; the first of a choice begins with that of its prompt, if that is told."""
        return row.text if self._chat or self._has_opened[choice] else self._head.prompt(choice).text + row.text

    def _choice_prefix(self, index: int) -> bytes:
        return self._prefix + self._fingerprints[index] + b'"choices":[{"index":%d' % index

    def _suffix(self, choice: int = 0, row: TextRow | None = None) -> bytes:
        """The end of a chunk; a choice whose usage is told so far has the tokens up to this row."""
        if not self._head.continuous_usage:
            return b',"usage":null}\n\n' if self._head.include_usage else b"}\n\n"
        num_prompt, num_output = self._num_prompt_tokens[choice], 0
        if row is not None:
            num_output = 0 if self._head.without_output else row.token_offset + len(row.token_ids)
        counts = (num_prompt, num_output, num_prompt + num_output)
        return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % counts

    def _full(self, choice: int, row: TextRow) -> bytes:
        row = self._head.told_row(row)
        rest = self._rest(choice, row, None)
        if not self._chat:
            return self._before_text[choice] + encode(self._text(choice, row)) + rest
        delta = {"content": row.text} if row.text or row.logprobs else {}
        return self._choice_prefix(choice) + b',"delta":' + encode(delta) + rest

    def _rest(self, choice: int, row: TextRow, told: ToldChoice | None) -> bytes:
        """The event of a row after what it adds to the text."""
        end = finish_fields(row) if told is None else told.finish_fields(row)
        prompt = None if self._chat else self._prompts.pop(choice, None)
        of_prompt = prompt if self._head.echoes_logprobs else None
        fields: dict[str, Any] = {"logprobs": self._head.logprobs(choice, row, of_prompt), **end}
        if prompt is not None and self._head.wants_prompt_logprobs:
            fields["prompt_logprobs"] = prompt.by_token
        if self._head.returns_token_ids:
            fields["token_ids"] = row.token_ids
            if not self._chat and not self._has_opened[choice]:
                fields["prompt_token_ids"] = self._head.prompt(choice).token_ids
        # Without the braces: they are those of the choice.
        return b"," + encode(fields)[1:-1] + b"}]" + self._suffix(choice, row)


def _fingerprint(model_digest: bytes) -> bytes:
    return b'"system_fingerprint":"%s",' % model_digest.hex().encode()
