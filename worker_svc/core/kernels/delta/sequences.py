"""The sequences of a step, whose rows follow each other."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """All of a step, those included that pad it: of a slot that is nobody's, or without a row. All i64[seqs]."""

    slots: Tensor
    contexts: Tensor  # tokens that are taken in once the step is done
    ends: Tensor  # where each one's tokens end among the rows


@triton.jit
def begin(slots_ptr, contexts_ptr, ends_ptr, seq):
    """Of a sequence its slot, first row, number of rows, and the position of its first token."""
    end = tl.load(ends_ptr + seq)
    start = tl.load(ends_ptr + seq - 1, mask=seq > 0, other=0)
    slot = tl.load(slots_ptr + seq)
    return slot, start, end - start, tl.load(contexts_ptr + seq) - (end - start)
