"""The pretended model of the simulated runner: tokens, hidden states and logprobs as functions of what stands before;
and the output of a sequence alone, which tests compare with.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from contract.domain import chain
from contract.domain.model_kind import ModelKind
from contract.domain.params import Sampling
from contract.domain.plan import NO_FLOATS, NO_TOKENS, U32, Admission, Logprobs, PromptLogprobs
from contract.domain.pooling import Pooling, PoolingKind
from worker_svc.core.grammars import WORD_BITS, SlotGrammars, allowed_ids
from worker_svc.core.interface import Limits
from worker_svc.core.pretended_cache import BASE, context_term
from worker_svc.core.prompt_logprobs import PromptRows
from worker_svc.core.slots import F32, I64

U64 = npt.NDArray[np.uint64]
HIDDEN_SIZE = 64  # of a model that does not say it
_MASK = 2**64 - 1
_NO_LOGPROBS = -1
_FIRST_SLOT = np.zeros(1, np.int64)


def is_allowed(token_id: int, words: npt.NDArray[np.int32]) -> bool:
    """Return whether a row of `Masks.words` allows a token."""
    return bool(words.view(np.uint32)[token_id // WORD_BITS] >> np.uint32(token_id % WORD_BITS) & 1)


def choose_allowed(drawn: int, words: npt.NDArray[np.int32], vocab_size: int) -> int:
    """The token that 64 random bits draw among those that a row of `Masks.words` allows."""
    allowed = allowed_ids(words, vocab_size)
    return int(allowed[drawn % len(allowed)])


def hidden_states(hashes: U64, size: int, model_seed: int) -> F32:
    """f32[n, size] in [-1, 1): the hidden states of tokens, by the hashes u64[n] of all tokens up to each."""
    salted = hashes ^ np.uint64(salt_of_model(model_seed))
    drawn = chain.mix_columns(np.add.outer(salted, np.arange(1, size + 1, dtype=np.uint64)).ravel())
    values: F32 = (drawn >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
    return values.reshape(len(hashes), size)


def encoder_hashes(prompt_ids: Iterable[int], num_first: int = 0) -> U64:
    """The hashes u64[tokens] of a prompt's tokens, each of all of them, of its position, and of the place at which the
    second text of a pair begins.
    """
    terms = [context_term(int(token_id)) * pow(BASE, at, 2**64) for at, token_id in enumerate(prompt_ids)]
    return np.arange(len(terms), dtype=np.uint64) ^ np.uint64(chain.mix((sum(terms) + num_first) & _MASK))


def expected_score(prompt_ids: Sequence[int], num_first: int, *, model_seed: int = 0) -> float:
    """The score that a simulated cross-encoder gives a pair of texts: what tests compare with."""
    return float(hidden_states(encoder_hashes(prompt_ids, num_first)[:1], 1, model_seed)[0, 0])


def expected_vector(
    prompt_ids: Sequence[int],
    pooling: Pooling,
    *,
    size: int = HIDDEN_SIZE,
    model_seed: int = 0,
    model_kind: ModelKind = ModelKind.DECODER,
) -> F32:
    """The vector f32[dimensions] of the simulated runner for one prompt, without slots or blocks: what tests compare
    with.
    """
    if model_kind is ModelKind.ENCODER:
        hashes = encoder_hashes(prompt_ids)
    else:
        terms = [context_term(token_id) * pow(BASE, at, 2**64) for at, token_id in enumerate(prompt_ids)]
        hashes = np.array([sum(terms[: end + 1]) & _MASK for end in range(len(terms))], np.uint64)
    hidden = hidden_states(hashes, size, model_seed).astype(np.float64)
    by_kind = {PoolingKind.LAST: hidden[-1], PoolingKind.MEAN: hidden.mean(axis=0), PoolingKind.CLS: hidden[0]}
    vector = by_kind[pooling.kind][: pooling.dimensions or None]
    scaled: F32 = (vector / np.linalg.norm(vector) if pooling.normalize else vector).astype(np.float32)
    return scaled


def expected_tokens(
    prompt_ids: Sequence[int],
    sampling: Sampling,
    seed: int,
    limits: Limits,
    *,
    eos_every: int = 0,
    model_seed: int = 0,
    min_output_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    grammar_tokens: Callable[[], LLTokenizer] | None = None,
) -> Iterator[int]:
    """The output of the simulated runner for one sequence, without end, slots or blocks: what tests compare with."""
    grammars = SlotGrammars(grammar_tokens, limits.vocab_size)
    grammars.remember(_alone(prompt_ids, sampling, seed, limits))
    context, weight, num_tokens = 0, 1, 0
    for token_id in prompt_ids:
        context, weight, num_tokens = context + context_term(token_id) * weight, weight * BASE & _MASK, num_tokens + 1
    while True:
        drawn = chain.mix(chain.mix((context & _MASK) ^ num_tokens) ^ salt(sampling, seed, model_seed))
        token_id = int(drawn_tokens(np.array([drawn], np.uint64), limits, eos_every)[0])
        if num_tokens < len(prompt_ids) + min_output_tokens:
            token_id = next_allowed(token_id, stop_token_ids, limits.vocab_size)
        for row, follower in grammars.of(_FIRST_SLOT):
            token_id = choose_allowed(drawn, grammars.masks([(row, follower)]).words[row], limits.vocab_size)
            grammars.follow([(follower, token_id)])
        yield token_id
        context, weight, num_tokens = context + context_term(token_id) * weight, weight * BASE & _MASK, num_tokens + 1


def _alone(prompt_ids: Sequence[int], sampling: Sampling, seed: int, limits: Limits) -> Admission:
    return Admission(
        slot=int(_FIRST_SLOT[0]),
        token_ids=np.array(prompt_ids, np.uint32),
        num_prompt_tokens=len(prompt_ids),
        num_computed_tokens=0,
        block_ids=NO_TOKENS,
        sampling=sampling,
        seed=seed,
        eos_token_ids=limits.eos_token_ids,
    )


def salt_of_model(model_seed: int) -> int:
    """The number that a pretended model mixes into all that it computes."""
    return chain.mix(~model_seed & _MASK) if model_seed else 0


def salt(sampling: Sampling, seed: int, model_seed: int) -> int:
    """The number that a sequence mixes into the choice of its tokens."""
    return salt_of_model(model_seed) ^ (0 if sampling.is_greedy else chain.mix(seed))


def drawn_tokens(drawn: U64, limits: Limits, eos_every: int) -> U32:
    """Tokens from 64 random bits each: EOS where the upper half says so, any other token elsewhere."""
    token_ids = (drawn % np.uint64(limits.vocab_size)).astype(np.uint32)
    for eos in limits.eos_token_ids:
        token_ids[token_ids == eos] = (eos + 1) % limits.vocab_size
    if eos_every:
        token_ids[(drawn >> np.uint64(32)) % np.uint64(eos_every) == 0] = limits.eos_token_ids[0]
    return token_ids


def next_allowed(token_id: int, forbidden: tuple[int, ...], vocab_size: int) -> int:
    """A token, or the next one that is not forbidden."""
    while token_id in forbidden:
        token_id = (token_id + 1) % vocab_size
    return token_id


def complete_prompts(rows: PromptRows | None, vocab_size: int) -> Mapping[bytes, PromptLogprobs]:
    """The logprobs of prompts that are complete with these rows, by request."""
    if rows is None:
        return {}
    return rows.complete(*prompt_logprobs(rows.token_ids, rows.num_top, vocab_size))


def chosen_logprobs(token_ids: U32) -> F32:
    """The logprobs that chosen tokens have here, f32[n]: a function of the token alone."""
    return (-1.0 - token_ids % 7).astype(np.float32)


def prompt_logprobs(token_ids: I64, num_top: int, vocab_size: int) -> tuple[F32, I64, I64, F32]:
    """The logprobs that tokens of a prompt, i64[n], have here, as `PromptRows.complete` takes them: a function of the
    token alone, which is the second most likely.
    """
    own = -np.log(token_ids % 7 + 3)
    tops = (token_ids[:, None] + 1 - np.arange(num_top)) % vocab_size
    logprobs = own[:, None] + 0.5 - 0.5 * np.arange(num_top)
    return own.astype(np.float32), np.full(len(token_ids), 2), tops, logprobs.astype(np.float32)


def sampled_logprobs(token_ids: U32) -> npt.NDArray[np.float64]:
    """The logprobs that sampled tokens have here, f64[n]: a function of the token alone."""
    own: npt.NDArray[np.float64] = -np.log(token_ids % 7 + 2)
    return own


def likeliest(token_id: int, count: int, vocab_size: int) -> tuple[U32, F32]:
    """The likeliest tokens beside a sampled one, itself the first, u32[count], and their logprobs f32[count]."""
    told = token_logprobs(np.array([count]), np.ones(1, np.int64), np.array([token_id], np.uint32), vocab_size)
    return (NO_TOKENS, NO_FLOATS) if told is None else (told.top_ids, told.top_logprobs)


def token_logprobs(wanted: I64, num_tokens: I64, token_ids: U32, vocab_size: int) -> Logprobs | None:
    """The sampled token is the likeliest, the next token id the second, and so on; `wanted` i64[rows] is what each of
    `num_tokens` i64[rows] gets.
    """
    if not np.count_nonzero(wanted != _NO_LOGPROBS):
        return None
    wanted = np.repeat(wanted, num_tokens)
    counts = np.maximum(wanted, 0)
    ranks = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    own = sampled_logprobs(token_ids)
    return Logprobs(
        sampled=np.where(wanted == _NO_LOGPROBS, np.nan, own).astype(np.float32),
        ranks=(wanted != _NO_LOGPROBS).astype(np.uint32),
        top_counts=counts.astype(np.uint32),
        top_ids=((np.repeat(token_ids, counts) + ranks) % vocab_size).astype(np.uint32),
        top_logprobs=(np.repeat(own, counts) - 0.5 * ranks).astype(np.float32),
    )
