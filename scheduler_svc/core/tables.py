"""The block tables of sequences, one for each kind of layers that their worker has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from contract.domain.kv_kinds import KVKind
from scheduler_svc.core.blocks import BlockManager, hashes_of_kind


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks of one kind, in the order of their tokens."""

    first: int = 0  # blocks that stood before these and are given up: no token to come sees them
    blocks: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Index after the last."""
        return self.first + len(self.blocks)

    def part(self, first: int, end: int) -> "BlockTable":
        """The blocks from index `first` on, before index `end`; none of them is given up."""
        return BlockTable(first, self.blocks[first - self.first : end - self.first])


_ANY = 2**31 - 1  # tokens

Tables: TypeAlias = tuple[BlockTable, ...]  # by kind; empty: a sequence that does not run, or none is kept


@dataclass(frozen=True, slots=True)
class Reused:
    """KV of a sequence's first tokens that is on the worker already."""

    num_tokens: int  # that need not be computed
    tables: Tables  # full blocks to be shared
    copy_sources: tuple[int | None, ...]  # by kind: a block to copy after the shared ones
    state: int | None = None  # where layers keep one: the index of that of these tokens; None: there are none
    num_found: int = 0  # where layers keep a state: tokens whose blocks were found, of which it may stand for fewer

    @property
    def blocks(self) -> list[int]:
        """Those to be shared, of all kinds."""
        return held_blocks(self.tables)


def held_blocks(tables: Tables) -> list[int]:
    """The blocks of all kinds."""
    return [block for table in tables for block in table.blocks]


