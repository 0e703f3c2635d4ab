"""The places of layers' keys and values in blocks that are of equal bytes for all kinds of layers.

A block is cut into rows and these into pages, each of which holds `block_size` tokens of one layer. Of the kind with
the fewest layers a block holds the most tokens: each of its layers has a row of its own. Layers of other kinds share
rows. So whatever the kind, a layer is a row from one of its pages on, and a block is the same run of pages in each.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from contract.domain.kv_kinds import KVKind, Reach


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


def plan_layout(reaches: Sequence[Reach], block_size: int) -> KVLayout:
    """The layout for layers that see so much.

    `block_size`: tokens of a block of the kind with the most layers.
    """
    counts = Counter(reaches)
    order = sorted(counts, key=lambda reach: (reach.chunk or 0, reach.window or 0))
    num_rows = min(
        (rows for rows in range(min(counts.values()), max(counts.values()) + 1) if _nests(counts, rows)),
        key=lambda rows: _most_wasted(counts, rows),
    )
    shares = {reach: _share(counts[reach], num_rows) for reach in order}
    num_pages = max(shares.values())
    kinds = tuple(KVKind(block_size * num_pages // shares[reach], reach) for reach in order)
    seen = Counter[Reach]()
    layers = []
    for reach in reaches:
        row, share = divmod(seen[reach], shares[reach])
        layers.append(LayerPlace(order.index(reach), row, share * num_pages // shares[reach]))
        seen[reach] += 1
    return KVLayout(kinds, num_rows, num_pages, tuple(layers))


def _share(num_layers: int, num_rows: int) -> int:
    """Layers of a kind that share a row."""
    return -(-num_layers // num_rows)


def _nests(counts: Counter[Reach], num_rows: int) -> bool:
    """Return whether blocks of any two kinds are such that one holds a multiple of the other's tokens."""
    shares = sorted({_share(count, num_rows) for count in counts.values()})
    return all(not larger % smaller for smaller, larger in pairwise(shares))


def _most_wasted(counts: Counter[Reach], num_rows: int) -> float:
    """The largest ratio of what a kind's blocks could hold to what they do."""
    return max(_share(count, num_rows) * num_rows / count for count in counts.values())
