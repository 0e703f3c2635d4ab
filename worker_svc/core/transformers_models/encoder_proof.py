"""The proof that an encoder's module gives prompts in a matrix the hidden states that each has by itself: on a tiny
instance with random weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from worker_svc.core.encoder import Encoder, Padded, pad, pad_all
from worker_svc.core.transformers_models.encoder import (
    HIDDEN,
    LOGITS,
    TransformersCrossEncoder,
    TransformersEncoder,
    run_padded,
)
from worker_svc.core.transformers_models.refusal import NotDoneError, said
from worker_svc.core.transformers_models.shrinking import LONGEST, num_layers_of
from worker_svc.core.transformers_models.tiny import CROSS_ENCODERS, ENCODERS, Door, build, tiny
from worker_svc.core.whole_prompts import WholePrompt

TOLERANCE = 1e-3  # of hidden states in fp32; rounding is off by some 1e-6, what is wrong by tenths and more
_HALF_TOLERANCE = 0.5  # in half precision, on a device: what is wrong there are infinities and what is no number
_SEES = 1e-3  # the least change of a token's hidden states by which it sees another
# By a module that is handed what it does not expect.
_RAISED = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError, KeyError)


@dataclass(frozen=True, slots=True)
class EncoderProof:
    """The result of a comparison that agreed."""

    error: float  # of hidden states, the largest
    num_layers: int
    num_tokens: int  # whose hidden states were compared
    num_reserved: int  # positions of the model that no prompt can have
    attention: str  # of transformers' implementations
    unused: frozenset[str]  # names of weights that hidden states do not come from


def prove_encoder(
    config: PreTrainedConfig, max_model_len: int, device: torch.device, dtype: torch.dtype, door: Door = ENCODERS
) -> EncoderProof:
    """Compare a tiny instance's prompts in matrices with each by itself, eager, in fp32.

    Args:
        config: of the whole model.
        max_model_len: tokens of its longest prompt.
        device: on which it is to be computed; where that is not the host, matrices are computed there, too.
        dtype: in which they are there.
        door: to its class; of cross-encoders pairs are compared by their scores.

    Raises:
        NotDoneError: they differ, its tokens do not see each other, or it asks for something that is not done.
    """
    if config.is_encoder_decoder:
        raise NotDoneError("is an encoder and a decoder")
    if door is CROSS_ENCODERS and config.num_labels != 1:
        raise NotDoneError(f"has {config.num_labels} labels, and a score is one number")
    eager = tiny(config, max_model_len, door)
    try:
        longest = _longest(eager)
        _refuse_one_way(eager, longest)
        module = _served(eager, door)
    except _RAISED as error:
        raise NotDoneError(f"cannot compute a prompt by its tokens alone ({said(error)})") from error
    model = _encoder(module, door)
    prompts = _prompts(longest, eager.config.vocab_size, model.pad_token_id)
    expected = [_alone(eager, prompt) for prompt in prompts]
    worst = worst_error(model, prompts, expected)
    if not worst <= TOLERANCE:
        raise NotDoneError(
            "gives prompts of several lengths in a matrix other hidden states than each by itself: off by "
            f"{worst:.2g}, where rounding is below {TOLERANCE:g}"
        )
    if device.type != "cpu":
        nn.Module.to(module, device, dtype)
        there = worst_error(model, prompts, expected, device)
        if not there <= (TOLERANCE if dtype == torch.float32 else _HALF_TOLERANCE):
            raise NotDoneError(f"gives prompts in a matrix other hidden states on {device.type}: off by {there:.2g}")
    return EncoderProof(
        worst,
        num_layers_of(eager.config.to_dict()) or 0,
        sum(len(prompt.token_ids) for prompt in prompts),
        LONGEST - longest,
        module.config._attn_implementation,
        _unused(eager),
    )


@torch.inference_mode()
def worst_error(
    model: Encoder, prompts: Sequence[WholePrompt], expected: Sequence[Tensor], device: torch.device | None = None
) -> float:
    """The largest difference of a hidden state f32[tokens, hidden_size], or score f32[1, 1], of each prompt from the
    expected one; NaN where there is one.
    """
    errors = []
    # All in one matrix, and in those that a step has.
    for group in (*pad(prompts, model.pad_token_id), pad_all(prompts, model.pad_token_id)):
        columns = (torch.from_numpy(each).to(device) for each in (group.token_ids, group.lengths, group.firsts))
        hidden = model.forward(group.on(*columns)).float().cpu()
        for row, place in zip(hidden, group.places.tolist(), strict=True):
            errors.append((row[: len(expected[place])] - expected[place]).abs().max())
    return float(torch.stack(errors).max())


def _longest(eager: PreTrainedModel) -> int:
    """The tokens of the longest prompt that a module takes which has `LONGEST` positions."""
    for length in range(LONGEST, ENCODERS.longest, -1):
        try:
            _alone(eager, WholePrompt(np.full(length, 3)))
        except _RAISED:
            continue
        return length
    return ENCODERS.longest


def _refuse_one_way(eager: PreTrainedModel, longest: int) -> None:
    """Change the last token: the first one must see it, through windows of several layers or at once."""
    near, far = np.arange(3, 6), np.arange(3, 3 + longest)
    for prompt in (near, far):
        changed = np.array([*prompt[:-1], 2])
        one, other = (_alone(eager, WholePrompt(each))[0] for each in (prompt, changed))
        if float((one - other).abs().max()) > _SEES:
            return
    raise NotDoneError("lets no token see those after it: it is a decoder without its head, or keeps state")


def _encoder(module: PreTrainedModel, door: Door) -> TransformersEncoder:
    return (
        TransformersCrossEncoder(module, has_sigmoid=False) if door is CROSS_ENCODERS else TransformersEncoder(module)
    )


def _served(eager: PreTrainedModel, door: Door) -> PreTrainedModel:
    """The same module as it is served: by torch's attention, if it takes it."""
    for attention in ("sdpa", "eager"):
        try:
            module = build(eager.config, attention, door, dtype=torch.float32)
        except (ImportError, ValueError):
            continue
        module.load_state_dict(eager.state_dict())
        return module
    raise NotDoneError("takes none of transformers' implementations of attention")


