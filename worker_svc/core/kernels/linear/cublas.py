"""Products that are left to cuBLAS: by which library, and in pieces of how many rows."""

from types import TracebackType

import torch
from torch import Tensor

from worker_svc.core.kernels.linear.ways import Cublas


class Library:
    """Products with `weight` in this context are done by the library of that way."""

    def __init__(self, way: Cublas, weight: Tensor) -> None:
        self._is_lt = way.lt and weight.is_cuda

    def __enter__(self) -> None:
        if self._is_lt:
            self._before = torch.backends.cuda.preferred_blas_library()
            torch.backends.cuda.preferred_blas_library("cublaslt")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_lt:
            torch.backends.cuda.preferred_blas_library(self._before)


def add_product(residual: Tensor, x: Tensor, weight: Tensor, way: Cublas) -> Tensor:
    """residual += x @ weight.T: residual [rows, outputs], x [rows, inputs], weight [outputs, inputs]."""
    rows = way.rows or max(1, len(x))
    with Library(way, weight):
        for first in range(0, len(x), rows):
            residual[first : first + rows].addmm_(x[first : first + rows], weight.t())
    return residual
