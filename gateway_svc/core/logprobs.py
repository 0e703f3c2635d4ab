"""Log-probabilities in the two shapes that OpenAI's API has."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from contract.domain.rows import TokenLogprob

LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have


def finite(logprob: float) -> float:
    """The logprob as JSON can have it."""
    return LOWEST if math.isnan(logprob) else max(logprob, LOWEST)


def _label(token_id: int, token_bytes: bytes, *, as_ids: bool) -> str:
    """A completion's name of a token. Part of a character is written out in hex, so that no two share a name."""
    if as_ids:
        return _id_label(token_id)
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _id_label(token_id: int) -> str:
    return f"token_id:{token_id}"


def completion_logprobs(logprobs: Sequence[TokenLogprob], *, as_ids: bool) -> dict[str, Any]:
    """The four columns of a completion's `logprobs`."""
    return {
        "text_offset": [entry.text_offset for entry in logprobs],
        "token_logprobs": [finite(entry.logprob) for entry in logprobs],
        "tokens": [_label(entry.token_id, entry.token_bytes, as_ids=as_ids) for entry in logprobs],
        "top_logprobs": [_alternatives(entry, as_ids=as_ids) for entry in logprobs],
    }


def _alternatives(entry: TokenLogprob, *, as_ids: bool) -> dict[str, float]:
    """The sampled token, as OpenAI has it even where it is none of the most likely, and then those.

    Several tokens may have one text. The first of them, the sampled one before all, is named by it; the others by
    their ids, so that none is lost.
    """
    found = {_label(entry.token_id, entry.token_bytes, as_ids=as_ids): finite(entry.logprob)}
    for (token_id, logprob), token_bytes in zip(entry.top, _top_bytes(entry), strict=True):
        if token_id != entry.token_id:
            label = _label(token_id, token_bytes, as_ids=as_ids)
            found[_id_label(token_id) if label in found else label] = finite(logprob)
    return found


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
    label = _id_label(token_id) if as_ids else token_bytes.decode(errors="replace")
    return {"token": label, "logprob": finite(logprob), "bytes": list(token_bytes)}


def _top_bytes(entry: TokenLogprob) -> tuple[bytes, ...]:
    return entry.top_bytes or (b"",) * len(entry.top)
