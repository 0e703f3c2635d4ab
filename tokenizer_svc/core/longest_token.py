"""The most text that one token can stand for: what is longer than that for every token of a context cannot fit."""

from typing import Any

from tokenizers import pre_tokenizers

# In UTF-8, no text becomes shorter than a third by canonical composition: three Hangul letters become one syllable.
_SHRINKING = {None: 1, "NFC": 3}
_KEEPING = ("ByteLevel", "Split", "Digits", "Punctuation")  # pre-tokenizers that drop nothing, unless told to


def max_token_bytes(tokenizer: dict[str, Any]) -> int | None:
    """Bytes of text (UTF-8) that one token of a tokenizer.json stands for at most; None: there is no such bound.

    There is one for byte-level BPE, where every byte of the text is in some token.
    """
    model, pre_tokenizer = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    added = tokenizer.get("added_tokens") or []
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    vocabulary = model.get("vocab") or {}
    if (
        model.get("type") != "BPE"
        or normalizer not in _SHRINKING
        or not all(step.get("type") in _KEEPING and step.get("behavior") != "Removed" for step in steps)
        or not any(step.get("type") == "ByteLevel" for step in steps)
        or any(token.get("lstrip") or token.get("rstrip") for token in added)  # they swallow the space beside them
        or not all(byte in vocabulary for byte in pre_tokenizers.ByteLevel.alphabet())  # else they are dropped
    ):
        return None
    # A character of a byte-level token is a byte.
    longest = max(map(len, vocabulary))
    return _SHRINKING[normalizer] * max([longest, *(len(token["content"].encode()) for token in added)])
