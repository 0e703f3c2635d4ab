"""Incremental text: each way to get the text of a token has a decoder here, and all give the text of a full decode.

A decoder holds no sequence. It takes a sequence's state and its next token, and answers with the text that is certain
from now on and the next state. State None means that nothing is held back: then the text of a token in `pieces` is
known without calling the decoder at all, which is what the hot loop does.
"""

import codecs
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_INCOMPLETE = "\ufffd"


class TextDecoder(Protocol):
    """The part that the sequences of one tokenizer and one choice of `skip_special_tokens` share."""

    pieces: dict[int, str]  # text by token id where it depends on nothing else; filled as tokens are met

    def start(self) -> Any:
        """The state of a sequence without tokens."""
        ...

    def step(self, state: Any, token_id: int) -> tuple[str, Any]:
        """The text that `token_id` makes certain, and the next state. `state` must not be used again."""
        ...

    def flush(self, state: Any) -> str:
        """The text that was held back, for a sequence that ends in `state`."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token alone, in UTF-8; may be a part of a character. Empty for an unknown token."""
        ...


def _unicode_to_byte() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _unicode_to_byte()


def byte_of(name: str) -> bytes | None:
    """The byte that a token of byte fallback stands for, by its entry in the vocabulary; None if it is none."""
    return bytes([int(name[3:5], 16)]) if _BYTE_TOKEN.fullmatch(name) else None


class WithoutText:
    """No token has a text, and nothing is held back."""

    def __init__(self) -> None:
        self.pieces: dict[int, str] = {}

    def start(self) -> None:
        """Nothing is held back."""

    def step(self, state: None, token_id: int) -> tuple[str, None]:  # noqa: ARG002  (there is none)
        """No text."""
        self.pieces[token_id] = ""
        return "", None

    def flush(self, state: None) -> str:  # noqa: ARG002  (nothing is held back)
        """Nothing."""
        return ""

    def token_bytes(self, token_id: int) -> bytes:  # noqa: ARG002  (none has any)
        """None."""
        return b""


class TokenTexts:
    """The texts of single tokens, under one choice of `skip_special_tokens`."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._skipped = (
            frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
            if skip_special_tokens
            else frozenset()
        )
        self.size = max(tokenizer.get_vocab_size(with_added_tokens=True), *tokenizer.get_added_tokens_decoder(), 0)

    def name(self, token_id: int) -> str | None:
        """The vocabulary's entry; None if the token has no text: it is skipped, or the tokenizer does not know it."""
        if token_id in self._skipped:
            return None
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name

    def byte_id(self, byte: int) -> int | None:
        """The token that stands for a byte in tokenizers with byte fallback."""
        token_id: int | None = self._tokenizer.token_to_id(f"<0x{byte:02X}>")
        return token_id

    def decode(self, token_ids: list[int]) -> str:
        """The full decode."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)
        return text


class ByteLevelDecoder:
    """Tokens are bytes of UTF-8 (GPT-2, Llama 3, Qwen); the state is the bytes of an incomplete character."""

    def __init__(self, tokens: TokenTexts) -> None:
        self.pieces: dict[int, str] = {}
        self._tokens = tokens
        self._bytes: dict[int, bytes] = {}

    def start(self) -> None:
        """Nothing is held back."""

    def step(self, state: bytes | None, token_id: int) -> tuple[str, bytes | None]:
        """Decodes what is complete; malformed bytes become U+FFFD as soon as they are known to be malformed."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self.token_bytes(token_id)
        if state is not None:
            # A token without bytes between the bytes of a character does not break it.
            data = state + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        rest = data[used:] or None
        if state is None and rest is None:
            self.pieces[token_id] = text
        return text, rest

    def flush(self, state: bytes | None) -> str:
        """An incomplete character is malformed at the end."""
        return state.decode("utf-8", "replace") if state else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        name = self._tokens.name(token_id)
        if name is None:
            return b""
        try:
            return bytes([_BYTE_OF[character] for character in name])
        except KeyError:  # an added token that holds characters outside the alphabet stands for itself
            return name.encode()


class _Held(NamedTuple):
    """Bytes of a character that is not complete yet."""

    first: bool = False  # no token with text came before them
    data: bytes = b""
    token_ids: tuple[int, ...] = ()  # one for each byte
    is_malformed: bool = False  # the run is: each of its further bytes becomes U+FFFD