@dataclass(frozen=True, slots=True)
class TableRules:
    """The blocks that sequences need of each kind, and those that they need no longer."""

    kinds: tuple[KVKind, ...]
    longest_step: int  # tokens from a sequence's first that is not computed to its last that is planned, at most

    @property
    def give_up(self) -> bool:
        """Return whether blocks are given up before their sequence ends."""
        return any(not kind.sees_all for kind in self.kinds)

    def nothing_reused(self) -> Reused:
        """Of a sequence all of which is to be computed."""
        return Reused(0, tuple(BlockTable() for _ in self.kinds), (None,) * len(self.kinds))

    def shared(self, tables: Tables, num_tokens: int) -> Reused | None:
        """The first tokens of another sequence's tables; None: it has given up some of what the next token sees.

        The block that the next token is written in is copied: nobody writes into a shared block.
        """
        found, sources = list[BlockTable](), list[int | None]()
        for kind, table in zip(self.kinds, tables, strict=True):
            whole, rest = divmod(num_tokens, kind.block_size)
            first = kind.first_seen(num_tokens)
            if first < table.first:
                return None
            found.append(table.part(first, whole))
            sources.append(table.blocks[whole - table.first] if rest else None)
        return Reused(num_tokens, tuple(found), tuple(sources))

    def num_new(self, num_tokens: int, reused: Reused) -> int:
        """Blocks that a sequence of so many tokens is to be given for a slot."""
        ends = zip(self.kinds, reused.tables, strict=True)
        return sum(self._end(kind, table.first, num_tokens) - table.end for kind, table in ends)

    def make(self, num_tokens: int, reused: Reused, blocks: BlockManager) -> Tables:
        """The tables of a sequence that gets a slot, `num_new` blocks of which are taken."""
        blocks.share(reused.blocks)
        made = []
        for kind, table in zip(self.kinds, reused.tables, strict=True):
            new = blocks.allocate(self._end(kind, table.first, num_tokens) - table.end)
            made.append(BlockTable(table.first, table.blocks + new))
        return tuple(made)

    def _end(self, kind: KVKind, first: int, num_tokens: int) -> int:
        """Index after the last block that a sequence has whose first `num_tokens` tokens are to be computed. It then
        has all that a step may need, and so needs none when another has taken those that it gives up."""
        return min(kind.num_blocks(num_tokens), first + kind.most_blocks(num_tokens, self.longest_step))

    def room(self, tables: Tables) -> int:
        """Tokens for which there are blocks of all kinds; without kinds there is room for any."""
        rooms = (kind.block_size * table.end for kind, table in zip(self.kinds, tables, strict=True))
        return min(rooms, default=_ANY)

    def lacking(self, tables: Tables, position: int) -> Iterator[int]:
        """The kinds that lack a block for the token at `position`, up to which there are all."""
        for index, kind in enumerate(self.kinds):
            if tables[index].end * kind.block_size <= position:
                yield index

    def lacking_ahead(self, tables: Tables, num_tokens: int) -> Iterator[int]:
        """The kinds, as often as they lack blocks for a sequence whose first `num_tokens` tokens are not all computed:
        as many as it has given up."""
        for index, kind in enumerate(self.kinds):
            table = tables[index]
            yield from [index] * (self._end(kind, table.first, num_tokens) - table.end)

    def take_unseen(self, tables: Tables, position: int) -> list[list[int]]:
        """Take out of the tables, by kind, the blocks that neither the token at `position` nor any after it sees."""
        return [_take(table, kind.first_seen(position)) for kind, table in zip(self.kinds, tables, strict=True)]

    def unseen_from(self, tables: Tables) -> int:
        """The position from which on `take_unseen` finds more, of rules that give blocks up."""
        positions = [kind.unseen_from(table.first) for kind, table in zip(self.kinds, tables, strict=True)]
        return min(position for position in positions if position is not None)

    @property
    def largest_block(self) -> int:
        """Tokens of a block, of the kind whose blocks have the most."""
        return max(kind.block_size for kind in self.kinds)

    def factors(self, block_size: int) -> list[int]:
        """By kind, the number of blocks of `block_size` tokens, the smallest of any kind, that are as long as one."""
        return [kind.block_size // block_size for kind in self.kinds]

    def find(self, blocks: BlockManager, hashes: Sequence[bytes], block_size: int) -> Reused:
        """The longest known prefix of which every kind has all that the next token sees; nothing is held by asking.

        `hashes`: of full blocks of `block_size` tokens, the smallest of any kind.
        """
        prefixes = [hashes_of_kind(hashes, *each) for each in enumerate(self.factors(block_size))]
        num_tokens = len(hashes) * block_size
        for kind, prefix in zip(self.kinds, prefixes, strict=True):
            if kind.sees_all:
                num_tokens = min(num_tokens, len(blocks.find(prefix)) * kind.block_size)
        num_tokens = self._agreed(blocks, prefixes, num_tokens)
        tables = []
        for kind, prefix in zip(self.kinds, prefixes, strict=True):
            first, end = kind.first_seen(num_tokens), num_tokens // kind.block_size
            tables.append(BlockTable(first, [blocks.found[prefix[index]] for index in range(first, end)]))
        return Reused(num_tokens, tuple(tables), (None,) * len(tables))

    def _agreed(self, blocks: BlockManager, prefixes: Sequence[Sequence[bytes]], num_tokens: int) -> int:
        """The most tokens, up to `num_tokens` that kinds which see all have, after which no other lacks a block."""
        step = self.largest_block
        pairs = [pair for pair in zip(self.kinds, prefixes, strict=True) if not pair[0].sees_all]
        checked = -1
        while checked != (num_tokens := num_tokens // step * step):
            checked = num_tokens
            for kind, prefix in pairs:
                num_tokens = min(num_tokens, _end_of_hole(kind, prefix, blocks, checked))
        return num_tokens


def _end_of_hole(kind: KVKind, prefix: Sequence[bytes], blocks: BlockManager, num_tokens: int) -> int:
    """`num_tokens` if all is known that the token after so many sees, else those before the last block that is not."""
    for index in reversed(range(kind.first_seen(num_tokens), num_tokens // kind.block_size)):
        if prefix[index] not in blocks.found:
            return index * kind.block_size
    return num_tokens


def _take(table: BlockTable, first: int) -> list[int]:
    count = first - table.first
    if count <= 0:
        return []
    taken = table.blocks[:count]
    del table.blocks[:count]
    table.first = first
    return taken
