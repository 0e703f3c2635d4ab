"""Small numbers in words of 32 bits, and scales for groups of inputs."""

import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)
from torch import Tensor

from worker_svc.core.formats.interface import Dim

WORD_BITS = 32
WORD = torch.int32
BLOCK = 128  # inputs of a row that stand together, as `to_words` has them
WORDS = BLOCK // 8  # that have them


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """i32, of which each has several numbers along `dim`, the first in its lowest bits -> these, i32."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=WORD, device=words.device)
    numbers = (words.unsqueeze(dim + 1) >> shifts.view(-1, *(1,) * (words.ndim - dim - 1))) & ((1 << bits) - 1)
    return numbers.flatten(dim, dim + 1)


class _SameBits(torch.autograd.Function):
    """`Tensor.view` of another dtype, which torch 2.11 does not know for `torch.vmap`."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(*_given: object) -> None:
        """Nothing is differentiated."""

    @staticmethod
    def vmap(_info: object, in_dims: tuple[int, None], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        return x.view(dtype), in_dims[0]


def same_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of another dtype that take as many bits, and have the same."""
    seen: Tensor = _SameBits.apply(x, dtype)  # type: ignore[no-untyped-call]
    return seen


def groups(size: int | None, *, is_whole: bool = False) -> Dim:
    """The dimension of groups of so many inputs; None: there is one."""
    return Dim("none") if size is None else Dim("in", size, is_whole=is_whole)


def spread(of_groups: Tensor, size: int | None, dim: int, count: int) -> Tensor:
    """The values of groups of `size` inputs, along `dim`, for each of `count` inputs; of one group as it is."""
    return of_groups if size is None else of_groups.repeat_interleave(size, dim).narrow(dim, 0, count)


def to_words(numbers: Tensor) -> Tensor:
    """[outputs, inputs] -> [outputs, blocks, WORDS, 8]: the numbers that each word has; a last block that is not full
    ends in noughts.

    A row's inputs stand in blocks of 128, of which each word has eight in the order in which matrix units want them:
    number 4 s + 2 e + h of the word 4 t + v is input 32 v + 16 e + 8 h + 2 t + s of the block.
    """
    blocks = -(-numbers.shape[1] // BLOCK)
    numbers = F.pad(numbers, (0, blocks * BLOCK - numbers.shape[1]))
    # v, e, h, t, s -> t, v, s, e, h
    places = numbers.view(len(numbers), blocks, 4, 2, 2, 4, 2).permute(0, 1, 5, 2, 6, 3, 4)
    return places.reshape(len(numbers), blocks, WORDS, BLOCK // WORDS)


def from_words(numbers: Tensor) -> Tensor:
    """Undo `to_words`, but for the noughts."""
    outputs, blocks = numbers.shape[:2]
    # t, v, s, e, h -> v, e, h, t, s
    places = numbers.reshape(outputs, blocks, 4, 4, 2, 2, 2).permute(0, 1, 3, 5, 6, 2, 4)
    return places.reshape(outputs, -1)
