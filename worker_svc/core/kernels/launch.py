"""The launch of kernels: programmatic dependent launch where the device has it, and Triton's interpreter."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
_FIRST_WITH_DEPENDENT_LAUNCH = (9, 0)  # Hopper
_HOPPER_SHARED_BYTES = 227 * 1024
_RESERVED_BYTES = 1024  # of a multiprocessor's shared memory, for each program


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Return whether a kernel may be on the multiprocessors before the one ahead of it has ended."""
    return (
        device.type == "cuda"
        and not INTERPRETED
        and torch.cuda.get_device_capability(device) >= _FIRST_WITH_DEPENDENT_LAUNCH
    )


@cache
def multiprocessors(device: torch.device, shared_memory: int) -> int:
    """The number of programs with so many bytes of shared memory that run at once, each on its own: 0 where there is
    less. The interpreter runs one after the other.
    """
    if device.type != "cuda" or INTERPRETED:
        return 1
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.shared_memory_per_multiprocessor >= shared_memory else 0


@cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program can have; where none is launched, those of a Hopper."""
    if device.type != "cuda" or INTERPRETED:
        return _HOPPER_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - _RESERVED_BYTES


def options(*, warps: int = 4, dependent: bool = False, registers: int | None = None) -> dict[str, Any]:
    """Launch options of a kernel with `warps` warps a program and at most `registers` a thread; the interpreter takes
    none.
    """
    if INTERPRETED:
        return {}
    return {"num_warps": warps, "launch_pdl": dependent, "maxnreg": registers}


def power_of_two_divisor(value: int, limit: int) -> int:
    """The largest power of two that divides `value` and is at most `limit`, itself a power of two."""
    return min(value & -value, limit)


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Wait until all that the kernels before wrote can be read. Every program of a dependent kernel that reads or
    writes what others do must call it, or it would not be ordered after the kernels before the last.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """Let the next kernel start; called after `wait`, so that it finds all but this kernel's output.

    Some sums by `linear/row_stream.py` let it start before their own `wait`, and `finish_heads` always does: what is
    launched after them reads nothing of this step before it waits, but weights, norms, scales and what the step began
    with. Two such sums must not follow each other, nor one and the second product of `experts/float_rows.py` or
    `experts/word_rows.py`, which read what was chosen before they wait.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
