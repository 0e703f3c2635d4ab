"""The forms in which `LLM` and `LLMEngine` take prompts and chats, made into the one that the pipeline knows."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import numpy as np

from contract.domain.errors import PenstockError, invalid, unimplemented
from contract.domain.params import SamplingParams
from contract.domain.pooling import PoolingParams
from contract.domain.request import Prompt
from gateway_svc.core.messages import parse_messages

TokenIds: TypeAlias = Sequence[int]
PromptLike: TypeAlias = str | TokenIds | Mapping[str, Any]
Conversation: TypeAlias = Sequence[Mapping[str, Any]]

_PROMPT_KEYS = ("prompt", "prompt_token_ids")
P = TypeVar("P", SamplingParams, PoolingParams)
_NAMES: dict[type, str] = {SamplingParams: "sampling_params", PoolingParams: "pooling_params"}


def parse_prompt(value: PromptLike) -> Prompt:
    """A prompt given as text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.

    Raises:
        PenstockError: INVALID_ARGUMENT: it is none of these; UNIMPLEMENTED: the mapping has keys of media or adapters.
    """
    match value:
        case str():
            return Prompt(text=value)
        case Mapping():
            unknown = [str(key) for key in value if key not in _PROMPT_KEYS]
            if unknown:
                raise unimplemented(f"prompt key {unknown[0]!r}")
            given = [key for key in _PROMPT_KEYS if value.get(key) is not None]
            if len(given) != 1:
                raise invalid(
                    f"a prompt has exactly one of prompt and prompt_token_ids, got {given or 'none'}", "prompt"
                )
            text, token_ids = value.get("prompt"), value.get("prompt_token_ids")
            if text is not None and not isinstance(text, str):
                raise invalid(f"prompt must be text, got {type(text).__name__}", "prompt")
            return Prompt(text=text) if text is not None else Prompt(token_ids=_token_ids(token_ids))
        case _:
            return Prompt(token_ids=_token_ids(value))


def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or set(map(type, value)) - {int}:
        raise invalid(f"a prompt is text, a list of token ids or a dict of one of them, got {value!r:.80}", "prompt")
    return tuple(value)


def as_list(prompts: Any) -> Sequence[Any]:
    """One prompt or a list of them, as a list.

    Raises:
        PenstockError: INVALID_ARGUMENT: it is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise invalid(f"prompts are text, token ids or a list of them, got {prompts!r:.80}", "prompts")
    return [prompts] if len(prompts) > 0 and isinstance(prompts[0], int) else prompts


def as_pairs(text_1: Any, text_2: Any) -> tuple[list[Any], int]:
    """The prompts of pairs of texts, and how many of them are the first of a pair: one for all others, or one for each.

    Raises:
        PenstockError: INVALID_ARGUMENT: as many of one as of the other cannot be paired.
    """
    first, second = as_list(text_1), as_list(text_2)
    if not second or len(first) not in (1, len(second)):
        raise invalid(f"text_1 must be one, or as many as text_2: {len(first)} and {len(second)}", "text_1")
    return [*first, *second], len(first)


def as_scored(prompts: Sequence[Any], num_first: int) -> list[Prompt]:
    """The pairs of texts that a cross-encoder scores, of `as_pairs`' prompts.

    Raises:
        PenstockError: INVALID_ARGUMENT: one is no text.
    """
    parsed = [parse_prompt(each).text for each in prompts]
    texts = [each for each in parsed if each is not None]
    if len(texts) < len(parsed):
        raise invalid("a cross-encoder's pairs are texts, which its tokenizer joins: give no token ids", "text_1")
    first, second = texts[:num_first], texts[num_first:]
    pairs = zip([*first] * (len(second) // num_first), second, strict=True)
    return [Prompt(pair=pair) for pair in pairs]


def parse_conversation(
    messages: Conversation, template_kwargs: Mapping[str, Any], required: tuple[str, ...] = ()
) -> Prompt:
    """A chat in the form of OpenAI's API: each message has a `role` and a text as `content`. `required`: variables that
    its template must read.

    Raises:
        PenstockError: INVALID_ARGUMENT: a message is malformed; UNIMPLEMENTED: a content part that is not text.
    """
    if isinstance(messages, str | Mapping) or not all(isinstance(message, Mapping) for message in messages):
        raise invalid(f"a conversation is a list of messages, got {messages!r:.80}", "messages")
    parsed = parse_messages([dict(message) for message in messages])
    kwargs = dict(template_kwargs) or None
    return Prompt(messages=parsed, chat_template_kwargs=kwargs, required_variables=required)


def pair_each(params: P | Sequence[P], kind: type[P], num_prompts: int) -> list[P]:
    """Parameters for each prompt: given once for all, or one for each.

    Raises:
        PenstockError: INVALID_ARGUMENT: another type, or another number of them.
    """
    name = _NAMES[kind]
    if isinstance(params, kind):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, kind) for each in params):
        raise invalid(f"{name} must be a {kind.__name__} or a list of them, got {params!r:.80}", name)
    if len(params) != num_prompts:
        raise invalid(f"{len(params)} {name} came with {num_prompts} prompts", name)
    return list(params)


@contextmanager
def at_index(what: str, index: int) -> Iterator[None]:
    """Errors inside say which of many prompts they are about: `what[index]: …`."""
    try:
        yield
    except PenstockError as error:
        raise PenstockError(error.code, f"{what}[{index}]: {error.message}", param=error.param) from error
