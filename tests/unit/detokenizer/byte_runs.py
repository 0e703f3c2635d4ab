"""The text of runs of byte tokens, said without a decoder of Penstock."""

from itertools import groupby

from tokenizers import Tokenizer


def ids_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Byte tokens of these bytes."""
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]


def text(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """A full decode of the tokens in which every byte from the first that is no UTF-8 to the end of its run is U+FFFD.

    The vocabulary must have a token of that character.
    """
    skipped = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special and skip_special_tokens}
    with_text = [each for each in ids if each not in skipped and tokenizer.id_to_token(each) is not None]
    mended: list[int] = []
    for is_run, group in groupby(with_text, key=lambda each: _byte(tokenizer, each) is not None):
        part = list(group)
        if is_run:
            num_good = _num_good(bytes(byte for each in part if (byte := _byte(tokenizer, each)) is not None))
            part[num_good:] = [tokenizer.token_to_id("\ufffd")] * (len(part) - num_good)
        mended += part
    decoded: str = tokenizer.decode(mended, skip_special_tokens=skip_special_tokens)
    return decoded


def _byte(tokenizer: Tokenizer, token_id: int) -> int | None:
    name = tokenizer.id_to_token(token_id)
    return int(name[3:5], 16) if name is not None and name.startswith("<0x") else None


def _num_good(data: bytes) -> int:
    """Bytes before the first that is no UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(data)
