"""From logits to tokens: a pure function of (logits, parameters, seed, position), so a token does not depend on what
else is in the batch, nor on which worker draws it. Work that no row asks for is not done.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.core.changes import change
from worker_svc.core.kernels.sampling.changes import Changes, TokenMasks
from worker_svc.core.kernels.sampling.parts import PART_COUNTER, PART_TOKENS
from worker_svc.core.noise import uniform


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows that punish repetition, and the tokens they have seen."""

    rows: Tensor  # i64[p]
    history: Tensor  # i64[p, longest]: prompt and output; anything after `lengths`
    lengths: Tensor  # i64[p]
    num_prompt_tokens: Tensor  # i64[p]
    repetition: Tensor  # f32[p], 1 is none
    presence: Tensor  # f32[p], 0 is none
    frequency: Tensor  # f32[p], 0 is none


@dataclass(frozen=True, slots=True)
class Truncation:
    """Rows among the drawn ones that keep only likely tokens by top-k or top-p."""

    rows: Tensor  # i64[t], indices into `Draw.rows`
    top_k: Tensor  # i64[t], 0 keeps all
    top_p: Tensor  # f32[t], 1 keeps all
    longest: int | None  # the largest top-k if every row has one, else None


@dataclass(frozen=True, slots=True)
class Draw:
    """Rows whose token is drawn at random; the others take the most likely one."""

    rows: Tensor  # i64[d]
    temperature: Tensor  # f32[d], above 0
    seeds: Tensor  # i64[d]
    positions: Tensor  # i64[d]: index of the token in its sequence, prompt included
    truncation: Truncation | None = None
    min_p: Tensor | None = None  # f32[d], 0 keeps all


@dataclass(frozen=True, slots=True)
class ChosenIds:
    """Rows whose logprobs of some tokens are asked for, instead of the most likely ones'."""

    rows: Tensor  # i64[c]
    token_ids: Tensor  # i64[c, most]; where a row has fewer, anything of the vocabulary


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """All that the rows of one step ask for; None: no row does."""

    draw: Draw | None = None
    penalties: Penalties | None = None
    changes: Changes | None = None
    logprob_rows: Tensor | None = None  # i64[l]
    num_top_logprobs: int = 0  # the most that a row asks for
    chosen: ChosenIds | None = None

    def masked(self, masks: TokenMasks | None) -> "SamplerInput":
        """Ask for the same, of the tokens that `masks` leave."""
        return self if masks is None else replace(self, changes=replace(self.changes or Changes(), masks=masks))


