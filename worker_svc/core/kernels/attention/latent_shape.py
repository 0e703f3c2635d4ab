"""The sizes of latent attention."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Of each head, of its queries, keys and values, and of what they are made of."""

    plain: int  # dimensions of a query that are not rotated
    values: int
    rank: int  # of the latent that is key and value of all heads, beside rotated dimensions
    rotated: int
    is_paired: bool  # rotated dimensions that turn against each other stand side by side in queries and keys
