"""Changes of logits beside penalties: biases, and the tokens that a row may have."""

from dataclasses import dataclass

import torch
from torch import Tensor

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Entries:
    """Single logits that are changed: row `rows[i]`, token `token_ids[i]`. The order does not matter: a token has one
    bias at most, and may be forbidden beside that.
    """

    rows: Tensor  # i64[e]
    token_ids: Tensor  # i64[e]
    values: Tensor  # f32[e], added: biases, and -inf where a token is forbidden


@dataclass(frozen=True, slots=True)
class Allowed:
    """Rows that may have some tokens only: row `rows[i]`, token `token_ids[i]`."""

    limited: Tensor  # i64[l]: the rows, each once
    rows: Tensor  # i64[a]
    token_ids: Tensor  # i64[a]


@dataclass(frozen=True, slots=True)
class Words:
    """Token sequences of which the last is forbidden where the output of row `rows[i]` ends with the others."""

    rows: Tensor  # i64[w]
    token_ids: Tensor  # i64[w, MAX_BAD_WORD_TOKENS], `NO_TOKEN` before those of shorter ones
    past: Tensor | None = None  # i64[w, MAX_BAD_WORD_TOKENS - 1]: the end of the row's output, for whoever has no slots


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Rows that may have the tokens only whose bits are set, as a grammar says."""

    rows: Tensor  # i64[m], each once
    words: Tensor  # i32[m, at least ceil(vocab_size / 32)]: token t is bit t % 32 of word t // 32


@dataclass(frozen=True, slots=True)
class Changes:
    """All that the rows of one step ask for; None: no row does."""

    entries: Entries | None = None
    allowed: Allowed | None = None
    words: Words | None = None
    masks: TokenMasks | None = None  # those of a step are known last: a grammar must have seen the token before


def keep_allowed(logits: Tensor, allowed: Allowed) -> None:
    """Forbid all tokens but the allowed ones, in place, on any device: it is little beside the step, and waits for
    nothing.
    """
    kept = logits[allowed.rows, allowed.token_ids]
    logits.index_fill_(0, allowed.limited, -torch.inf)
    logits.index_put_((allowed.rows, allowed.token_ids), kept)
