"""The masks that transformers makes for attention, as rules instead of tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from worker_svc.core.transformers_models.refusal import NotDoneError

_ALL_ROWS = 512  # of shorter contexts every query is looked at


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """The keys that queries see. Modules get it in place of a tensor and hand it on to their attention function."""

    sees: Callable[..., Tensor]  # of indices of a batch, a head, queries and keys
    is_custom: bool = False  # a rule that may not broadcast
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of indices

    def window(self, length: int) -> int | None:
        """The tokens that a query sees, itself included, in contexts of up to `length` tokens; None: all before it.

        Raises:
            NotDoneError: queries see what is neither.
        """
        if self.is_custom:
            raise NotDoneError("makes a mask of its own for attention")
        last = torch.tensor([length - 1], device=self.device)
        window = int(self._rows(last, length).sum())
        near = [0, 1, window - 1, window, window + 1, length // 2, length - 1]
        queries = torch.arange(length) if length <= _ALL_ROWS else torch.tensor(near).clamp(0, length - 1)
        queries = queries.to(self.device)
        distance = queries.unsqueeze(1) - torch.arange(length, device=self.device)
        if not torch.equal(self._rows(queries, length), (distance >= 0) & (distance < window)):
            raise NotDoneError(
                f"lets tokens see others than all before them, or those of a window, in contexts of {length} tokens "
                "(its mask is in chunks, or not causal)"
            )
        return None if window == length else window

    def _rows(self, queries: Tensor, length: int) -> Tensor:
        """bool[queries, length]."""
        first, keys = torch.tensor(0, device=self.device), torch.arange(length, device=self.device)
        return self.sees(first, first, queries.unsqueeze(1), keys).expand(len(queries), length)


def make_mask(
    *, mask_function: Callable[..., Tensor], use_vmap: bool = False, device: torch.device | str = "cpu", **_: Any
) -> Mask:
    """Make the mask of a rule: transformers calls this; the sizes of the batch are of no interest."""
    return Mask(mask_function, use_vmap, torch.device(device))
