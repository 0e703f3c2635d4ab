"""The proof that an encoder's module gives prompts in a matrix the hidden states that each has by itself: on a tiny
instance with random weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from worker_svc.core.encoder import Encoder, pad, pad_all
from worker_svc.core.slots import I64
from worker_svc.core.transformers_models.encoder import HIDDEN, TransformersEncoder
from worker_svc.core.transformers_models.refusal import NotDoneError, said
from worker_svc.core.transformers_models.shrinking import LONGEST, num_layers_of
from worker_svc.core.transformers_models.tiny import ENCODERS, build, run_encoder, tiny

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
    config: PreTrainedConfig, max_model_len: int, device: torch.device, dtype: torch.dtype
) -> EncoderProof:
    """Compare a tiny instance's prompts in matrices with each by itself, eager, in fp32.

    Args:
        config: of the whole model.
        max_model_len: tokens of its longest prompt.
        device: on which it is to be computed; where that is not the host, matrices are computed there, too.
        dtype: in which they are there.

    Raises:
        NotDoneError: they differ, its tokens do not see each other, or it asks for something that is not done.
    """
    if config.is_encoder_decoder:
        raise NotDoneError("is an encoder and a decoder")
    eager = tiny(config, max_model_len, ENCODERS)
    try:
        longest = _longest(eager)
        _refuse_one_way(eager, longest)
        module = _served(eager)
    except _RAISED as error:
        raise NotDoneError(f"cannot compute a prompt by its tokens alone ({said(error)})") from error
    prompts = _prompts(longest, eager.config.vocab_size, TransformersEncoder(module).pad_token_id)
    expected = [_alone(eager, prompt) for prompt in prompts]
    worst = worst_error(TransformersEncoder(module), prompts, expected)
    if not worst <= TOLERANCE:
        raise NotDoneError(
            "gives prompts of several lengths in a matrix other hidden states than each by itself: off by "
            f"{worst:.2g}, where rounding is below {TOLERANCE:g}"
        )
    if device.type != "cpu":
        nn.Module.to(module, device, dtype)
        there = worst_error(TransformersEncoder(module), prompts, expected, device)
        if not there <= (TOLERANCE if dtype == torch.float32 else _HALF_TOLERANCE):
            raise NotDoneError(f"gives prompts in a matrix other hidden states on {device.type}: off by {there:.2g}")
    return EncoderProof(
        worst,
        num_layers_of(eager.config.to_dict()) or 0,
        sum(map(len, prompts)),
        LONGEST - longest,
        module.config._attn_implementation,
        _unused(eager),
    )


@torch.inference_mode()
def worst_error(
    model: Encoder, prompts: Sequence[I64], expected: Sequence[Tensor], device: torch.device | None = None
) -> float:
    """The largest difference of a hidden state f32[tokens, hidden_size] of each prompt from the expected one; NaN where
    there is one.
    """
    errors = []
    # All in one matrix, and in those that a step has.
    for group in (*pad(prompts, model.pad_token_id), pad_all(prompts, model.pad_token_id)):
        columns = (torch.from_numpy(each).to(device) for each in (group.token_ids, group.lengths))
        hidden = model.normalized(model.forward(*group.on(*columns))).cpu()
        for row, place, length in zip(hidden, group.places.tolist(), group.lengths.tolist(), strict=True):
            errors.append((row[:length] - expected[place]).abs().max())
    return float(torch.stack(errors).max())


def _longest(eager: PreTrainedModel) -> int:
    """The tokens of the longest prompt that a module takes which has `LONGEST` positions."""
    for length in range(LONGEST, ENCODERS.longest, -1):
        try:
            _alone(eager, np.full(length, 3))
        except _RAISED:
            continue
        return length
    return ENCODERS.longest


def _refuse_one_way(eager: PreTrainedModel, longest: int) -> None:
    """Change the last token: the first one must see it, through windows of several layers or at once."""
    near, far = np.arange(3, 6), np.arange(3, 3 + longest)
    for prompt in (near, far):
        changed = np.array([*prompt[:-1], 2])
        if float((_alone(eager, prompt) - _alone(eager, changed))[0].abs().max()) > _SEES:
            return
    raise NotDoneError("lets no token see those after it: it is a decoder without its head, or keeps state")


def _served(eager: PreTrainedModel) -> PreTrainedModel:
    """The same module as it is served: by torch's attention, if it takes it."""
    for attention in ("sdpa", "eager"):
        try:
            module = build(eager.config, attention, ENCODERS, dtype=torch.float32)
        except (ImportError, ValueError):
            continue
        module.load_state_dict(eager.state_dict())
        return module
    raise NotDoneError("takes none of transformers' implementations of attention")


def _prompts(longest: int, vocab_size: int, pad_token_id: int) -> list[I64]:
    """Prompts of many lengths, of which some have the token that fills matrices."""
    rng = np.random.default_rng(0)
    lengths = (longest, 1, 2, 5, 9, 17, 30, longest - 1, 40, 9)
    prompts = [rng.integers(1, vocab_size, length) for length in lengths]
    prompts[4][3:5] = prompts[6][-1] = pad_token_id
    return prompts


@torch.inference_mode()
def _alone(eager: PreTrainedModel, prompt: I64) -> Tensor:
    """f32[tokens, hidden_size]."""
    hidden: Tensor = run_encoder(eager, torch.from_numpy(prompt))[HIDDEN][0]
    if len(hidden) != len(prompt):
        raise NotDoneError(f"gives {len(hidden)} hidden states of {len(prompt)} tokens")
    return hidden.float()


def _unused(eager: PreTrainedModel) -> frozenset[str]:
    run_encoder(eager, torch.arange(3, 9))[HIDDEN].sum().backward()
    return frozenset(name for name, weight in eager.named_parameters() if weight.grad is None)
