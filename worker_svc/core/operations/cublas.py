"""Products that are left to cuBLAS: by which library, and in pieces of how many rows, as measured on an H200."""

from types import TracebackType

import torch
from torch import Tensor

_LARGE_WEIGHT = 1 << 24  # elements, from which cuBLASLt chooses its kernels better than cuBLAS does
_LONG_INPUTS = 4096
_ROWS = 2048  # of a piece where the inputs are long and the outputs are not: larger ones take up to 13 % more a row


class LibraryFor:
    """Products with `weight` in this context are done by the library that is better at it."""

    def __init__(self, weight: Tensor) -> None:
        self._is_large = weight.is_cuda and weight.numel() >= _LARGE_WEIGHT

    def __enter__(self) -> None:
        if self._is_large:
            self._before = torch.backends.cuda.preferred_blas_library()
            torch.backends.cuda.preferred_blas_library("cublaslt")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_large:
            torch.backends.cuda.preferred_blas_library(self._before)


def add_product(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """residual += x @ weight.T: residual [rows, outputs], x [rows, inputs], weight [outputs, inputs]."""
    outputs, inputs = weight.shape
    rows = _ROWS if inputs >= _LONG_INPUTS and outputs <= inputs else max(1, len(x))
    with LibraryFor(weight):
        for first in range(0, len(x), rows):
            residual[first : first + rows].addmm_(x[first : first + rows], weight.t())
    return residual
