"""The logprobs or vectors of prompts on their way to clients: read beside the log when a prompt's first row comes, and
told before it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import Usage
from contract.domain.rows import TextRow
from gateway_svc import wire
from gateway_svc.call import Sink
from gateway_svc.core.prompt_logprobs import SpelledPrompt
from gateway_svc.core.prompt_outputs import PromptOutput
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.streams import DeliveredSequence, error_of
from gateway_svc.core.vocabulary import TokenIds
from gateway_svc.delivery import Delivery
from gateway_svc.large import off_loop
from gateway_svc.outbox import RETRY_S
from gateway_svc.vocabulary import Vocabulary
from servicekit.bus.calls import KeepPromptOutput
from servicekit.reminder import Reminder

PromptReader = Callable[[int, bytes], Awaitable[PromptOutput | None]]  # of a prompt of the call, by a model

_logger = structlog.stdlib.get_logger(__name__)
_reminder = Reminder()  # of all calls

_VECTOR_COST = 16  # bytes of anything else that take as long to be read as one of a vector: it becomes numbers


def prompt_reader(delivery: Delivery, vocabulary: Vocabulary, form: ReplyForm) -> PromptReader:
    """Reads what was computed of a call's prompts; None: it is not there (any more).

    While a request is served, it is what its gateway knows of it: a server that lost it is told it again.
    """

    async def read(prompt: int, model_digest: bytes) -> PromptOutput | None:
        request_id = form.request_ids[prompt]
        served = delivery.find(request_id)
        payload = await delivery.outbox.read_prompt_output(request_id, model_digest)
        if payload is None:
            return None
        if served is not None:
            served.prompt_output = KeepPromptOutput(request_id, model_digest, payload)
        if form.form.is_pooled:
            return await off_loop(len(payload) * _VECTOR_COST, wire.decode_prompt_vector, payload)
        found = await off_loop(len(payload), wire.decode_prompt_logprobs, payload)
        ids = form.prompts[prompt].token_ids if form.prompts else ()
        first = ids[0] if ids else None
        token_ids = await off_loop(len(payload), SpelledPrompt.tokens, found, first)
        spelled = dict(zip(token_ids.tolist(), await _spell(vocabulary, token_ids), strict=True))
        return SpelledPrompt(first, found, spelled)

    return read


async def _spell(vocabulary: Vocabulary, token_ids: TokenIds) -> list[bytes]:
    """The bytes of each token. While no tokenizer answers, one is waited for, as workers are: the call has begun."""
    while True:
        try:
            return await vocabulary.spell(token_ids)
        except PenstockError as error:
            if error.code is not ErrorCode.UNAVAILABLE:
                raise
            if _reminder.is_due():
                _logger.warning("logprobs of prompts wait for a tokenizer", why=error.message)
            await asyncio.sleep(RETRY_S)


def with_prompt_outputs(
    sink: Sink, form: ReplyForm, read: PromptReader, have: Sequence[DeliveredSequence] | None = None
) -> Sink:
    """The sink of a call, told what was computed of its prompts before their rows, if its client asked for it.

    Args:
        sink: of the call.
        form: how it is answered.
        read: gets them.
        have: what the client has of each choice: it has that of a prompt all of whose choices have begun.
    """
    if not form.needs_prompt_outputs:
        return sink
    begun = [bool(each.num_tokens or each.finish) for each in have] if have else [False] * form.num_choices
    known = [all(begun[prompt * form.n : (prompt + 1) * form.n]) for prompt in range(len(form.request_ids))]
    return PromptOutputsSink(sink, form.n, read, known)


async def read_prompts(read: PromptReader, form: ReplyForm, rows: Sequence[Sequence[TextRow]]) -> list[PromptOutput]:
    """The outputs of the prompts of a call whose requests have ended, as far as these have; none: nobody asked.

    Args:
        read: gets them.
        form: how the call is answered.
        rows: of each request that has ended, the whole of each sample.

    Raises:
        PenstockError: UNAVAILABLE: one is lost.
    """
    if not form.needs_prompt_outputs or len(rows) < len(form.request_ids):
        return []
    if any(error_of(row) for request in rows for row in request):
        return []
    models = [next((row.model_digest for row in request if row.model_digest), b"") for request in rows]
    found = await asyncio.gather(*(read(prompt, model) for prompt, model in enumerate(models)))
    told = [each for each in found if each is not None]
    if len(told) < len(found):
        raise lost_prompt_output()
    return told


class PromptOutputsSink:
    """Holds the rows of a prompt until its logprobs or its vector are told. Lives in the gateway's event loop.

    They may be missing because the server lost them with its last writes: then whoever computes the request goes on
    with its prompt, and they are read again until it has ended.
    """

    def __init__(self, inner: Sink, n: int, read: PromptReader, known: Sequence[bool]) -> None:
        self._inner = inner
        self._n = n
        self._read = read
        self._known = list(known)  # by prompt: whether the rows go on at once
        self._models: dict[int, bytes] = {}
        self._held: dict[int, list[tuple[TextRow, int]]] = {}  # by prompt, each with its hash
        self._readings: set[asyncio.Task[None]] = set()
        self._usages: Sequence[Usage] | None = None  # once all has come
        self._is_over = False

    @property
    def has_room(self) -> bool:
        """Implement `call.Sink`."""
        return self._inner.has_room

    def learn(self, prompt: int, num_prompt_tokens: int) -> None:
        """Implement `call.Sink`."""
        self._inner.learn(prompt, num_prompt_tokens)

    def learn_model(self, prompt: int, model_digest: bytes) -> None:
        """Implement `call.Sink`."""
        self._models[prompt] = model_digest
        self._inner.learn_model(prompt, model_digest)

    def learn_prompt(self, prompt: int, output: PromptOutput) -> None:
        """Implement `call.Sink`."""
        self._inner.learn_prompt(prompt, output)

    def recall(self, prompt: int, row: TextRow) -> None:
        """Implement `call.Sink`."""
        self._inner.recall(prompt, row)

    def take(self, prompt: int, row: TextRow, chain: int) -> None:
        """Implement `call.Sink`."""
        if self._is_over:
            return
        if self._known[prompt]:
            self._inner.take(prompt, row, chain)
            return
        if prompt not in self._held:
            self._held[prompt] = []
            reading = asyncio.get_running_loop().create_task(self._learn(prompt))
            self._readings.add(reading)
            reading.add_done_callback(self._readings.discard)
        self._held[prompt].append((row, chain))

    def end(self, usages: Sequence[Usage]) -> None:
        """Implement `call.Sink`."""
        self._usages = usages
        self._end_if_told()

    def fail(self, error: PenstockError) -> None:
        """Implement `call.Sink`: what is held was told of nobody."""
        if not self._is_over:
            self.close()
            self._inner.fail(error)

    def close(self) -> None:
        """Nobody listens any more."""
        self._is_over = True
        for reading in self._readings:
            reading.cancel()

    async def _learn(self, prompt: int) -> None:
        try:
            output = await self._found(prompt)
        except PenstockError as error:
            self.fail(error)
            return
        self._known[prompt] = True
        self._inner.learn_prompt(prompt, output)
        for row, chain in self._held.pop(prompt):
            self._inner.take(prompt, row, chain)
        self._end_if_told()

    async def _found(self, prompt: int) -> PromptOutput:
        while True:
            has_ended = sum(bool(row.finish) for row, _ in self._held[prompt]) == self._n
            found = await self._read(prompt, self._models.get(prompt, b""))
            if found is not None:
                return found
            if has_ended:
                raise lost_prompt_output()
            await asyncio.sleep(RETRY_S)

    def _end_if_told(self) -> None:
        if self._usages is not None and not self._held and not self._is_over:
            self._is_over = True
            self._inner.end(self._usages)


def lost_prompt_output() -> PenstockError:
    """The error of a request that has ended while the logprobs of its prompt, or its vector, are not there."""
    return PenstockError(
        ErrorCode.UNAVAILABLE,
        "the server lost what was computed of the prompt, and the request has ended; send the request again",
    )
