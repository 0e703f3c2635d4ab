"""Logprobs and vectors of prompts: from workers, and for clients."""

import numpy as np
from google.protobuf.message import DecodeError

from contract.domain.errors import ErrorCode, PenstockError, PoisonMessageError
from contract.domain.plan import Logprobs, PromptLogprobs
from contract.v1 import common_pb2, inference_pb2
from contract.wire import tokens as shared
from contract.wire.pooling import decode_vector
from gateway_svc.core.prompt_logprobs import SpelledPrompt
from gateway_svc.core.prompt_outputs import PromptOutput, PromptVector

_EVENT_TOKENS = 2048  # with 20 alternatives each: below the 4 MiB that gRPC clients take by default


def decode_prompt_logprobs(payload: bytes) -> PromptLogprobs:
    """A penstock.v1.PromptLogprobs as a worker kept it.

    Raises:
        PenstockError: INTERNAL: it cannot be read.
    """
    try:
        return shared.decode_prompt_logprobs(common_pb2.PromptLogprobs.FromString(payload))
    except (DecodeError, ValueError) as error:
        raise PenstockError(ErrorCode.INTERNAL, f"the logprobs of the prompt cannot be read: {error}") from error


def decode_prompt_vector(payload: bytes) -> PromptVector:
    """A penstock.v1.PromptVector as a worker kept it; its numbers are written already.

    Raises:
        PenstockError: INTERNAL: it cannot be read.
    """
    try:
        vector = PromptVector(decode_vector(payload))
    except PoisonMessageError as error:
        raise PenstockError(ErrorCode.INTERNAL, f"the vector of the prompt cannot be read: {error}") from error
    vector.numbers  # noqa: B018  (written here, not in the event loop)
    return vector


def prompt_events(index: int, told: PromptOutput) -> list[inference_pb2.GenerateEvent]:
    """The logprobs of the prompt with this index, as events; a vector has none."""
    if not isinstance(told, SpelledPrompt):
        return []
    num_tokens = len(told.prompt.token_ids)
    return [_event(index, told, start) for start in range(0, num_tokens, _EVENT_TOKENS)]


def _event(index: int, told: SpelledPrompt, start: int) -> inference_pb2.GenerateEvent:
    part = _part(told.prompt, start, start + _EVENT_TOKENS)
    token_ids = SpelledPrompt.tokens(part, None)
    spelled = [told.spelled[each] for each in token_ids.tolist()]
    message = shared.encode_prompt_logprobs(part)
    message.spelled_ids = token_ids.astype("<u4", copy=False).tobytes()
    message.byte_counts = np.fromiter(map(len, spelled), "<u4").tobytes()
    message.token_bytes = b"".join(spelled)
    event = inference_pb2.PromptLogprobsEvent(prompt=index, position=1 + start, part=message)
    return inference_pb2.GenerateEvent(prompt_logprobs=event)


def _part(prompt: PromptLogprobs, start: int, end: int) -> PromptLogprobs:
    logprobs, place = prompt.logprobs, slice(start, end)
    counts = logprobs.top_counts[place]
    before = int(logprobs.top_counts[:start].sum())
    top = slice(before, before + int(counts.sum()))
    part = Logprobs(
        logprobs.sampled[place], logprobs.ranks[place], counts, logprobs.top_ids[top], logprobs.top_logprobs[top]
    )
    return PromptLogprobs(prompt.token_ids[place], part)
