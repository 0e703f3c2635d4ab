"""Requests of every kind, drawn from a seed, whose tokens are known without a pipeline."""

import random
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np

from bench.rig.chaos.pipeline import EOS, EOS_EVERY, EOS_IDS, NUM_WORDS, VOCAB_SIZE, make_tokenizer
from bench.rig.expected_beams import expected_beams
from contract.domain import chain
from contract.domain.params import SamplingParams
from contract.domain.pooling import VECTOR_KINDS, Pooling
from contract.domain.repetition import RepetitionDetectionParams
from contract.domain.structured_outputs import StructuredOutputsParams
from servicekit.checkpoint.grammars import GrammarTokens
from tokenizer_svc.core.grammars import grammar_of
from worker_svc.core.interface import Limits
from worker_svc.core.pretended_model import expected_tokens, expected_vector, prompt_logprobs

_LIMITS = Limits(0, 0, 0, 0, 0, vocab_size=VOCAB_SIZE, eos_token_ids=EOS_IDS)
_TOKENIZER = make_tokenizer()
_TOKENS = GrammarTokens(make_tokenizer, VOCAB_SIZE)
MAX_TOKENS = 240
ENDLESS_TOKENS = 8000  # of a request whose client leaves: more than there is time for
_LONG_PROMPT = (600, 3000)  # tokens: several chunks
_SHARES = {  # of each kind
    "greedy": 3,
    "seeded": 3,
    "stop": 2,
    "samples": 2,
    "long": 2,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "embeddings": 2,
    "leaving": 2,
    "structured": 2,
    "repetition": 2,
    "told": 2,
    "tools": 2,
    "typed": 2,
    "responses": 2,
    "messages": 2,
    "beams": 2,
}
_ANTHROPICS = {"required": "any", "auto": "auto"}
_MAX_CALL_TOKENS = 600  # of calls and thoughts: some are cut
_MUMBLE = r"( w00[0-2]){200}"  # three words
_SENTENCES = r"(( w[0-9]{3}){2} w[0-9]{2}7){%d,%d}"  # a regular expression: every third word ends in 7


class Api(Enum):
    """The APIs over HTTP."""

    COMPLETIONS = "completions"
    CHATS = "chats"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"


@dataclass(frozen=True, eq=False)
class Recipe:
    """One request that a client may send."""

    kind: str
    is_http: bool
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    leaves_after: int = 0  # the client goes away after so many tokens; 0: it stays
    api: Api = Api.COMPLETIONS  # over HTTP
    asked: Mapping[str, Any] = field(default_factory=dict)  # of a chat: what its body or call says beside parameters
    pooling: Pooling | None = None  # its prompt becomes a vector

    @property
    def is_chat(self) -> bool:
        """Return whether a chat template makes its prompt: what is computed is known to the pipeline alone."""
        return bool(self.asked)

    @property
    def is_told(self) -> bool:
        """Return whether the reply tells its prompt and the ids of tokens, and comes in groups of these."""
        return self.kind == "told"

    @property
    def expected_prompt_logprobs(self) -> list[dict[int, float]]:
        """The logprobs of the prompt, of each token but the first; none: they are not asked for."""
        if (num_top := self.params.prompt_logprobs) is None:
            return []
        token_ids = np.array(self.prompt_ids[1:], np.int64)
        own, _, tops, logprobs = prompt_logprobs(token_ids, num_top, VOCAB_SIZE)
        rows = zip(token_ids.tolist(), own.tolist(), tops.tolist(), logprobs.tolist(), strict=True)
        return [{token: each} | dict(zip(ids, values, strict=True)) for token, each, ids, values in rows]

    def expected_vector(self, model_seed: int = 0) -> list[float]:
        """The vector of the prompt; empty: it is not asked for."""
        if self.pooling is None:
            return []
        found: list[float] = expected_vector(self.prompt_ids, self.pooling, model_seed=model_seed).tolist()
        return found

    def expected(self, sequence: int, model_seed: int = 0) -> Iterator[int]:
        """The tokens of one sample, as far as one likes; its end is not looked at."""
        if self.params.use_beam_search:
            return iter(expected_beams(self.prompt_ids, self.params, _LIMITS, EOS_EVERY, model_seed)[sequence])
        seed = chain.sequence_seed(self.params.seed or 0, sequence)
        form = self.params.structured_outputs
        return expected_tokens(
            self.prompt_ids,
            self.params.sampling if form is None else replace(self.params.sampling, grammar=grammar_of(form)),
            seed,
            _LIMITS,
            eos_every=EOS_EVERY,
            model_seed=model_seed,
            grammar_tokens=_TOKENS,
        )


