"""Columns of packed little-endian values."""

from collections.abc import Iterable

import numpy as np


def u32(values: Iterable[int]) -> bytes:
    """u32 per value."""
    return np.fromiter(values, "<u4").tobytes()
