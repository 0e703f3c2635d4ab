"""What clients ask for, and what each has received: checked token by token, whatever the services believe."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from samplers import EOS_IDS, STOP_STRING, Kind, Samplers, expected_text, kind_of

from contract.domain import chain
from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason
from contract.domain.params import SamplingParams
from contract.domain.pooling import Pooling
from contract.domain.request import Header, Prompt, Request
from contract.domain.rows import TextRow
from gateway_svc.core.streams import WHOLE, ClientStream, DeliveredSequence, Refusal
from gateway_svc.wire import decode_finished
from gateway_svc.wire.requests import encode_header, encode_prompt, encode_request
from tokenizer_svc.core.tokenize import TokenizedPrompt
from tokenizer_svc.wire import encode_tokenized

TENANT = "tenant"
TWO_MODELS = "a client got tokens of two models"
_PROMPT = np.array([5, 6], np.uint32)


@dataclass(frozen=True)
class Asked:
    """A request as it is sent, and as a tokenizer understands it."""

    index: int
    request: Request
    header: bytes
    body: bytes
    prompt: bytes
    meta: bytes
    token_ids: bytes

    @property
    def request_id(self) -> bytes:
        return self.request.header.request_id

    @property
    def num_samples(self) -> int:
        return self.request.params.n

    @property
    def max_tokens(self) -> int:
        return self.request.params.max_tokens or 0

    @property
    def scores_prompt(self) -> bool:
        return self.request.params.prompt_logprobs is not None

    @property
    def has_search(self) -> bool:
        return self.request.params.use_beam_search

    @property
    def num_histories(self) -> int:
        """Its samples and, after them, the search of its beams."""
        return self.num_samples + self.has_search

    def sampled_as(self, sequence: int) -> int:
        """The sequence as which the tokens of a sample were sampled: all beams are of one search."""
        return self.num_samples if self.has_search else sequence

    @property
    def pools(self) -> bool:
        return self.request.pooling is not None


def prompt_output(model_digest: bytes) -> bytes:
    """A stand-in for the logprobs of a prompt by a model, or for its vector."""
    return b"by " + model_digest


def ask(
    index: int,
    *,
    num_samples: int,
    max_tokens: int,
    has_stop: bool,
    scores_prompt: bool = False,
    pools: bool = False,
    searches: bool = False,
) -> Asked:
    """One request."""
    params = SamplingParams(
        use_beam_search=searches,
        n=num_samples,
        max_tokens=max_tokens,
        stop=(STOP_STRING,) if has_stop else (),
        prompt_logprobs=0 if scores_prompt else None,
    )
    header = Header(b"request        %d" % index, TENANT, 0, 0, 0, "", 0)
    request = Request(header, "model", Prompt(token_ids=(5, 6)), params, pooling=Pooling() if pools else None)
    meta = encode_tokenized(TokenizedPrompt(_PROMPT, tuple(EOS_IDS), params.stopping))
    body, prompt = encode_request(request), encode_prompt(request.prompt)
    return Asked(index, request, encode_header(header), body, prompt, meta, _PROMPT.astype("<u4").tobytes())


class Phase(Enum):
    """How far a client is with its request."""

    NEW = "new"  # not acknowledged: it may be sent again
    OPEN = "open"
    ENDED = "ended"
    REFUSED = "refused"  # told that the pipeline lost it, or cannot go on with it


class Got(NamedTuple):
    """What a client has of one sample."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish: int = 0
    models: frozenset[bytes] = frozenset()  # digests of the models that computed the tokens


class Client(NamedTuple):
    """One client with its one request."""

    phase: Phase
    gateway: str | None  # the process that it is connected to
    wants_cancel: bool  # it has asked for the end
    got: tuple[Got, ...]
    why: str = ""  # it was refused


def stream_of(client: Client) -> ClientStream:
    """What the client has, as its gateway keeps it."""
    stream = ClientStream(len(client.got))
    stream.sequences = [
        DeliveredSequence(
            len(got.token_ids),
            len(got.text),
            chain.extend(chain.CHAIN_START, got.token_ids),
            FinishReason(got.finish),
        )
        for got in client.got
    ]
    stream.num_open = sum(not got.finish for got in client.got)
    return stream


class Reception(NamedTuple):
    """What a row has led to."""

    client: Client
    is_behind: bool = False  # something is missing before the row
    wrong: str = ""


