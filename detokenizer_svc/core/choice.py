"""Which decoder a tokenizer needs: looked up in its definition, then proved on random tokens."""

import json
import random
from typing import Any

from tokenizers import Tokenizer

from detokenizer_svc.core.decoder import ByteLevelDecoder, TextDecoder, Tokens, TokenwiseDecoder, WindowDecoder

_NUM_PROBES = 32
_PROBE_TOKENS = 24


def choose_decoder(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> TextDecoder:
    """The fastest decoder whose text equals a full decode on random tokens of this tokenizer."""
    tokens = Tokens(tokenizer, skip_special_tokens=skip_special_tokens)
    steps = _steps(tokenizer)
    kinds = [step["type"] for step in steps]
    candidate: TextDecoder | None = None
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        candidate = ByteLevelDecoder(tokens)
    elif _is_tokenwise(steps) and (anchor := _find_anchor(tokens)) is not None:
        candidate = TokenwiseDecoder(tokens, anchor, byte_fallback="ByteFallback" in kinds)
    return candidate if candidate is not None and _equals_full_decode(candidate, tokens) else WindowDecoder(tokens)


def decode_all(decoder: TextDecoder, token_ids: list[int]) -> str:
    """The text of a whole sequence, token by token."""
    state = decoder.start()
    parts: list[str] = []
    for token_id in token_ids:
        text, state = decoder.step(state, token_id)
        parts.append(text)
    return "".join(parts) + decoder.flush(state)


def _steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokenizer's chain of decoders as its definition has them, in order."""
    if tokenizer.decoder is None:
        return []
    definition = json.loads(tokenizer.decoder.__getstate__())
    return list(definition["decoders"]) if definition["type"] == "Sequence" else [definition]


def _is_tokenwise(steps: list[dict[str, Any]]) -> bool:
    """Whether only the first token and byte tokens depend on their neighbours."""
    fused = False
    for step in steps:
        match step["type"]:
            case "Fuse":
                fused = True
            case "Strip":
                # In front of the whole text, one character at most: more could reach into the second token.
                if not fused or step["start"] > 1 or step["stop"] > 0:
                    return False
            case "Metaspace" | "WordPiece" | "Replace" | "ByteFallback":
                if fused:
                    return False
            case _:
                return False
    return bool(steps)


def _find_anchor(tokens: Tokens) -> int | None:
    for token_id in range(tokens.size):
        name = tokens.name(token_id)
        if name is not None and name.isascii() and name.isalpha() and tokens.decode([token_id]) == name:
            return token_id
    return None


def _equals_full_decode(decoder: TextDecoder, tokens: Tokens) -> bool:
    draw = random.Random(0)
    for _ in range(_NUM_PROBES):
        probe = [draw.randrange(tokens.size + 1) for _ in range(_PROBE_TOKENS)]
        if decode_all(decoder, probe) != tokens.decode(probe):
            return False
    return True
