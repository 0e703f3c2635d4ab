"""The decoder that a tokenizer needs: looked up in its definition, then proved on random tokens."""

import json
import random
from typing import Any

from tokenizers import Tokenizer

from contract.texts.decoder import (
    ByteLevelDecoder,
    TextDecoder,
    TokenTexts,
    TokenwiseDecoder,
    WindowDecoder,
    WithoutText,
    byte_of,
)

_NUM_PROBES = 32
_PROBE_TOKENS = 24
_SHARE_OF_RUNS = 0.2
_BYTE_RUNS = (b"\n", "é".encode(), "日本".encode(), "🎉".encode(), b"\xe6\x97", b"\xff")


def choose_decoder(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> TextDecoder:
    """The fastest decoder whose text equals a full decode on random tokens of this tokenizer."""
    tokens = TokenTexts(tokenizer, skip_special_tokens=skip_special_tokens)
    steps = _steps(tokenizer)
    kinds = [step["type"] for step in steps]
    candidate: TextDecoder | None = None
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        candidate = ByteLevelDecoder(tokens)
    elif _is_tokenwise(steps) and (anchor := _find_anchor(tokens)) is not None:
        candidate = TokenwiseDecoder(tokens, anchor, byte_fallback="ByteFallback" in kinds)
    return candidate if candidate is not None and _equals_full_decode(candidate, tokens) else WindowDecoder(tokens)


class Decoders:
    """The decoders of one tokenizer, with and without special tokens, and the bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._by_skipping = {skip: choose_decoder(tokenizer, skip_special_tokens=skip) for skip in (True, False)}
        self._without_text = WithoutText()
        self._token_bytes: dict[int, bytes] = {}

    def of(self, *, skip_special_tokens: bool, detokenize: bool = True) -> TextDecoder:
        """The decoder that leaves special tokens out, the one that does not, or the one that leaves out everything."""
        return self._by_skipping[skip_special_tokens] if detokenize else self._without_text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token alone stands for, special tokens included; may be a part of a character."""
        data = self._token_bytes.get(token_id)
        if data is None:
            data = self._token_bytes[token_id] = self._by_skipping[False].token_bytes(token_id)
        return data


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
    """Return whether only the first token and byte tokens depend on their neighbours."""
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


def _find_anchor(tokens: TokenTexts) -> int | None:
    for token_id in range(tokens.size):
        name = tokens.name(token_id)
        if name is not None and name.isascii() and name.isalpha() and tokens.decode([token_id]) == name:
            return token_id
    return None


def _equals_full_decode(decoder: TextDecoder, tokens: TokenTexts) -> bool:
    draw = random.Random(0)
    found = ([tokens.byte_id(byte) for byte in run] for run in _BYTE_RUNS)
    runs = [known for ids in found if len(known := [each for each in ids if each is not None]) == len(ids)]
    probes = (_probe(draw, tokens, runs) for _ in range(_NUM_PROBES))
    return all(decode_all(decoder, probe) == tokens.decode(probe) for probe in probes)


def _probe(draw: random.Random, tokens: TokenTexts, runs: list[list[int]]) -> list[int]:
    """Random tokens, and of byte tokens only these runs, each with other tokens around it.

    In other runs complete characters may stand before what is malformed. A full decode takes them back; no decoder can.
    """
    probe: list[int] = []
    is_after_run = False
    for _ in range(_PROBE_TOKENS):
        token_id = draw.randrange(tokens.size + 1)
        name = tokens.name(token_id)
        if name is None:  # no text, so it separates nothing
            probe.append(token_id)
        elif byte_of(name) is None and (not runs or is_after_run or draw.random() >= _SHARE_OF_RUNS):
            probe.append(token_id)
            is_after_run = False
        elif runs and not is_after_run:
            probe += draw.choice(runs)
            is_after_run = True
    return probe