_CALLING = {"tools": Api.CHATS, "responses": Api.RESPONSES, "messages": Api.MESSAGES}


def make_recipes(rng: random.Random, count: int, without: Container[str] = ()) -> list[Recipe]:
    """So many different requests, each kind among them, but for some, as often as its share says."""
    kinds = [kind for kind, share in _SHARES.items() for _ in range(share) if kind not in without]
    return [_make(rng, kinds[index % len(kinds)]) for index in range(count)]


def _make(rng: random.Random, kind: str) -> Recipe:
    if kind in _CALLING:
        return _calls(rng, kind)
    if kind == "typed":
        return _typed(rng)
    if kind == "embeddings":
        return _pooled(rng)
    if kind == "beams":
        return _beams(rng)
    low, high = _LONG_PROMPT if kind in ("long", "prompt_logprobs") else (1, 60)
    prompt_ids = tuple(rng.randrange(EOS) for _ in range(rng.randint(low, high)))
    is_greedy = kind == "greedy" or (kind not in ("seeded", "samples") and rng.random() < 0.5)
    params = SamplingParams(
        n=2 if kind == "samples" else 1,
        temperature=0.0 if is_greedy else 1.0,
        seed=rng.randrange(2**31),
        max_tokens=ENDLESS_TOKENS if kind == "leaving" else rng.randint(20, MAX_TOKENS),
        ignore_eos=kind == "leaving" or (kind not in ("structured", "repetition") and rng.random() < 0.3),
        logprobs=rng.choice((0, 2)) if kind == "logprobs" else None,
        logprob_token_ids=(3, 5) if kind == "logprobs" and rng.random() < 0.5 else (),
        prompt_logprobs=rng.choice((0, 2)) if kind == "prompt_logprobs" else None,
        structured_outputs=_form(rng) if kind == "structured" else None,
    )
    if kind == "repetition":
        params = replace(params, **_repetition(rng))
    recipe = Recipe(kind, rng.random() < 0.5, prompt_ids, params, rng.randint(1, 200) if kind == "leaving" else 0)
    if kind == "stop":
        return Recipe(kind, recipe.is_http, prompt_ids, _with_stop(rng, recipe))
    return recipe


def _pooled(rng: random.Random) -> Recipe:
    prompt_ids = tuple(rng.randrange(EOS) for _ in range(rng.randint(1, _LONG_PROMPT[0])))
    pooling = Pooling(rng.choice(VECTOR_KINDS), rng.random() < 0.5, rng.choice((0, 16)))
    params = SamplingParams(temperature=0.0, max_tokens=1, seed=rng.randrange(2**31))
    return Recipe("embeddings", rng.random() < 0.5, prompt_ids, params, api=Api.EMBEDDINGS, pooling=pooling)


def _beams(rng: random.Random) -> Recipe:
    """A search of some width, which may end early, or by its length."""
    prompt_ids = tuple(rng.randrange(EOS) for _ in range(rng.randint(1, _LONG_PROMPT[0])))
    params = SamplingParams(
        n=rng.randint(2, 5),
        temperature=0.0,
        use_beam_search=True,
        length_penalty=rng.choice((0.0, 0.7, 1.0, 2.0)),
        early_stopping=rng.choice((False, True, "never")),
        max_tokens=rng.randint(20, MAX_TOKENS),
        ignore_eos=rng.random() < 0.3,
        seed=rng.randrange(2**31),
    )
    return Recipe("beams", rng.random() < 0.5, prompt_ids, params)