class TokenwiseDecoder:
    """Every token has a text of its own, except the first of a sequence and runs of byte tokens.

    That holds for Metaspace, WordPiece and the chain of Llama 2 (replace, byte fallback, fuse, strip). The text of a
    token after others is what it adds to an anchor, a token of plain letters.

    A character of a run of byte tokens is given out with its last byte. Bytes that are no UTF-8 become U+FFFD each, and
    so do all that follow them in the run, as in a full decode. That also takes back the characters before them in the
    run; here they stay, as they are on their way to the client already.
    """

    def __init__(self, tokens: TokenTexts, anchor: int, *, byte_fallback: bool) -> None:
        self.pieces: dict[int, str] = {}
        self._tokens = tokens
        self._anchor = anchor
        self._anchor_chars = len(tokens.decode([anchor]))
        self._byte_fallback = byte_fallback

    def start(self) -> _Held:
        """The first token is not like the others."""
        return _Held(first=True)

    def step(self, state: _Held | None, token_id: int) -> tuple[str, _Held | None]:
        """Text of the token, after that of bytes that it leaves without the rest of their character."""
        name = self._tokens.name(token_id)
        if name is None:
            if state is None:
                self.pieces[token_id] = ""
            return "", state
        if (data := self._byte(name)) is not None:
            return self._step_byte(state or _Held(), token_id, data)
        if state is None:
            text = self.pieces[token_id] = self._after_anchor((token_id,))
            return text, None
        text = self._text(first=state.first and not state.data, token_ids=(token_id,))
        return self.flush(state) + text, None

    def flush(self, state: _Held | None) -> str:
        """An incomplete character is malformed at the end."""
        return _INCOMPLETE * len(state.data) if state else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The text that the token adds after others."""
        name = self._tokens.name(token_id)
        data = None if name is None else self._byte(name)
        return self._after_anchor((token_id,)).encode() if data is None else data

    def _byte(self, name: str) -> bytes | None:
        """The byte that a token stands for; None if it is no byte token."""
        return byte_of(name) if self._byte_fallback else None

    def _step_byte(self, held: _Held, token_id: int, data: bytes) -> tuple[str, _Held | None]:
        if held.is_malformed:
            return _INCOMPLETE, held
        data, token_ids = held.data + data, (*held.token_ids, token_id)
        try:
            _, num_complete = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            return _INCOMPLETE * len(data), _Held(is_malformed=True)
        if not num_complete:
            return "", _Held(held.first, data, token_ids)
        text = self._text(first=held.first, token_ids=token_ids)
        if not held.first and not held.data:
            self.pieces[token_id] = text
        return text, None

    def _text(self, *, first: bool, token_ids: tuple[int, ...]) -> str:
        return self._tokens.decode([*token_ids]) if first else self._after_anchor(token_ids)

    def _after_anchor(self, token_ids: tuple[int, ...]) -> str:
        return self._tokens.decode([self._anchor, *token_ids])[self._anchor_chars :]


@dataclass(slots=True)
class _Window:
    """All tokens of a sequence; those from `start` on are decoded again, `num_settled` of all are certain."""

    token_ids: list[int] = field(default_factory=list)
    start: int = 0
    num_settled: int = 0
    settled_text: str = ""  # of token_ids[start:num_settled]
    num_chars: int = 0  # given out so far


class WindowDecoder:
    """For decoders that nothing is known of: decodes the last few tokens with and without the new one.

    What the new one adds is certain unless it ends in U+FFFD or changes what came before. The end is a full decode.
    """

    _CONTEXT = 8  # settled tokens that are decoded again

    def __init__(self, tokens: TokenTexts) -> None:
        self.pieces: dict[int, str] = {}
        self._tokens = tokens

    def start(self) -> _Window:
        """No tokens."""
        return _Window()

    def step(self, state: _Window, token_id: int) -> tuple[str, _Window]:
        """The text that the token adds, if it is certain."""
        name = self._tokens.name(token_id)
        if name is None:
            return "", state
        state.token_ids.append(token_id)
        text = self._tokens.decode(state.token_ids[state.start :])
        if text.endswith(_INCOMPLETE) or byte_of(name) is not None or not text.startswith(state.settled_text):
            return "", state
        added = text[len(state.settled_text) :]
        state.num_settled = len(state.token_ids)
        state.start = max(0, state.num_settled - self._CONTEXT)
        state.settled_text = self._tokens.decode(state.token_ids[state.start :])
        state.num_chars += len(added)
        return added, state

    def flush(self, state: _Window) -> str:
        """The text of a full decode after that which was given out."""
        return self._tokens.decode(state.token_ids)[state.num_chars :]

    def token_bytes(self, token_id: int) -> bytes:
        """A full decode of the token alone."""
        return self._tokens.decode([token_id]).encode()