def _prompts(longest: int, vocab_size: int, pad_token_id: int) -> list[WholePrompt]:
    """Prompts of many lengths, of which some have the token that fills matrices, and some are pairs."""
    rng = np.random.default_rng(0)
    lengths = (longest, 1, 2, 5, 9, 17, 30, longest - 1, 40, 9)
    prompts = [rng.integers(1, vocab_size, length) for length in lengths]
    prompts[4][3:5] = prompts[6][-1] = pad_token_id
    return [WholePrompt(each, len(each) // 2 if at % 2 else 0) for at, each in enumerate(prompts)]


@torch.inference_mode()
def _alone(eager: PreTrainedModel, prompt: WholePrompt) -> Tensor:
    """f32[tokens, hidden_size], or the score f32[1, 1]."""
    output = run_padded(eager, _padded_alone(prompt))
    if HIDDEN not in output:
        score: Tensor = output[LOGITS]
        return score.float()
    hidden: Tensor = output[HIDDEN][0]
    if len(hidden) != len(prompt.token_ids):
        raise NotDoneError(f"gives {len(hidden)} hidden states of {len(prompt.token_ids)} tokens")
    return hidden.float()


def _padded_alone(prompt: WholePrompt) -> Padded:
    """A matrix of one prompt, in which nothing is filled."""
    token_ids = torch.from_numpy(prompt.token_ids)[None]
    types = torch.arange(token_ids.shape[1])[None] >= (prompt.num_first or token_ids.shape[1])
    return Padded(token_ids, torch.ones_like(token_ids, dtype=torch.bool), types.long())


def _unused(eager: PreTrainedModel) -> frozenset[str]:
    output = run_padded(eager, _padded_alone(WholePrompt(np.arange(3, 9))))
    output[HIDDEN if HIDDEN in output else LOGITS].sum().backward()
    return frozenset(name for name, weight in eager.named_parameters() if weight.grad is None)
