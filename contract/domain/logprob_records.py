"""Logprobs of a run of tokens as one string that grows token by token, which its keeper need not read.

A token's record is words of four bytes, little-endian: u32 how many alternatives, f32 its logprob, u32 its rank, and of
each alternative u32 its id and f32 its logprob, the most likely first.
"""

import struct
from collections.abc import Iterable

import numpy as np

from contract.domain.plan import Logprobs
from contract.domain.rows import TokenLogprob

_WORDS = 3  # of a record without alternatives


def pack_records(entries: Iterable[TokenLogprob]) -> bytes:
    """The records of some tokens."""
    records = []
    for entry in entries:
        tops = [value for each in entry.top for value in each]
        record = struct.pack(f"<IfI{'If' * len(entry.top)}", len(entry.top), entry.logprob, entry.rank, *tops)
        records.append(record)
    return b"".join(records)


def first_records(packed: bytes, num_tokens: int) -> bytes:
    """The records of the first tokens.

    Raises:
        ValueError: there are fewer, or they are damaged.
    """
    starts = _starts(np.frombuffer(packed, "<u4"), num_tokens)
    if len(starts) <= num_tokens:
        raise ValueError(f"records of {len(starts) - 1} tokens where {num_tokens} are asked for")
    return packed[: 4 * starts[num_tokens]]


def unpack_records(packed: bytes) -> Logprobs:
    """The logprobs of all tokens.

    Raises:
        ValueError: the records are damaged.
    """
    words, floats = np.frombuffer(packed, "<u4"), np.frombuffer(packed, "<f4")
    starts = np.array(_starts(words), np.int64)
    heads, counts = starts[:-1], words[starts[:-1]]
    is_top = np.ones(len(words), np.bool_)
    for word in range(_WORDS):
        is_top[heads + word] = False
    (tops,) = is_top.nonzero()
    return Logprobs(
        sampled=floats[heads + 1].astype(np.float32, copy=False),
        ranks=words[heads + 2].astype(np.uint32, copy=False),
        top_counts=counts.astype(np.uint32, copy=False),
        top_ids=words[tops[::2]].astype(np.uint32, copy=False),
        top_logprobs=floats[tops[1::2]].astype(np.float32, copy=False),
    )


def _starts(words: np.ndarray, num_tokens: int | None = None) -> list[int]:
    """The offsets at which the records of all tokens, or of the first few, begin, and the end of the last."""
    starts = [0]
    while starts[-1] < len(words) and (num_tokens is None or len(starts) <= num_tokens):
        starts.append(starts[-1] + _WORDS + 2 * int(words[starts[-1]]))
    if starts[-1] > len(words):
        raise ValueError("a record of logprobs is cut off")
    return starts
