import inspect
import os
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")


def _look_once() -> None:
    """Lets Triton's interpreter look its language's functions and the dtypes of arrays up once.

    It does so at each launch, at each call between kernels' functions and at each operation, which is more than half of
    the time of these tests.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    names: dict[object, list[str]] = {}

    def patch(package: object, builder: object, scope: object) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        members = [getattr(package, name) for name in names[package]]
        if members and not tl.core.is_builtin(members[0]):
            return  # all of them are replaced already, by who called
        for name, member in zip(names[package], members, strict=True):
            interpreter._patch_attr(package, name, member, builder, scope)

    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):  # as in 3.6 and 3.7
        interpreter._patch_builtin = patch

    packages: dict[object, list[object]] = {}
    patch_lang = getattr(interpreter, "_patch_lang", None)

    def patch_lang_once(function: object) -> object:
        if function not in packages:
            packages[function] = [each for each in (tl, tl.core) if each in function.__globals__.values()]
        # The functions of a package are replaced together, and with them a tensor's.
        if not any(tl.core.is_builtin(each.load) for each in packages[function]) and not tl.core.is_builtin(
            tl.tensor.__add__
        ):
            return interpreter._LangPatchScope()
        return patch_lang(function)

    if patch_lang is not None and hasattr(interpreter, "_LangPatchScope"):  # as in 3.6 and 3.7
        interpreter._patch_lang = patch_lang_once

    arrays: dict[str, object] = {}
    look_up = getattr(interpreter, "_get_np_dtype", None)

    def dtype_of_array(dtype: object) -> object:
        name = "pointer" if dtype.scalar.is_ptr() else dtype.scalar.name
        if name not in arrays:
            arrays[name] = look_up(dtype)
        return arrays[name]

    if look_up is not None:
        interpreter._get_np_dtype = dtype_of_array


def _make_types_once() -> None:
    """Lets Triton's interpreter check and name a type, and wrap a shape, once for all operations with the like, and not
    at each.
    """
    import triton.language as tl

    types: dict[object, tuple[Any, ...]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, ...]] = {}
    make_type, make_tensor = tl.core.block_type.__init__, tl.core.tensor.__init__

    def make_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types[key]

    def make_tensor_once(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    tl.core.block_type.__init__ = make_type_once
    tl.core.tensor.__init__ = make_tensor_once


def _check_overflow_at_once() -> None:
    """Lets Triton's interpreter look by NumPy, and not by six operations of its own, whether a sum, a difference or a
    product of integers is one of the same type.
    """
    import numpy as np
    from triton.language.semantic import TritonSemantic

    def check(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        kind = lhs.type.scalar
        if kind.int_bitwidth >= 64:
            return
        exact = getattr(np, _OPERATIONS[operation.__name__])(lhs.handle.data, rhs.handle.data, dtype=np.int64)
        is_right = (exact >= kind.get_int_min_value()).all() and (exact <= kind.get_int_max_value()).all()
        assert is_right, f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"

    assert hasattr(TritonSemantic, "binary_op_sanitize_overflow_impl")
    TritonSemantic.binary_op_sanitize_overflow_impl = check


_OPERATIONS = {"add": "add", "sub": "subtract", "mul": "multiply"}


def _round_to_eight_bits() -> None:
    """Lets Triton's interpreter convert to and from 8-bit floats as devices do: its own way loses what is carried when
    it rounds, and makes numbers of NaN.
    """
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_as_devices(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.float8e4nv):
            exact = torch.from_numpy(values.view("float32"))
            return exact.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        converted = convert(values, source, target, rounding)
        if source == tl.float8e4nv:
            converted[(values.view("uint8") & 0x7F) == 0x7F] = ~converted.dtype.type(0)  # all bits: NaN
        return converted

    interpreter._convert_float = convert_as_devices


if os.environ.get("TRITON_INTERPRET") == "1":
    _look_once()
    _make_types_once()
    _check_overflow_at_once()
    _round_to_eight_bits()


@pytest.fixture
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a program of experts' rows do many outputs: in the interpreter it takes as long however few it does. Tests
    of its kernels have the tiles of cards.
    """
    from worker_svc.core.kernels.experts import tuning

    for tiles in (tuning.GATE_ROWS, tuning.ADD_ROWS):
        for form, tile in tiles.items():
            monkeypatch.setitem(tiles, form, replace(tile, outputs=32))