def receive(asked: Asked, client: Client, row: TextRow, samplers: Samplers) -> Reception:
    """The gateway's own acceptance, and then the check of what it let through."""
    if client.phase is not Phase.OPEN:
        return Reception(client)
    taken = stream_of(client).accept(row)
    if isinstance(taken, Refusal):
        return Reception(client, is_behind=taken is Refusal.BEHIND)
    before = client.got[taken.sequence]
    text, models = before.text + taken.text, before.models | _models_of(taken)
    got = Got(before.token_ids + taken.token_ids, text, int(taken.finish), models)
    if taken.error is not None and taken.error.code is ErrorCode.STREAM_DIVERGED:
        return Reception(client._replace(phase=Phase.REFUSED, why="diverged"))
    all_got = (*client.got[: taken.sequence], got, *client.got[taken.sequence + 1 :])
    client = client._replace(got=all_got, phase=Phase.ENDED if all(each.finish for each in all_got) else Phase.OPEN)
    if before.finish:
        return Reception(client, wrong="a client got more after the end")
    if taken.chain != chain.extend(chain.CHAIN_START, before.token_ids):
        return Reception(client, wrong="a client got tokens of another history")
    wrong = _answered_otherwise(asked, got) or _what_is_wrong(asked, client, taken, got, samplers)
    return Reception(client, wrong=wrong)


def _answered_otherwise(asked: Asked, got: Got) -> str:
    is_pooled = got.finish == FinishReason.POOLED and not got.token_ids
    if got.finish in WHOLE and asked.pools != is_pooled:
        return "a prompt that is to be pooled was answered, or the other way round"
    return ""


def _models_of(row: TextRow) -> frozenset[bytes]:
    return frozenset((row.model_digest,) if row.token_ids or row.finish is FinishReason.POOLED else ())


def contradicts(asked: Asked, client: Client, result: bytes) -> bool:
    """Return whether a stored result is of another history than what a client has."""
    for got, row in zip(client.got, decode_finished(asked.request_id, result), strict=True):
        if row.token_ids[: len(got.token_ids)] != got.token_ids and client.phase is Phase.OPEN:
            return True
        if is_whole(client) and (row.token_ids, row.text, int(row.finish)) != got[:3]:
            return True
    return False


def is_whole(client: Client) -> bool:
    """Return whether a client has all there is of its request; one that was cancelled may end elsewhere next time."""
    return all(got.finish in WHOLE for got in client.got)


def _what_is_wrong(asked: Asked, client: Client, row: TextRow, got: Got, samplers: Samplers) -> str:
    if len(frozenset().union(*(each.models for each in client.got))) > 1:
        return TWO_MODELS
    text, has_stop = expected_text(got.token_ids)
    has_stop &= bool(asked.request.params.stop)
    if not samplers.is_coherent(asked.index, asked.sampled_as(row.sequence), got.token_ids):
        return "a client got tokens that were not sampled one after another"
    if len(got.token_ids) > asked.max_tokens:
        return "a client got more tokens than it allowed"
    if any(kind_of(token_id) is Kind.EOS for token_id in got.token_ids[:-1]):
        return "a client got tokens after EOS"
    if got.text != text if got.finish else not text.startswith(got.text):
        return "a client got another text than its tokens have"
    return _what_is_wrong_at_the_end(asked, client, row, got, has_stop) if got.finish else ""


def _what_is_wrong_at_the_end(asked: Asked, client: Client, row: TextRow, got: Got, has_stop: bool) -> str:
    num_tokens = sum(len(each.token_ids) for each in client.got)
    if client.phase is Phase.ENDED and row.usage is not None and row.usage.num_output_tokens != num_tokens:
        return f"a client was told of {row.usage.num_output_tokens} tokens and got {num_tokens}"
    is_eos = bool(got.token_ids) and kind_of(got.token_ids[-1]) is Kind.EOS
    match FinishReason(got.finish):
        case FinishReason.STOP:
            return "" if is_eos or has_stop else "a client was told of a stop that did not come"
        case FinishReason.LENGTH if len(got.token_ids) < asked.max_tokens or is_eos or has_stop:
            return "a client was told that its tokens are used up, and they are not"
        case FinishReason.CANCELLED if not client.wants_cancel:
            return "a client was told that it cancelled, and it did not"
        case FinishReason.ERROR if row.error is None or row.error.code is not ErrorCode.MODEL_REPLACED:
            return "a client got an error that nobody can explain"
        case _:
            return "a client got tokens after its stop string" if has_stop else ""
