"""The shards of the log in which requests for each worker are opened."""

from collections import Counter
from collections.abc import Iterable, Mapping


def home_shards(workers: Iterable[str], holders: Mapping[int, bytes], num_shards: int) -> dict[str, int]:
    """Give each worker a shard of its own, and one of a detokenizer of its own, as long as there are others.

    All schedulers find the same of the same pool. Where one knows less for a moment, the detokenizers have unequal
    shares of the work, and nothing else differs.

    Args:
        workers: all that live in the pool, by name.
        holders: the detokenizers that lease shards, by shard.
        num_shards: of the pool.
    """
    num_held: Counter[bytes | None] = Counter()
    order: list[tuple[int, int]] = []  # the first shard of each detokenizer, then the second of each
    for shard in range(num_shards):
        holder = holders.get(shard)
        order.append((num_held[holder], shard))
        num_held[holder] += 1
    shards = [shard for _, shard in sorted(order)]
    return {worker: shards[number % num_shards] for number, worker in enumerate(sorted(workers))}
