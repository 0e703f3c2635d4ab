"""Products of rounded rows, added to a residual by cuBLASLt: torch offers its products of 8-bit floats, but not their
addition to anything.

Called is the C interface of the library that torch has loaded. Names and numbers are those of its `cublasLt.h`.
"""

import ctypes
import weakref
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache, cached_property

import torch
from torch import Tensor

_HOPPER = (9, 0)
_FIRST_VERSION = 12_09_00  # with a scale for each row and each output
_WORKSPACE_BYTES = 32 << 20
_ALIGNMENT = 256  # of pointers in bytes, which the library takes for granted where it is told nothing else
_ALIGNED = 16  # inputs and outputs of what it multiplies
_MOST_SHAPES = 512  # whose algorithms are remembered

_STATUS_SUCCESS, _STATUS_NOT_SUPPORTED = 0, 15
_COMPUTE_32F = 68
_R_32F, _R_16BF, _R_8F_E4M3 = 0, 14, 28
_OP_T = 1
_DESC_TRANSA, _DESC_FAST_ACCUM = 3, 25
_DESC_A_SCALE_POINTER, _DESC_B_SCALE_POINTER = 17, 18
_DESC_A_SCALE_MODE, _DESC_B_SCALE_MODE, _SCALE_OUTER_VEC_32F = 31, 32, 3
_PREF_MAX_WORKSPACE_BYTES = 1
_ONE = c_float(1.0)


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algo", _Algorithm),
        ("workspaceSize", c_size_t),
        ("state", c_int),
        ("wavesCount", c_float),
        ("reserved", c_int * 4),
    )


@cache
def _library() -> ctypes.CDLL | None:
    """None: there is none, or one that knows no such scales."""
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return None
    library.cublasLtGetVersion.restype = c_size_t
    return library if library.cublasLtGetVersion() >= _FIRST_VERSION else None


