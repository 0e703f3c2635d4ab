"""What transformers says of a whole sequence at once, in fp32 where its model stands: how far the tokens and logprobs
of an engine are from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from plans import Drive
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Answered:
    """A prompt and what an engine gave: tokens, the logprob of each, and the likeliest, most likely first."""

    prompt: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    tops: Sequence[Sequence[tuple[int, float]]] = ()

    @classmethod
    def of(cls, drive: Drive) -> "Answered":
        """Of a sequence that was driven to its end."""
        return cls(drive.token_ids, drive.output, drive.logprobs, [[*top.items()] for top in drive.tops])


def expected_logprobs(model: PreTrainedModel, answer: Answered) -> Tensor:
    """f32[tokens, vocab_size] on the CPU: what stands at each token."""
    ids = torch.tensor([[*answer.prompt, *answer.token_ids]], device=model.device)
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=len(answer.token_ids) + 1).logits[0, :-1]
    return logits.float().log_softmax(-1).cpu()


def gaps(expected: Tensor, answer: Answered) -> Tensor:
    """How far each token is from the likeliest, in log-probability: f32[tokens]."""
    return expected.max(-1).values - _of_tokens(expected, answer)


def logprob_errors(expected: Tensor, answer: Answered, num_top: int) -> Tensor:
    """How far the logprobs are off, those of the tokens and of `num_top` tops: f32[tokens, 1 + 2 * num_top].

    A top is compared with what the same token should have, and with what should be in its place: tokens may stand for
    each other where they are equally likely, but for rounding.
    """
    assert len(answer.logprobs) == len(answer.tops) == len(answer.token_ids) > 0
    assert all(len({token_id for token_id, _ in top}) == len(top) == num_top for top in answer.tops)
    top_ids = torch.tensor([[token_id for token_id, _ in top] for top in answer.tops])
    top_logprobs = torch.tensor([[logprob for _, logprob in top] for top in answer.tops])
    assert bool((top_logprobs.diff() <= 0).all())
    own = torch.tensor(answer.logprobs) - _of_tokens(expected, answer)
    of_tops = top_logprobs - expected.gather(1, top_ids)
    of_places = top_logprobs - expected.topk(num_top).values
    return torch.cat((own[:, None], of_tops, of_places), 1).abs()


def _of_tokens(expected: Tensor, answer: Answered) -> Tensor:
    return expected.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
