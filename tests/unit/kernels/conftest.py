import inspect
import os
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
    _round_to_eight_bits()
