import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.blocks import BlockManager, extend_hashes, root_hash


def hashes(tokens: list[int], block_size: int = 2, salt: str = "", tenant: str = "") -> list[bytes]:
    made: list[bytes] = []
    extend_hashes(made, root_hash(tenant, salt), np.array(tokens, np.uint32), block_size)
    return made


def test_freed_content_is_forgotten_least_recently_used_first_and_a_table_from_its_end() -> None:
    blocks = BlockManager(4)
    first, second = blocks.allocate(2), blocks.allocate(2)
    for table, tokens in ((first, [1, 2, 3, 4]), (second, [5, 6, 7, 8])):
        for block, block_hash in zip(table, hashes(tokens), strict=True):
            blocks.register(block, block_hash)
    blocks.free(second)
    blocks.free(first)
    assert blocks.num_free == blocks.num_cached == 4
    assert [blocks.allocate(1)[0] for _ in range(4)] == [second[1], second[0], first[1], first[0]]
    assert blocks.num_cached == 0
    assert not blocks.found


def test_blocks_without_content_are_handed_out_before_those_with() -> None:
    blocks = BlockManager(3)
    cached, plain = blocks.allocate(1), blocks.allocate(1)
    blocks.register(cached[0], hashes([1, 2])[0])
    blocks.free(cached)
    blocks.free(plain)
    assert cached[0] not in blocks.allocate(2)
    assert blocks.find(hashes([1, 2])) == cached


def test_a_found_block_is_taken_out_of_the_free_ones_and_held_once_by_each() -> None:
    blocks = BlockManager(2)
    table = blocks.allocate(1)
    blocks.register(table[0], hashes([1, 2])[0])
    blocks.free(table)
    assert blocks.num_idle(table) == 1
    blocks.share(table)
    blocks.share(table)
    assert (blocks.num_free, blocks.num_idle(table)) == (1, 0)
    blocks.free(table)
    assert blocks.num_free == 1
    blocks.free(table)
    assert blocks.num_free == 2


def test_a_prefix_is_found_up_to_its_first_unknown_block() -> None:
    blocks = BlockManager(3)
    table = blocks.allocate(3)
    known = hashes([1, 2, 3, 4, 5, 6])
    blocks.register(table[0], known[0])
    blocks.register(table[2], known[2])
    assert blocks.find(known) == [table[0]]


def test_the_first_block_with_a_content_stays_the_one_that_is_found() -> None:
    blocks = BlockManager(2)
    one, two = blocks.allocate(2)
    block_hash = hashes([1, 2])[0]
    blocks.register(one, block_hash)
    blocks.register(two, block_hash)
    blocks.free([two])
    assert blocks.num_cached == 0
    assert blocks.find([block_hash]) == [one]


def test_a_block_that_is_held_is_found_in_place_of_a_free_one() -> None:
    blocks = BlockManager(3)
    one, two = blocks.allocate(2)
    block_hash = hashes([1, 2])[0]
    blocks.register(one, block_hash)
    blocks.free([one])
    blocks.register(two, block_hash)
    assert blocks.find([block_hash]) == [two]
    assert (blocks.num_cached, blocks.num_free) == (0, 2)
    assert not any(blocks.map.shares().cached)
    assert sorted(blocks.allocate(2)) == sorted({0, 1, 2} - {two})


def test_a_hash_stands_for_the_whole_prefix_and_the_salt() -> None:
    assert hashes([1, 2, 3, 4])[1] != hashes([9, 2, 3, 4])[1]
    assert hashes([1, 2], salt="a") != hashes([1, 2], salt="b")


def test_tenants_and_salts_never_make_the_same_root() -> None:
    pairs = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("a", "b"), ("b", "a")]
    assert len({root_hash(tenant, salt) for tenant, salt in pairs}) == len(pairs)
    assert hashes([1, 2, 3]) == hashes([1, 2])


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 5), st.data())
def test_hashes_do_not_depend_on_how_the_tokens_came(tokens: list[int], block_size: int, data: st.DataObject) -> None:
    grown: list[bytes] = []
    end = 0
    while end < len(tokens):
        end = data.draw(st.integers(end + 1, len(tokens)))
        extend_hashes(grown, root_hash("", ""), np.array(tokens[len(grown) * block_size : end], np.uint32), block_size)
    assert grown == hashes(tokens, block_size)
