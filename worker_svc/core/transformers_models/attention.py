"""The attention function of transformers' modules: watched once for what they ask of it, then paged attention."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker_svc.core.attention.interface import StepAttention
from worker_svc.core.transformers_models.masks import Mask, make_mask
from worker_svc.core.transformers_models.refusal import NotDoneError

NAME = "penstock"  # among transformers' attention implementations
_DIMS = 8  # that kernels read at a time
_CALLS = "penstock_attention_calls"  # an attribute of modules
_SINKS, _WINDOW = "s_aux", "sliding_window"
# Arguments that change nothing where attention keeps its own cache and mask and gives no weights back.
_MEANINGLESS = ("position_ids", "use_cache", "is_causal", "cache_position")


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The shapes and options that a module hands to its attention function, every time alike."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    scale: float  # of scores
    window: int | None  # as in `AttentionKind`, as the next two
    softcap: float | None
    has_sinks: bool

    @property
    def features(self) -> tuple[str, ...]:
        """The names of all that is done to scores beside their scale."""
        told = {"window": self.window is not None, "softcap": self.softcap is not None, "sinks": self.has_sinks}
        return tuple(name for name, is_asked in told.items() if is_asked)


@dataclass
class AttentionCalls:
    """The calls of one model's attention function, in the order of a forward pass: each has its layer in the cache."""

    dtype: torch.dtype  # of the cache: some modules rotate in another
    calls: list[AttentionCall] = field(default_factory=list)
    cached_dim: int = 0  # dimensions of a head in the cache, in which zeros are after what a head has
    _watched_length: int = 0  # tokens of the contexts that masks are read for; 0: nobody watches
    _step: StepAttention | None = None
    _next: int = 0

    @contextmanager
    def watch(self, max_model_len: int) -> Iterator[None]:
        """Note all calls anew; attention gives zeros meanwhile."""
        self.calls.clear()
        self._watched_length = max_model_len
        try:
            yield
        finally:
            self._watched_length = 0
        largest = max((max(each.head_dim, each.value_dim) for each in self.calls), default=0)
        self.cached_dim = -(-largest // _DIMS) * _DIMS

    @contextmanager
    def serve(self, step: StepAttention) -> Iterator[None]:
        """Attend by `step`.

        Raises:
            NotDoneError: there are other calls than those that were watched.
        """
        self._step, self._next = step, 0
        yield
        if self._next != len(self.calls):
            raise NotDoneError(f"attends {self._next} times, and before that {len(self.calls)} times")

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: object, told: Mapping[str, Any]
    ) -> tuple[Tensor, None]:
        """query [1, num_heads, tokens, head_dim], key and value alike with num_kv_heads -> [1, tokens, num_heads,
        value_dim], as transformers has it.
        """
        if self._watched_length:
            self.calls.append(_watched(query, key, value, mask, told, length=self._watched_length))
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
        assert self._step is not None
        call, layer = self.calls[self._next], self._next
        self._next += 1
        if (_scale(query, told), told.get("softcap")) != (call.scale, call.softcap):
            raise NotDoneError("scales its scores otherwise from step to step")
        qkv = torch.cat([self._padded(each) for each in (query, key, value)], 1).flatten(1)
        attended = self._step.attend(layer, qkv, None, sinks=told.get(_SINKS))
        of_heads = attended.view(1, len(attended), call.num_heads, self.cached_dim)
        return of_heads[..., : call.value_dim].to(value.dtype), None

    def _padded(self, heads: Tensor) -> Tensor:
        """[1, heads, tokens, dim] -> [tokens, heads, cached_dim], as they are cached."""
        rows, missing = heads[0].transpose(0, 1).to(self.dtype), self.cached_dim - heads.shape[-1]
        return F.pad(rows, (0, missing)) if missing else rows


def attach(module: nn.Module, calls: AttentionCalls) -> None:
    """From now on the attention function that `register` names goes to `calls`, for this module and all in it."""
    for each in module.modules():
        setattr(each, _CALLS, calls)


def register() -> None:
    """Make `NAME` an attention implementation of transformers'."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, make_mask)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **told: Any
) -> tuple[Tensor, None]:
    calls: AttentionCalls = getattr(module, _CALLS)
    return calls.attend(query, key, value, attention_mask, told)


def _watched(
    query: Tensor, key: Tensor, value: Tensor, mask: object, told: Mapping[str, Any], *, length: int
) -> AttentionCall:
    """Read the call that the arguments ask for.

    Raises:
        NotDoneError: something that paged attention does not do.
    """
    if not isinstance(mask, Mask):
        raise NotDoneError(f"hands its attention function {'no mask' if mask is None else 'a mask of its own'}")
    window, told_window = mask.window(length), told.get(_WINDOW)
    if told_window is not None and told_window < length and told_window != window:
        raise NotDoneError(f"tells its attention function of {_WINDOW} {told_window}, its mask of {window or 'none'}")
    for name, argument in told.items():
        if name not in ("scaling", "softcap", _SINKS, _WINDOW, *_MEANINGLESS) and _asks(argument):
            raise NotDoneError(f"hands its attention function {name}")
    _, num_heads, tokens, head_dim = query.shape
    _, num_kv_heads, num_keys, _ = key.shape
    if key.shape[-1] != head_dim or value.shape[:3] != key.shape[:3] or tokens != num_keys or num_heads % num_kv_heads:
        shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
        raise NotDoneError(f"attends with queries, keys and values of shapes {shapes}")
    sinks, softcap = told.get(_SINKS), told.get("softcap")
    if sinks is not None and sinks.shape != (num_heads,):
        raise NotDoneError(f"has sinks of shape {tuple(sinks.shape)} for {num_heads} heads")
    return AttentionCall(
        num_heads, num_kv_heads, head_dim, value.shape[-1], _scale(query, told), window, softcap, sinks is not None
    )


def _asks(argument: object) -> bool:
    """Return whether an argument may say something: zero, false and nothing do not."""
    return argument is not None and (not isinstance(argument, bool | int | float) or bool(argument))


def _scale(query: Tensor, told: Mapping[str, Any]) -> float:
    scale = told.get("scaling")
    if isinstance(scale, Tensor):
        raise NotDoneError("scales its scores by a tensor")
    return float(query.shape[-1] ** -0.5 if scale is None else scale)
