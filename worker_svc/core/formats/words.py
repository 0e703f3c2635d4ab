"""Small numbers in words of 32 bits, and scales for groups of inputs."""

import torch
from torch import Tensor

from worker_svc.core.formats.interface import Dim

WORD_BITS = 32
WORD = torch.int32


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """i32, of which each has several numbers along `dim`, the first in its lowest bits -> these, i32."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=WORD, device=words.device)
    numbers = (words.unsqueeze(dim + 1) >> shifts.view(-1, *(1,) * (words.ndim - dim - 1))) & ((1 << bits) - 1)
    return numbers.flatten(dim, dim + 1)


def groups(size: int | None, *, is_whole: bool = False) -> Dim:
    """The dimension of groups of so many inputs; None: there is one."""
    return Dim("none") if size is None else Dim("in", size, is_whole=is_whole)


def spread(of_groups: Tensor, size: int | None, dim: int, count: int) -> Tensor:
    """The values of groups of `size` inputs, along `dim`, for each of `count` inputs; of one group as it is."""
    return of_groups if size is None else of_groups.repeat_interleave(size, dim).narrow(dim, 0, count)