class Fp8Sums:
    """Sums on `device`, for use on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._algorithms: dict[tuple[int, int, int], _Algorithm | None] = {}

    @cached_property
    def is_there(self) -> bool:
        """Return whether the library adds anything on this device."""
        if self._device.type != "cuda" or torch.cuda.get_device_capability(self._device) != _HOPPER:
            return False
        return _library() is not None

    def add(
        self, residual: Tensor, rows: Tensor, row_scales: Tensor, weight: Tensor, weight_scales: Tensor
    ) -> Tensor | None:
        """residual += (rows @ weight.T) * row_scales * weight_scales.T, which is summed in 32 bits (ADR 30) and rounded
        before it is added, as torch's product would be.

        residual bf16[rows, outputs], rows f8[rows, inputs], weight f8[outputs, inputs], all contiguous; the scales
        f32[rows, 1] and f32[outputs, 1]. None: the library cannot, and nothing was done.
        """
        if not self.is_there:
            return None
        tensors = residual, rows, row_scales, weight, weight_scales
        is_suited = residual.dtype is torch.bfloat16 and not any(size % _ALIGNED for size in weight.shape)
        is_aligned = all(each.is_contiguous() and each.data_ptr() % _ALIGNMENT == 0 for each in tensors)
        if not is_suited or not is_aligned:
            return None
        algorithm = self._find(len(rows), *weight.shape)
        if algorithm is None:
            return None
        self._calls.multiply(algorithm, residual, rows, row_scales, weight, weight_scales)
        return residual

    @cached_property
    def _calls(self) -> "_Calls":
        library = _library()
        assert library is not None
        return _Calls(library, self._device)

    def _find(self, rows: int, outputs: int, inputs: int) -> _Algorithm | None:
        key = rows, outputs, inputs
        if key not in self._algorithms:
            if len(self._algorithms) == _MOST_SHAPES:
                self._algorithms.clear()
            self._algorithms[key] = self._calls.choose(rows, outputs, inputs)
        return self._algorithms[key]


class _Calls:
    """The library's handle, and the description of products by it.

    It has columns one after the other: a weight [outputs, inputs] is its A, transposed, and rows are its B.
    """

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self._library = library
        self._device = device
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._handle, self._product, self._preference = c_void_p(), c_void_p(), c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        # Not when the process ends: what they belong to may have gone before them.
        weakref.finalize(self, library.cublasLtDestroy, self._handle).atexit = False
        self._call("cublasLtMatmulDescCreate", byref(self._product), c_int(_COMPUTE_32F), c_int(_R_32F))
        weakref.finalize(self, library.cublasLtMatmulDescDestroy, self._product).atexit = False
        self._call("cublasLtMatmulPreferenceCreate", byref(self._preference))
        weakref.finalize(self, library.cublasLtMatmulPreferenceDestroy, self._preference).atexit = False
        self._describe(_DESC_TRANSA, c_int(_OP_T))
        self._describe(_DESC_FAST_ACCUM, c_int8(0))
        self._describe(_DESC_A_SCALE_MODE, c_int(_SCALE_OUTER_VEC_32F))
        self._describe(_DESC_B_SCALE_MODE, c_int(_SCALE_OUTER_VEC_32F))
        most = c_size_t(_WORKSPACE_BYTES)
        arguments = self._preference, c_int(_PREF_MAX_WORKSPACE_BYTES), byref(most), c_size_t(ctypes.sizeof(most))
        self._call("cublasLtMatmulPreferenceSetAttribute", *arguments)

    def choose(self, rows: int, outputs: int, inputs: int) -> _Algorithm | None:
        """The library's own choice; None: it has none."""
        for scale in (_DESC_A_SCALE_POINTER, _DESC_B_SCALE_POINTER):
            self._describe(scale, c_void_p(self._workspace.data_ptr()))  # only its alignment counts
        found, num_found = _Heuristic(), c_int()
        with _Layouts(self._library, rows, outputs, inputs) as (a, b, c):
            arguments = self._handle, self._product, a, b, c, c, self._preference, c_int(1)
            status = self._library.cublasLtMatmulAlgoGetHeuristic(*arguments, byref(found), byref(num_found))
        if status == _STATUS_NOT_SUPPORTED:
            return None
        _check("cublasLtMatmulAlgoGetHeuristic", status)
        return found.algo if num_found.value and found.state == _STATUS_SUCCESS else None

    def multiply(
        self,
        algorithm: _Algorithm,
        residual: Tensor,
        rows: Tensor,
        row_scales: Tensor,
        weight: Tensor,
        weight_scales: Tensor,
    ) -> None:
        """Launch the product, in place of `residual`; shapes are those of `Fp8Sums.add`."""
        self._describe(_DESC_A_SCALE_POINTER, _pointer(weight_scales))
        self._describe(_DESC_B_SCALE_POINTER, _pointer(row_scales))
        with _Layouts(self._library, len(rows), *weight.shape) as (a, b, c):
            self._call(
                "cublasLtMatmul",
                self._handle,
                self._product,
                byref(_ONE),
                _pointer(weight),
                a,
                _pointer(rows),
                b,
                byref(_ONE),
                _pointer(residual),
                c,
                _pointer(residual),
                c,
                byref(algorithm),
                _pointer(self._workspace),
                c_size_t(_WORKSPACE_BYTES),
                c_void_p(torch.cuda.current_stream(self._device).cuda_stream),
            )

    def _describe(self, attribute: int, value: "ctypes._SimpleCData[int] | c_void_p") -> None:
        arguments = self._product, c_int(attribute), byref(value), c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulDescSetAttribute", *arguments)

    def _call(self, name: str, *arguments: object) -> None:
        _check(name, getattr(self._library, name)(*arguments))


class _Layouts:
    """Of A, B and C; gone when the context is left."""

    def __init__(self, library: ctypes.CDLL, rows: int, outputs: int, inputs: int) -> None:
        self._library = library
        # Of each: its type, its height, its width, and the distance of its columns.
        shapes = (_R_8F_E4M3, inputs, outputs), (_R_8F_E4M3, inputs, rows), (_R_16BF, outputs, rows)
        self._layouts: list[c_void_p] = []
        for dtype, height, width in shapes:
            layout = c_void_p()
            arguments = c_int(dtype), c_uint64(height), c_uint64(width), c_int64(height)
            _check("cublasLtMatrixLayoutCreate", library.cublasLtMatrixLayoutCreate(byref(layout), *arguments))
            self._layouts.append(layout)

    def __enter__(self) -> list[c_void_p]:
        return self._layouts

    def __exit__(self, *_: object) -> None:
        for layout in self._layouts:
            self._library.cublasLtMatrixLayoutDestroy(layout)


def _pointer(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


def _check(name: str, status: int) -> None:
    if status != _STATUS_SUCCESS:
        raise RuntimeError(f"{name} of cuBLASLt failed with status {status}")