@dataclass(frozen=True, slots=True)
class Extras:
    """All that some row of a batch asks for besides a temperature, where the device has the slots' parameters."""

    has_cuts: bool = False  # top-k, top-p or min-p
    has_penalties: bool = False
    changes: Changes | None = None
    logprob_rows: Tensor | None = None  # as in `SamplerInput`
    num_top_logprobs: int = 0
    chosen: ChosenIds | None = None

    def masked(self, masks: TokenMasks | None) -> "Extras":
        """Ask for the same, of the tokens that `masks` leave."""
        return self if masks is None else replace(self, changes=replace(self.changes or Changes(), masks=masks))


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of all rows, and log-probabilities of the raw logits for the rows that asked."""

    token_ids: Tensor  # i64[rows]
    logprobs: Tensor | None = None  # f32[l]
    ranks: Tensor | None = None  # i64[l]: how many tokens have a larger logit, and one
    top_ids: Tensor | None = None  # i64[l, num_top_logprobs], most likely first
    top_logprobs: Tensor | None = None  # f32[l, num_top_logprobs]


def sample(logits: Tensor, asked: SamplerInput) -> Sampled:
    """One token a row from logits f32[rows, vocab_size], which are left as they are."""
    adjusted = _adjust(logits, asked)
    if asked.draw is None:
        token_ids = adjusted.argmax(dim=-1)
    elif len(asked.draw.rows) == len(logits):
        token_ids = draw_tokens(adjusted, asked.draw)
    else:
        token_ids = adjusted.argmax(dim=-1)
        token_ids.index_copy_(0, asked.draw.rows, draw_tokens(adjusted.index_select(0, asked.draw.rows), asked.draw))
    if asked.logprob_rows is None:
        return Sampled(token_ids)
    raw = logits.index_select(0, asked.logprob_rows)
    logprobs, chosen = raw.log_softmax(dim=-1), token_ids.index_select(0, asked.logprob_rows).unsqueeze(1)
    own = logprobs.gather(1, chosen).squeeze(1)
    ranks = (raw > raw.gather(1, chosen)).sum(dim=-1).add_(1)
    top_logprobs, top_ids = logprobs.topk(asked.num_top_logprobs, dim=-1)
    return Sampled(token_ids, own, ranks, top_ids, top_logprobs)


def chosen_logprobs(logits: Tensor, chosen: ChosenIds) -> Tensor:
    """f32[c, most]: the logprobs of chosen tokens by raw logits [rows, vocab_size]."""
    raw = logits.index_select(0, chosen.rows).float()
    return raw.gather(1, chosen.token_ids) - raw.logsumexp(dim=-1, keepdim=True)


def _adjust(logits: Tensor, asked: SamplerInput) -> Tensor:
    if asked.penalties is None and asked.changes is None:
        return logits
    adjusted = logits.clone()
    if asked.penalties is not None:
        _penalise(adjusted, asked.penalties)
    if asked.changes is not None:
        change(adjusted, asked.changes)
    return adjusted


def _penalise(logits: Tensor, penalties: Penalties) -> None:
    vocab_size = logits.shape[1]
    index = torch.arange(penalties.history.shape[1], device=logits.device)
    outside = index >= penalties.lengths.unsqueeze(1)
    token_ids = penalties.history.masked_fill(outside, vocab_size)  # the column after the vocabulary takes the rest
    is_output = (index >= penalties.num_prompt_tokens.unsqueeze(1)).to(torch.float32)
    counts = torch.zeros(2, len(token_ids), vocab_size + 1, dtype=torch.float32, device=logits.device)
    counts[0].scatter_add_(1, token_ids, torch.ones_like(is_output))
    counts[1].scatter_add_(1, token_ids, is_output)
    seen, output_counts = counts[0, :, :-1] > 0, counts[1, :, :-1]
    rows = logits.index_select(0, penalties.rows)
    repetition = penalties.repetition.unsqueeze(1)
    rows = torch.where(seen, torch.where(rows > 0, rows / repetition, rows * repetition), rows)
    rows = rows - (output_counts > 0) * penalties.presence.unsqueeze(1)
    rows = rows - output_counts * penalties.frequency.unsqueeze(1)
    logits.index_copy_(0, penalties.rows, rows)


def draw_tokens(logits: Tensor, draw: Draw) -> Tensor:
    """Tokens i64[d] for logits f32[d, vocab_size], by exponential races: whose clock rings first wins, and a clock runs
    as fast as what it stands for is likely. The first race is between parts of the vocabulary, the second between the
    tokens of the winner, so that most tokens need no noise.
    """
    # Scaled from the maximum down, so that a tiny temperature cannot overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / draw.temperature.unsqueeze(1)
    if draw.truncation is not None:
        _truncate(scaled, draw.truncation)
    if draw.min_p is not None:
        scaled.masked_fill_(scaled < draw.min_p.log().unsqueeze(1), -torch.inf)
    rows, vocab_size = scaled.shape
    num_parts, width = -(-vocab_size // PART_TOKENS), min(vocab_size, PART_TOKENS)
    parts = F.pad(scaled, (0, num_parts * width - vocab_size), value=-torch.inf).view(rows, num_parts, width)
    counters = torch.arange(PART_COUNTER, PART_COUNTER + num_parts, device=logits.device)
    part = _first_to_ring(parts.logsumexp(dim=-1), draw, counters.expand(rows, -1))
    first = part * PART_TOKENS
    token_ids = first.unsqueeze(1) + torch.arange(width, device=logits.device)
    of_part = parts.gather(1, part.view(-1, 1, 1).expand(-1, 1, width)).squeeze(1)
    return first + _first_to_ring(of_part, draw, token_ids)


def _first_to_ring(weights: Tensor, draw: Draw, counters: Tensor) -> Tensor:
    """The winners i64[d]: weights f32[d, n] are logarithms, counters i64[d, n] say which noise each has."""
    ring_times = uniform(draw.seeds, draw.positions, counters).neg_().log1p_().neg_()
    return (weights - ring_times.log_()).argmax(dim=-1)


def _truncate(scaled: Tensor, truncation: Truncation) -> None:
    """Remove what top-k and then top-p (of what top-k left) drop; tokens as likely as the last one kept stay, so that
    the order in which equals are sorted does not matter.
    """
    rows = scaled.index_select(0, truncation.rows)
    if truncation.longest is None:
        likely = rows.sort(dim=-1, descending=True).values
    else:
        likely = rows.topk(min(truncation.longest, rows.shape[1]), dim=-1).values
    ranks = torch.arange(likely.shape[1], device=rows.device)
    top_k = truncation.top_k.unsqueeze(1)
    likely = likely.masked_fill((ranks >= top_k) & (top_k > 0), -torch.inf)
    probabilities = likely.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # Rounding may bring a sum to 1 before its end: top-p 1 must keep every token all the same.
    top_p = truncation.top_p.masked_fill(truncation.top_p >= 1.0, torch.inf).unsqueeze(1)
    kept = (before < top_p) & (likely > -torch.inf)
    last = kept.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    threshold = likely.gather(1, last)
    scaled.index_copy_(0, truncation.rows, rows.masked_fill(rows < threshold, -torch.inf))
