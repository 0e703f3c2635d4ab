"""The prompts in a body: texts or token ids, one or several."""

from collections.abc import Iterator, Sequence
from typing import TypeVar, cast

from contract.domain.errors import invalid
from contract.domain.request import Prompt

_U32 = 2**32
_PART = 64 * 1024

V = TypeVar("V")


def parse_prompts(raw: str | list[str | int | list[int]] | None, name: str, most: int) -> tuple[Prompt, ...]:
    """A text, texts, the ids of one prompt, or the ids of several, in the field of this name: at most so many.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field: it is none of these.
    """
    if raw is None:
        raise invalid(f"{name} is missing", name)
    if isinstance(raw, str):
        return (Prompt(text=raw),)
    if not raw:
        raise invalid(f"{name} must not be an empty list", name)
    if len(raw) > most and not isinstance(raw[0], int):
        raise invalid(f"at most {most} prompts, got {len(raw)}", name)
    kinds = _kinds(raw)
    if kinds == {str}:
        return tuple(Prompt(text=text) for text in cast(list[str], raw))
    if kinds == {int}:
        return (Prompt(token_ids=_token_ids(cast(list[int], raw), name)),)
    if kinds == {list}:
        return tuple(Prompt(token_ids=_token_ids(ids, name)) for ids in cast(list[list[int]], raw))
    raise invalid(f"{name} must be a string, strings, token ids, or lists of token ids, not a mixture", name)


def _kinds(raw: Sequence[object]) -> set[type]:
    return {kind for part in _parts(raw) for kind in set(map(type, part))}


def _parts(values: Sequence[V]) -> Iterator[Sequence[V]]:
    """In parts: what is done to millions of values in one call lets no other thread run meanwhile."""
    return (values[start : start + _PART] for start in range(0, len(values), _PART))


def _token_ids(ids: list[int], name: str) -> tuple[int, ...]:
    if not ids:
        raise invalid("a prompt must have at least one token id", name)
    least, most = min(map(min, _parts(ids))), max(map(max, _parts(ids)))
    if least < 0 or most >= _U32:
        wrong = least if least < 0 else most
        raise invalid(f"token ids of {name} must be in [0, {_U32 - 1}], got {wrong}", name)
    return tuple(ids)
