"""Log-probabilities in the two shapes that OpenAI's API has."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.domain.rows import TokenLogprob

LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have


def _finite(logprob: float) -> float:
    return LOWEST if math.isnan(logprob) else max(logprob, LOWEST)


def _label(token_id: int, token_bytes: bytes, *, as_ids: bool) -> str:
    """A completion's name of a token. Part of a character is written out in hex, so that no two share a name."""
    if as_ids:
        return f"token_id:{token_id}"
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def completion_logprobs(
    logprobs: Sequence[TokenLogprob], text_offset: int, *, as_ids: bool
) -> tuple[dict[str, Any], int]:
    """The four columns of a completion's `logprobs`, and the text offset behind them.

    As OpenAI has it, `top_logprobs` holds the sampled token too, even where it is none of the most likely.
    """
    tokens, offsets, top = [], [], []
    for entry in logprobs:
        label = _label(entry.token_id, entry.token_bytes, as_ids=as_ids)
        tokens.append(label)
        offsets.append(text_offset)
        text_offset += len(entry.token_bytes.decode(errors="replace"))
        alternatives = {
            _label(token_id, token_bytes, as_ids=as_ids): _finite(logprob)
            for (token_id, logprob), token_bytes in zip(entry.top, _top_bytes(entry), strict=True)
        }
        alternatives.setdefault(label, _finite(entry.logprob))
        top.append(alternatives)
    columns = {
        "text_offset": offsets,
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "tokens": tokens,
        "top_logprobs": top,
    }
    return columns, text_offset


def chat_logprobs(logprobs: Iterable[TokenLogprob], *, as_ids: bool) -> dict[str, Any]:
    """A chat's `logprobs`: an object for each token, with the same for its alternatives."""
    content = []
    for entry in logprobs:
        token = _chat_token(entry.token_id, entry.token_bytes, entry.logprob, as_ids=as_ids)
        token["top_logprobs"] = [
            _chat_token(token_id, token_bytes, logprob, as_ids=as_ids)
            for (token_id, logprob), token_bytes in zip(entry.top, _top_bytes(entry), strict=True)
        ]
        content.append(token)
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, token_bytes: bytes, logprob: float, *, as_ids: bool) -> dict[str, Any]:
    label = f"token_id:{token_id}" if as_ids else token_bytes.decode(errors="replace")
    return {"token": label, "logprob": _finite(logprob), "bytes": list(token_bytes)}


def _top_bytes(entry: TokenLogprob) -> tuple[bytes, ...]:
    return entry.top_bytes or (b"",) * len(entry.top)