def _calls(rng: random.Random, kind: str) -> Recipe:
    """A chat whose output calls functions, perhaps after a thought, or may call them; in the words of some API."""
    params = SamplingParams(
        temperature=1.0, seed=rng.randrange(2**31), max_tokens=rng.randint(_MAX_CALL_TOKENS // 6, _MAX_CALL_TOKENS)
    )
    fewest = rng.randint(2, 30)
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": fewest, "maxItems": fewest + 4}
    schema = {"type": "object", "properties": {"numbers": numbers}, "required": ["numbers"]}
    said = [{"role": "user", "content": f" w{rng.randrange(NUM_WORDS):03}"}]
    choice, function = rng.choice(("required", "auto")), {"name": "count", "strict": True}
    asked: dict[str, Any] = {"chat_template_kwargs": {"thinking": rng.random() < 0.3}}
    if rng.random() < 0.3:
        asked["thinking_token_budget"] = rng.randint(0, 40)
    match api := _CALLING[kind]:
        case Api.RESPONSES:
            asked |= {"input": said, "tools": [{"type": "function", **function, "parameters": schema}]}
            asked |= {"tool_choice": choice, "max_output_tokens": params.max_tokens}
        case Api.MESSAGES:
            asked |= {"messages": said, "tools": [{**function, "input_schema": schema}]}
            asked |= {"tool_choice": {"type": _ANTHROPICS[choice]}, "max_tokens": params.max_tokens}
        case _:
            asked |= {"messages": said, "tool_choice": choice}
            asked |= {"tools": [{"type": "function", "function": {**function, "parameters": schema}}]}
    return Recipe(kind, True, (), params, api=api, asked=asked)


def _typed(rng: random.Random) -> Recipe:
    """A chat that calls functions, over gRPC, where thoughts, content and calls have fields of their own."""
    chat = _calls(rng, "tools")
    asked = dict(chat.asked)
    params = replace(chat.params, thinking_token_budget=asked.pop("thinking_token_budget", None))
    return replace(chat, kind="typed", is_http=False, params=params, asked=asked)


def _repetition(rng: random.Random) -> dict[str, Any]:
    """Parameters of an output of few words that ends once it repeats itself; without a text sometimes."""
    count = rng.randint(3, 5)
    detection = RepetitionDetectionParams(max_pattern_size=rng.randint(1, 4), min_count=count)
    form = StructuredOutputsParams(regex=_MUMBLE)
    return {"repetition_detection": detection, "structured_outputs": form, "detokenize": rng.random() < 0.7}


def _form(rng: random.Random) -> StructuredOutputsParams:
    fewest = rng.randint(5, 40)
    return StructuredOutputsParams(regex=_SENTENCES % (fewest, fewest + rng.randint(0, 5)))


def _with_stop(rng: random.Random, recipe: Recipe) -> SamplingParams:
    """Stop strings of which one comes: a word, or the end of one and the beginning of the next."""
    assert recipe.params.max_tokens is not None
    tokens = list(islice(recipe.expected(0), recipe.params.max_tokens))
    at = rng.randrange(5, len(tokens) - 1)
    first, second = (_TOKENIZER.decode([token_id]) for token_id in tokens[at : at + 2])
    stop = first[1:] if rng.random() < 0.5 else first[-2:] + second[:-1]
    stop = stop or first + second
    return SamplingParams(
        temperature=recipe.params.temperature,
        seed=recipe.params.seed,
        max_tokens=recipe.params.max_tokens,
        ignore_eos=recipe.params.ignore_eos,
        stop=(stop, "never"),
    )
