"""The places of layers' keys and values in blocks that are of equal bytes for all kinds of layers.

A block is cut into rows and these into pages, each of which holds `block_size` tokens of one layer. Of the kind with
the fewest layers a block holds the most tokens: each of its layers has a row of its own. Layers of other kinds share
rows. So whatever the kind, a layer is a row from one of its pages on, and a block is the same run of pages in each.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from contract.domain.kv_kinds import KVKind


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The place of one layer."""

    kind: int  # index among the kinds
    row: int
    page: int  # of each block's in the row, the first of this layer


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The cut of a block."""

    kinds: tuple[KVKind, ...]
    num_rows: int
    num_pages: int  # of a row
    layers: tuple[LayerPlace, ...]


def plan_layout(windows: Sequence[int | None], block_size: int) -> KVLayout:
    """The layout for layers of which each sees so many tokens, itself included, or all (None).

    `block_size`: tokens of a block of the kind with the most layers.
    """
    counts = Counter(windows)
    order = sorted(counts, key=lambda window: (window is not None, window or 0))
    num_rows = min(
        (rows for rows in range(min(counts.values()), max(counts.values()) + 1) if _nests(counts, rows)),
        key=lambda rows: _most_wasted(counts, rows),
    )
    shares = {window: _share(counts[window], num_rows) for window in order}
    num_pages = max(shares.values())
    kinds = tuple(KVKind(block_size * num_pages // shares[window], window) for window in order)
    seen = Counter[int | None]()
    layers = []
    for window in windows:
        row, share = divmod(seen[window], shares[window])
        layers.append(LayerPlace(order.index(window), row, share * num_pages // shares[window]))
        seen[window] += 1
    return KVLayout(kinds, num_rows, num_pages, tuple(layers))


def _share(num_layers: int, num_rows: int) -> int:
    """Layers of a kind that share a row."""
    return -(-num_layers // num_rows)


def _nests(counts: Counter[int | None], num_rows: int) -> bool:
    """Return whether blocks of any two kinds are such that one holds a multiple of the other's tokens."""
    shares = sorted({_share(count, num_rows) for count in counts.values()})
    return all(not larger % smaller for smaller, larger in pairwise(shares))


def _most_wasted(counts: Counter[int | None], num_rows: int) -> float:
    """The largest ratio of what a kind's blocks could hold to what they do."""
    return max(_share(count, num_rows) * num_rows / count for count in counts.values())
