"""Tokens that reach each other elsewhere than in attention: through state that no cache of keys and values has."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from worker_svc.core.transformers_models.attention import AttentionCalls
from worker_svc.core.transformers_models.model import run
from worker_svc.core.transformers_models.refusal import NotDoneError

_TOKENS = 6
_TOLERANCE = 1e-4
_Seen = dict[str, tuple[list[Tensor], list[Tensor]]]  # by module, in the order in which they end: inputs, outputs


@torch.inference_mode()
def refuse_mixing(module: PreTrainedModel, calls: AttentionCalls, max_model_len: int) -> None:
    """Change the first token, with attention that gives zeros: nothing else may change.

    Raises:
        NotDoneError: it does, naming the module.
    """
    seen = []
    for first in (2, 3):
        with calls.watch(max_model_len):
            seen.append(_seen(module, [first, *range(5, 4 + _TOKENS)]))
    one, other = seen
    for name, (inputs, outputs) in one.items():
        if name in other and _alike(inputs, other[name][0]) and not _alike(outputs, other[name][1]):
            part = type(module.get_submodule(name)).__name__
            raise NotDoneError(
                f"carries tokens on otherwise than by attention: {name or 'the model'} ({part}) keeps state"
            )


def _seen(module: PreTrainedModel, token_ids: Sequence[int]) -> _Seen:
    seen: _Seen = {}

    def note_of(name: str) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
            seen[name] = _of_tokens([*args, *kwargs.values()]), _of_tokens(output)

        return note

    hooks = [each.register_forward_hook(note_of(name), with_kwargs=True) for name, each in module.named_modules()]
    try:
        run(module, torch.tensor(token_ids))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _of_tokens(found: object) -> list[Tensor]:
    """Of all tensors [1, tokens, …] and [tokens, …] the rows after the first token's."""
    if isinstance(found, Tensor):
        rows = found[0] if found.ndim > 1 and found.shape[0] == 1 else found
        return [rows[1:].clone()] if rows.ndim and rows.shape[0] == _TOKENS and rows.is_floating_point() else []
    if isinstance(found, dict):
        found = [*found.values()]
    return [each for part in found for each in _of_tokens(part)] if isinstance(found, list | tuple) else []


def _alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.shape == other.shape and torch.allclose(one, other, atol=_TOLERANCE, rtol=_TOLERANCE)
        for one, other in zip(some, others, strict=True)
    )
