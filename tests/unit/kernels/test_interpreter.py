"""What tests of kernels rely on in Triton's interpreter, parts of which `conftest` replaces."""

import pytest
import torch
import triton
import triton.language as tl
from kernel_inputs import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="of the interpreter")


@triton.jit
def _compute(x, y, kind: tl.constexpr):
    values = tl.load(x + tl.arange(0, 2))
    if kind == "add":
        values = values + values
    elif kind == "sub":
        values = 1 - values
    else:
        values = values * values
    tl.store(y + tl.arange(0, 2), values)


@pytest.mark.parametrize(
    ("kind", "fits", "is_too_large"), [("add", 2**30 - 1, 2**30), ("sub", 2 - 2**31, 1 - 2**31), ("mul", 46340, 46341)]
)
def test_integers_that_overflow_are_an_error(kind: str, fits: int, is_too_large: int) -> None:
    found = torch.empty(2, dtype=torch.int32)
    _compute[(1,)](torch.tensor([3, fits], dtype=torch.int32), found, kind)
    wanted = {"add": lambda x: x + x, "sub": lambda x: 1 - x, "mul": lambda x: x * x}[kind]
    assert found.tolist() == [wanted(3), wanted(fits)]
    with pytest.raises(Exception, match=f"int32 overflow detected for operation {kind}"):
        _compute[(1,)](torch.tensor([3, is_too_large], dtype=torch.int32), found, kind)
    _compute[(1,)](torch.tensor([3, is_too_large]), torch.empty(2, dtype=torch.int64), kind)
