"""The requests that a benchmark sends."""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import Tokenizer

from contract.domain.errors import ErrorCode, PenstockError, invalid
from servicekit.checkpoint.location import find_checkpoint
from servicekit.checkpoint.tokenizer import read_tokenizer

# Conversations that are shorter or longer tell little of a server: as vLLM's benchmark leaves them out.
_LEAST_TOKENS, _MOST_PROMPT_TOKENS, _MOST_TOKENS = 4, 1024, 2048


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    prompt: str | list[int]  # a text, or token ids
    output_len: int  # tokens that are asked for


TokenizerOf: TypeAlias = Callable[[], Tokenizer]  # read when it is needed first


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """The flags that say which requests are sent; their names are vLLM's."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--dataset-name", choices=tuple(_DATASETS), default="random", help="where they come from [random]"
    )
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="of sharegpt: its file of conversations")
    group.add_argument("--num-prompts", type=positive, default=1000, metavar="N", help="how many [1000]")
    group.add_argument(
        "--seed", type=int, default=0, help="the same seed gives the same requests at the same times [0]"
    )
    group.add_argument("--random-input-len", type=positive, default=1024, metavar="N", help="tokens of a prompt [1024]")
    group.add_argument("--random-output-len", type=positive, default=128, metavar="N", help="of an output [128]")
    group.add_argument(
        "--random-range-ratio",
        type=_ratio,
        default=0.0,
        metavar="R",
        help="both vary by this share, 0 to below 1, upwards and downwards [0]",
    )
    group.add_argument(
        "--random-prefix-len", type=_count, default=0, metavar="N", help="tokens that all prompts begin with [0]"
    )
    for name, default, meaning in (
        ("prefix-len", 256, "tokens of each shared prefix"),
        ("suffix-len", 256, "tokens after it, of each request's own"),
        ("num-prefixes", 10, "prefixes that requests take turns with"),
        ("output-len", 128, "tokens of an output"),
    ):
        flag = f"--prefix-repetition-{name}"
        group.add_argument(flag, type=positive, default=default, metavar="N", help=f"{meaning} [{default}]")
    group.add_argument(
        "--sharegpt-output-len", type=positive, metavar="N", help="tokens of an output [as many as the answer has]"
    )
    group.add_argument(
        "--prompts-as-ids",
        action="store_true",
        help="prompts are token ids, exactly so many; else texts, about so many",
    )


def make_samples(arguments: argparse.Namespace, tokenizer_of: TokenizerOf) -> list[Sample]:
    """The requests that the flags ask for.

    Raises:
        PenstockError: a file cannot be read, or has too few conversations.
    """
    return list(_DATASETS[arguments.dataset_name](arguments, random.Random(arguments.seed), tokenizer_of()))


def tokenizer_of(model: str) -> TokenizerOf:
    """The tokenizer of a directory or hub id.

    Raises (when it is read):
        PenstockError: there is none.
    """
    return lambda: read_tokenizer(find_checkpoint(model))


def positive(text: str) -> int:
    """Of a flag: an integer, 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"give 1 or more, got {text}")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"give 0 or more, got {text}")
    return number


def _ratio(text: str) -> float:
    ratio = float(text)
    if not 0 <= ratio < 1:
        raise argparse.ArgumentTypeError(f"give a share from 0 to below 1, got {text}")
    return ratio


def _random(arguments: argparse.Namespace, draw: random.Random, tokenizer: Tokenizer) -> Iterator[Sample]:
    words = _Words(tokenizer, draw, as_ids=arguments.prompts_as_ids)
    prefix = words.ids(arguments.random_prefix_len)

    def length(middle: int) -> int:
        spread = int(middle * arguments.random_range_ratio)
        return max(1, draw.randint(middle - spread, middle + spread))

    for _ in range(arguments.num_prompts):
        ids = words.ids(length(arguments.random_input_len))
        yield Sample(words.prompt(prefix + ids), length(arguments.random_output_len))


def _prefix_repetition(arguments: argparse.Namespace, draw: random.Random, tokenizer: Tokenizer) -> Iterator[Sample]:
    words = _Words(tokenizer, draw, as_ids=arguments.prompts_as_ids)
    prefixes = [
        words.ids(arguments.prefix_repetition_prefix_len) for _ in range(arguments.prefix_repetition_num_prefixes)
    ]
    for number in range(arguments.num_prompts):
        prefix = prefixes[number % len(prefixes)]
        suffix = words.ids(arguments.prefix_repetition_suffix_len)
        yield Sample(words.prompt(prefix + suffix), arguments.prefix_repetition_output_len)


def _sharegpt(arguments: argparse.Namespace, draw: random.Random, tokenizer: Tokenizer) -> Iterator[Sample]:
    path = arguments.dataset_path
    if path is None:
        raise invalid("--dataset-name sharegpt needs --dataset-path FILE", "dataset_path")
    turns = list(_first_turns(path))
    draw.shuffle(turns)
    found = 0
    for prompt, answer in turns:
        ids, answered = (tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, answer))
        output_len = arguments.sharegpt_output_len or len(answered)
        fits = len(ids) <= _MOST_PROMPT_TOKENS and len(ids) + output_len <= _MOST_TOKENS
        if min(len(ids), output_len) < _LEAST_TOKENS or not fits:
            continue
        yield Sample(ids if arguments.prompts_as_ids else prompt, output_len)
        found += 1
        if found == arguments.num_prompts:
            return
    raise invalid(
        f"{path} has {found} conversations of a fitting length: ask for as many by --num-prompts", "num_prompts"
    )


def _first_turns(path: Path) -> Iterator[tuple[str, str]]:
    """What was asked first and what was answered, of each conversation in ShareGPT's form."""
    try:
        conversations: Any = json.loads(path.read_text("utf-8"))
        for each in conversations:
            turns = each.get("conversations", each.get("conversation", []))
            if len(turns) >= 2:
                yield str(turns[0]["value"]), str(turns[1]["value"])
    except OSError as error:
        raise PenstockError(ErrorCode.INTERNAL, f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise invalid(
            f'{path} must be a JSON list of {{"conversations": [{{"value": …}}, …]}}, as ShareGPT: {error!r:.200}',
            "dataset_path",
        ) from error


class _Words:
    """Prompts of random tokens."""

    def __init__(self, tokenizer: Tokenizer, draw: random.Random, *, as_ids: bool) -> None:
        special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._ids = [each for each in sorted(tokenizer.get_vocab().values()) if each not in special]
        self._tokenizer = tokenizer
        self._draw = draw
        self._as_ids = as_ids

    def ids(self, count: int) -> list[int]:
        """So many, drawn anew."""
        return self._draw.choices(self._ids, k=count)

    def prompt(self, ids: Sequence[int]) -> str | list[int]:
        """The ids, or a text of about as many tokens: random tokens come back from their text as others."""
        if self._as_ids:
            return list(ids)
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        again = self._tokenizer.encode(text, add_special_tokens=False).ids[: len(ids)]
        return str(self._tokenizer.decode(again, skip_special_tokens=False))


_DATASETS = {"random": _random, "prefix_repetition": _prefix_repetition, "sharegpt": _sharegpt}
