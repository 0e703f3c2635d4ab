"""A client's place in its request, and how it goes on when the stream breaks: each token once."""

from dataclasses import dataclass, replace

from contract.domain.chain import CHAIN_START
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import FinishReason
from contract.v1 import common_pb2, inference_pb2
from penstock.client.events import Accepted, Delta, Event, PromptPart
from penstock.client.wire import decode_event

PATIENCE_S = 30.0  # without anything new, then the last error counts
CANCEL_S = 2.0  # for telling the pipeline that nobody wants a request any more
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0


@dataclass(slots=True)
class _Sample:
    num_tokens: int = 0
    num_chars: int = 0
    finish: FinishReason = FinishReason.UNSPECIFIED


class Resumption:
    """One request through as many calls as it takes. It takes one unless the request is resumable."""

    def __init__(self, call: inference_pb2.GenerateCall, now_s: float) -> None:
        """Nothing has come; the call says whether it is resumable. Times are on any one clock."""
        self._call = call
        num_samples = call.request.n if call.request.HasField("n") else 1
        self._samples = [_Sample() for _ in range(num_samples)]
        self._offsets = [inference_pb2.SampleOffset(chain=CHAIN_START) for _ in range(num_samples)]
        self._news_s = now_s
        self._pause_s = _FIRST_PAUSE_S
        self._num_prompt_tokens = 1  # whose logprobs have come; the first has none
        self.request_id = ""  # once it was accepted

    @property
    def next_call(self) -> inference_pb2.GenerateCall | inference_pb2.ResumeCall:
        """The call to make now: at first, and after a pause."""
        if not self.request_id:
            return self._call
        return inference_pb2.ResumeCall(request_id=self.request_id, offsets=self._offsets)

    @property
    def has_ended(self) -> bool:
        """Return whether all samples have."""
        return all(sample.finish for sample in self._samples)

    def take(self, event: inference_pb2.GenerateEvent, now_s: float) -> Event | None:
        """The part of an event that is new; None: nothing.

        Raises:
            PenstockError: INTERNAL: something is missing before it.
        """
        decoded = decode_event(event)
        if isinstance(decoded, Accepted):
            is_first, self.request_id = not self.request_id, decoded.request_id
            return decoded if is_first else None
        if decoded is None or not self._call.resumable:
            return decoded
        if isinstance(decoded, PromptPart):
            return self._take_prompt(decoded)
        return self._take_delta(decoded, event.delta, now_s)

    def pause_s(self, error: PenstockError, now_s: float) -> float | None:
        """The seconds to wait before the next call; None: the error counts.

        A gateway may have no room for a request that another one let in, but soon; for one that nobody let in, it is
        the caller's to wait.
        """
        passes = error.code is ErrorCode.UNAVAILABLE or (error.code is ErrorCode.OVERLOADED and self.request_id)
        if not self._call.resumable or not passes or now_s - self._news_s > PATIENCE_S:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _MAX_PAUSE_S)
        return pause_s

    def _take_prompt(self, part: PromptPart) -> PromptPart | None:
        """Told from its start again where the stream broke before a sample's first token."""
        known = self._num_prompt_tokens - part.position
        if known < 0:
            raise PenstockError(ErrorCode.INTERNAL, "the stream of events left something out")
        new = PromptPart(part.position + known, part.logprobs[known:])
        self._num_prompt_tokens += len(new.logprobs)
        return new if new.logprobs else None

    def _take_delta(self, delta: Delta, told: inference_pb2.Delta, now_s: float) -> Delta | None:
        sample = self._samples[delta.sequence]
        known_tokens, known_chars = sample.num_tokens - delta.token_offset, sample.num_chars - told.text_offset
        if known_tokens < 0 or known_chars < 0:
            raise PenstockError(ErrorCode.INTERNAL, "the stream of events left something out")
        new = delta
        if known_tokens or known_chars:
            new = replace(
                delta,
                token_offset=sample.num_tokens,
                token_ids=delta.token_ids[known_tokens:],
                text=delta.text[known_chars:],
                logprobs=delta.logprobs[known_tokens:],
            )
        if sample.finish or not (new.token_ids or new.text or new.finish or new.chat):
            return None
        sample.num_tokens += len(new.token_ids)
        sample.num_chars += len(new.text)
        sample.finish = new.finish
        if told.HasField("chain_after"):
            self._offsets[delta.sequence] = inference_pb2.SampleOffset(
                tokens=sample.num_tokens,
                characters=told.characters_after if told.HasField("characters_after") else sample.num_chars,
                chain=told.chain_after,
                finish_reason=common_pb2.FinishReason.ValueType(sample.finish),
            )
        self._news_s, self._pause_s = now_s, _FIRST_PAUSE_S
        return new
