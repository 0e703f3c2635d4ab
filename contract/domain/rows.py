"""Rows after the scheduler: of tokens (the log of what was generated) and of text (what clients get)."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from contract.domain.chain import CHAIN_START
from contract.domain.finish import FinishReason, RequestError, Usage
from contract.domain.plan import U32, Logprobs
from contract.domain.timeline import Start, Timeline

U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]

REQUEST_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of the log, as columns; row i holds the next `counts[i]` tokens of one sequence.

    A reader accepts a row only if `positions` and `chains` extend what it has of that sequence, so a row may come
    twice and a row of an alternative history cannot be spliced in.
    """

    request_ids: list[bytes]  # 16 bytes each
    sequences: U32  # u32[rows]: index of the sample, below n; n stands for the search of beams, whose tokens are words
    positions: U32  # u32[rows]: output tokens of the sequence before this row
    chains: U64  # u64[rows]: `chain.extend` over all of them
    counts: U32  # u32[rows]: tokens in this row; 0 for a row that only ends a sequence
    token_ids: U32  # u32[sum(counts)]
    finishes: U8  # u8[rows]: FinishReason; 0 where the sequence goes on
    cached_tokens: U32  # u32[rows]: prompt tokens found in the prefix cache (told in a sequence's first row)
    logprobs: Logprobs | None = None
    errors: dict[int, RequestError] = field(default_factory=dict)  # by row, where the finish is ERROR
    model_digest: bytes = b""  # 8 bytes: of the model that computed the tokens; empty: there are none
    starts: dict[int, Start] = field(default_factory=dict)  # by row that is a sequence's first since it got a slot
    timeline: Timeline | None = None  # in a checkpoint: what the log has told so far

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One output token's logprob and its alternatives (most likely first), natural logs of the raw logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    token_bytes: bytes = b""  # what the token stands for; may be a part of a character; filled by the detokenizer
    top_bytes: tuple[bytes, ...] = ()  # beside `top`
    text_offset: int = 0  # characters of the text that are complete before it; filled by the detokenizer
    rank: int = 0  # in the whole vocabulary by the raw logits, 1 for the most likely; 0: not known


@dataclass(slots=True)
class TextRow:
    """The part of one step that one sequence's client sees. It extends `token_offset` and `text_offset`.

    Not to be changed, though not frozen: there is one for each token, and to make a frozen one takes thrice as long.
    """

    request_id: bytes  # 16 bytes
    sequence: int
    token_offset: int  # output tokens of the sequence before this row
    text_offset: int  # characters of the sequence's text before this row
    chain: int  # hash of the output tokens before this row
    token_ids: tuple[int, ...]
    text: str  # may be empty while characters are incomplete or a stop string may be beginning
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason = FinishReason.UNSPECIFIED
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it; None for EOS
    error: RequestError | None = None
    usage: Usage | None = None  # with the last row of the request's last sequence: totals of the request
    num_prompt_tokens: int = 0  # of the request; told with a row that begins its sequence
    model_digest: bytes = b""  # 8 bytes: of the model that computed the tokens; empty: not known


def unstarted_rows(request_id: bytes, num_sequences: int, error: RequestError | None) -> TokenRows:
    """Rows that end all sequences of a request before their first token; without an error they are cancelled."""
    return TokenRows(
        request_ids=[request_id] * num_sequences,
        sequences=np.arange(num_sequences, dtype=np.uint32),
        positions=np.zeros(num_sequences, np.uint32),
        chains=np.full(num_sequences, CHAIN_START, np.uint64),
        counts=np.zeros(num_sequences, np.uint32),
        token_ids=np.empty(0, np.uint32),
        finishes=np.full(num_sequences, FinishReason.ERROR if error else FinishReason.CANCELLED, np.uint8),
        cached_tokens=np.zeros(num_sequences, np.uint32),
        errors=dict.fromkeys(range(num_sequences), error) if error else {},
    )
