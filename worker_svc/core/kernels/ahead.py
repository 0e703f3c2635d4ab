"""Weights that are on their way before a kernel may begin."""

import triton
import triton.language as tl

from worker_svc.core.kernels.launch import INTERPRETED

_ASM = tl.constexpr(not INTERPRETED)


@triton.jit
def ask(pointers, BYTES: tl.constexpr):
    """Let so many bytes from each pointer on, a multiple of 16, come to the second-level cache; for Hopper. What the
    kernels ahead write must not be asked for before they have ended.
    """
    if _ASM:
        tl.inline_asm_elementwise(
            f"cp.async.bulk.prefetch.L2.global [$1], {BYTES}; mov.u32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
