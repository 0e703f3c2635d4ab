"""A prompt that is to be tokenized, and the outcome that is written of it."""

import time
from dataclasses import dataclass
from typing import Any

import structlog

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.request import Header, format_request_id
from servicekit.bus import keys as k
from servicekit.bus.calls import Call, Entry, Reject, StoredRequest, Tokenized
from servicekit.bus.replies import number
from tokenizer_svc import wire
from tokenizer_svc.core.tokenize import PromptTokenizer

_logger = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt that is to be tokenized."""

    entry_id: bytes  # of its hint
    request_id: bytes
    header: bytes
    body: bytes
    prompt: bytes
    sent_ns: int
    received_ns: int

    @classmethod
    def of_hint(cls, hint: Entry, received_ns: int) -> "Job | None":
        """The job that a hint asks for, by the copy of the request that it brings; None: it brings none."""
        fields = hint.fields
        if not fields.keys() >= {k.HEADER, k.BODY, k.PROMPT}:
            return None
        request = fields[k.REQUEST], fields[k.HEADER], fields[k.BODY], fields[k.PROMPT]
        return cls(hint.entry_id, *request, sent_ns(hint), received_ns)

    @classmethod
    def of_request(cls, hint: Entry, stored: StoredRequest, received_ns: int) -> "Job":
        """The job that a hint asks for, by its request."""
        request = stored.request_id, stored.header, stored.body, stored.prompt
        return cls(hint.entry_id, *request, sent_ns(hint), received_ns)


def sent_ns(hint: Entry) -> int:
    """The time at which a hint was sent, Unix nanoseconds. It only measures: one that cannot be read counts as now."""
    return number(hint.fields.get(k.SENT_NS, b"")) or time.time_ns()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job."""

    call: Call[Any]
    num_tokens: int  # 0: rejected
    work_s: float


class Outcomes:
    """Makes them, in any thread; whatever happens becomes one."""

    def __init__(self, prompts: PromptTokenizer, num_shards: int) -> None:
        self._prompts = prompts
        self._num_shards = num_shards

    def of(self, sid: bytes, job: Job, header: Header, message: wire.GenerateRequest) -> Outcome:
        """The outcome of a job that was read, for the session `sid`."""
        began_s = time.perf_counter()
        num_tokens = 0
        try:
            now_ns = time.time_ns()
            if 0 < header.deadline_ns <= now_ns:
                raise PenstockError(  # noqa: TRY301
                    ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed before it was tokenized"
                )
            prompt = self._prompts.tokenize(wire.decode_request(header, message))
            now_ns, num_tokens = time.time_ns(), len(prompt.token_ids)
            meta = wire.encode_tokenized(prompt, tokenizing_ns=job.received_ns, tokenized_ns=now_ns)
            call: Call[Any] = Tokenized(
                job.request_id, job.entry_id, meta, now_ns, num_tokens, wire.pack(prompt.token_ids)
            )
        except PenstockError as error:
            call = self._reject(sid, job, wire.num_samples(message), error)
        except BaseException as error:
            # A panic inside the tokenizer library is no Exception, and must not take this process along.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            _logger.exception("tokenizing failed", request_id=format_request_id(job.request_id))
            internal = PenstockError(
                ErrorCode.INTERNAL, f"the prompt could not be tokenized ({type(error).__name__}); see the service's log"
            )
            call = self._reject(sid, job, wire.num_samples(message), internal)
        return Outcome(call, num_tokens, time.perf_counter() - began_s)

    def unreadable(self, sid: bytes, job: Job, why: str) -> Outcome:
        """The outcome of a job that cannot be read."""
        return Outcome(self._reject(sid, job, 1, wire.unreadable(why)), 0, 0.0)

    def _reject(self, sid: bytes, job: Job, n: int, error: PenstockError) -> Reject:
        request_id = job.request_id
        _logger.debug("rejected", request_id=format_request_id(request_id), reason=error.message)
        shard = int.from_bytes(request_id[-4:], "big") % self._num_shards
        row = wire.encode_rejection(request_id, n, error, sid, time.time_ns())
        return Reject(request_id, job.entry_id, shard, row)
