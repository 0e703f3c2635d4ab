import inspect
import os

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")


def _look_once() -> None:
    """Lets Triton's interpreter look its language's functions up once.

    It does so at each launch and at each call between kernels' functions, which is half of the time of these tests.
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


if os.environ.get("TRITON_INTERPRET") == "1":
    _look_once()
