"""A decoder of transformers' own module."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from contract.domain.kv_kinds import Reach
from worker_svc.core.attention.interface import AttentionKind, StepAttention
from worker_svc.core.kv_cache import KVCacheShape
from worker_svc.core.layers.rotary import RotaryEmbedding
from worker_svc.core.transformers_models.attention import AttentionCall, AttentionCalls, attach
from worker_svc.core.transformers_models.refusal import NotDoneError

_WATCHED_TOKENS = 3
_HIDDEN = "last_hidden_state"
_IDS, _POSITIONS, _MASK = "input_ids", "position_ids", "attention_mask"


class TransformersLM:
    """Implement `LanguageModel`: rotations, norms and whatever else are the module's, and so is the cut between hidden
    states and logits: the module without its head is the one that gives the last hidden state.
    """

    def __init__(self, module: PreTrainedModel, max_model_len: int) -> None:
        """Watch the module, with its weights or any others, at a few tokens.

        Raises:
            NotDoneError: it asks for something that is not done here.
        """
        self.calls = AttentionCalls(module.dtype)
        attach(module, self.calls)
        self._module = module
        self._device = module.device
        with torch.inference_mode(), self.calls.watch(max_model_len):
            self._body, self._arguments, self._output, self.vocab_size = _watch(module)
        self.num_heads, self.num_kv_heads = _common_heads(self.calls.calls)
        self.head_dim = self.calls.cached_dim
        rotary = RotaryEmbedding(None, self.head_dim, max_model_len, self._device)
        self.attentions = [
            AttentionKind(rotary, each.scale, each.window, each.softcap, each.has_sinks) for each in self.calls.calls
        ]

    def cache_shape(self, block_size: int, dtype: torch.dtype) -> KVCacheShape:
        """The shape of its keys and values."""
        reaches = tuple(Reach(kind.window) for kind in self.attentions)
        return KVCacheShape(len(reaches), self.num_kv_heads, self.head_dim, block_size, dtype, reaches=reaches)

    @property
    def num_layer_weights(self) -> int:
        """Implement `LanguageModel.num_layer_weights`: of experts all count, which takes steps to be longer."""
        embedding = self._module.get_input_embeddings()
        return sum(each.numel() for each in self._body.parameters()) - sum(
            each.numel() for each in embedding.parameters()
        )

    @property
    def num_bytes(self) -> int:
        """Of all weights, shared ones once."""
        return sum(each.nbytes for each in (*self._module.parameters(), *self._module.buffers()))

    def forward(self, token_ids: Tensor, attention: StepAttention, rows: Tensor | None = None) -> Tensor:
        """Implement `LanguageModel.forward`."""
        given = {_IDS: token_ids[None], _POSITIONS: attention.positions[None], _MASK: torch.ones_like(token_ids)[None]}
        with self.calls.serve(attention):
            hidden: Tensor = self._body(**(self._arguments | given))[_HIDDEN][0]
        return hidden if rows is None else hidden[rows]

    def normalized(self, hidden: Tensor) -> Tensor:
        """Implement `LanguageModel.normalized`."""
        return hidden.float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `LanguageModel.logits`: the module's own forward pass, in which `hidden` is its layers' result."""
        with self._giving(hidden[None]):
            token_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            logits: Tensor = self._module(input_ids=token_ids, use_cache=False).logits[0]
        return logits

    @contextmanager
    def _giving(self, hidden: Tensor) -> Iterator[None]:
        """Put a result in the place of what the layers compute."""
        self._body.forward = lambda *_, **__: self._output(last_hidden_state=hidden)
        try:
            yield
        finally:
            del self._body.forward


def _watch(module: PreTrainedModel) -> tuple[nn.Module, dict[str, Any], type[ModelOutput], int]:
    """The part that gives the last hidden state, the arguments that it gets, its result's type, and the logits."""
    seen: list[tuple[nn.Module, dict[str, Any], type[ModelOutput]]] = []

    def note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if isinstance(output, ModelOutput) and _HIDDEN in output and part is not module:
            seen.append((part, _named(part, args, kwargs), type(output)))

    hooks = [each.register_forward_hook(note, with_kwargs=True) for each in module.modules()]
    try:
        logits = run(module, torch.arange(1, _WATCHED_TOKENS + 1)).logits
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise NotDoneError("has no part that gives a last hidden state")
    body, arguments, output = seen[-1]
    given = {name for name, each in arguments.items() if isinstance(each, Tensor)}
    if given != {_IDS, _POSITIONS, _MASK}:
        raise NotDoneError(f"computes its layers from {', '.join(sorted(given))}")
    return body, arguments, output, int(logits.shape[-1])


def run(module: PreTrainedModel, token_ids: Tensor) -> Any:
    """The module's forward pass over one sequence, as steps have it."""
    ids = token_ids.to(module.device)[None]
    positions = torch.arange(ids.shape[1], device=module.device)[None]
    return module(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)


def _named(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    bound = inspect.signature(part.forward).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named


def _common_heads(calls: list[AttentionCall]) -> tuple[int, int]:
    """Heads of queries, and of keys and values: the same in all calls.

    Raises:
        NotDoneError: they are not, or nothing attends.
    """
    if not calls:
        raise NotDoneError("does not attend by transformers' attention functions")
    heads, *others = dict.fromkeys((each.num_heads, each.num_kv_heads) for each in calls)
    if others:
        raise NotDoneError("has layers that differ in numbers of heads")
    return heads
