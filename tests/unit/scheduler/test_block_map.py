import pytest

from scheduler_svc.core.block_map import MAX_GROUPS
from scheduler_svc.core.blocks import BlockManager

CONTENT = b"0123456789abcdef"


def test_a_map_follows_a_block_from_empty_to_held_to_kept_and_back_to_held() -> None:
    blocks = BlockManager(4)
    [block] = blocks.allocate(1)
    assert list(blocks.map.shares().used) == [255 * (each == block) for each in range(4)]
    blocks.register(block, CONTENT)
    blocks.free([block])
    assert not any(blocks.map.shares().used)
    assert list(blocks.map.shares().cached) == [255 * (each == block) for each in range(4)]
    blocks.share([block])
    blocks.share([block])
    blocks.free([block])
    assert list(blocks.map.shares().used) == [255 * (each == block) for each in range(4)]
    assert not any(blocks.map.shares().cached)


def test_content_that_is_forgotten_is_not_kept() -> None:
    blocks = BlockManager(1)
    blocks.register(blocks.allocate(1)[0], CONTENT)
    blocks.free([0])
    blocks.allocate(1)
    blocks.free([0])
    shares = blocks.map.shares()
    assert (list(shares.used), list(shares.cached)) == ([0], [0])


@pytest.mark.parametrize("num_blocks", [1, MAX_GROUPS, MAX_GROUPS + 1, 30_001])
def test_however_many_blocks_there_are_the_map_is_small_and_full_is_full(num_blocks: int) -> None:
    blocks = BlockManager(num_blocks)
    held = blocks.allocate(num_blocks)
    shares = blocks.map.shares()
    assert len(shares.used) <= MAX_GROUPS
    assert (len(shares.used) - 1) * shares.group_size < num_blocks <= len(shares.used) * shares.group_size
    assert set(shares.used) == {255}
    blocks.free(held[1:])
    assert [share for share in blocks.map.shares().used if share] == [-(-255 // min(shares.group_size, num_blocks))]
