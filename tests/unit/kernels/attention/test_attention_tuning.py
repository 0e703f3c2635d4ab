"""How attention is cut on the card that it was measured on."""

import pytest

from worker_svc.core.kernels.attention.tuning import ContextCut, find_cut, find_prefill_tile, query_rows


@pytest.mark.parametrize(
    ("sequences", "heads", "group", "cut"),
    [
        (1, 8, 2, ContextCut(33, 64, 64, 3, 2, None, ahead=1)),
        (1, 8, 4, ContextCut(16, 64, 64, 3, 8, None, ahead=2)),
        (8, 8, 4, ContextCut(4, 64, 64, 3, 2, None, ahead=1)),
        (16, 8, 2, ContextCut(2, 128, 128, 3, 4, None, ahead=0)),
        (16, 8, 4, ContextCut(2, 512, 64, 3, 4, None, ahead=2)),
        (32, 8, 2, ContextCut(1, 128, 128, 3, 4, None, ahead=1)),
        (64, 8, 2, ContextCut(2, 512, 32, 3, 2, None, ahead=2)),
        (65, 8, 2, ContextCut(1, 512, 32, 3, 2, None, ahead=2)),
        (191, 8, 2, ContextCut(1, 512, 32, 3, 2, None, ahead=2)),
        (192, 8, 2, ContextCut(1, 512, 32, 3, 2, 128, ahead=0)),
    ],
)
def test_few_programs_share_a_context_and_many_are_small(
    sequences: int, heads: int, group: int, cut: ContextCut
) -> None:
    assert find_cut(sequences, heads, group, 256) == cut


def test_one_sequence_is_cut_by_the_size_of_its_heads() -> None:
    assert find_cut(1, 4, 8, 256) == ContextCut(33, 128, 64, 3, 8, None, ahead=2)
    assert find_cut(1, 8, 8, 128) == ContextCut(33, 64, 64, 3, 2, None, ahead=1)
    assert find_cut(1, 4, 2, 512) == ContextCut(66, 32, 32, 3, 4, None, ahead=1)


def test_a_few_are_cut_by_the_size_of_their_heads_and_the_queries_of_a_key() -> None:
    assert find_cut(2, 4, 2, 512) == ContextCut(33, 32, 32, 3, 4, None, ahead=2)
    assert find_cut(8, 4, 8, 256) == ContextCut(8, 128, 128, 3, 4, None, ahead=1)
    assert find_cut(8, 4, 7, 256) == find_cut(8, 4, 8, 256)
    assert find_cut(8, 8, 8, 128) == ContextCut(4, 128, 128, 3, 4, None, ahead=1)
    assert find_cut(32, 4, 8, 256) == find_cut(16, 8, 4, 256)


def test_many_queries_of_a_key_are_groups_with_few_parts() -> None:
    assert find_cut(1, 2, 17, 256) == ContextCut(66, 512, 64, 3, 8, None, ahead=2, groups=2)
    assert find_cut(8, 2, 17, 256) == ContextCut(8, 512, 64, 3, 8, None, ahead=2, groups=2)
    assert find_cut(9, 2, 17, 256) == ContextCut(7, 256, 64, 3, 4, None, ahead=2, groups=2)
    assert find_cut(32, 2, 64, 256) == ContextCut(1, 256, 64, 3, 4, None, ahead=2, groups=4)
    assert find_cut(1, 1, 48, 256) == find_cut(1, 1, 33, 256) == ContextCut(88, 512, 64, 3, 8, None, ahead=2, groups=3)


def test_programs_enough_have_all_queries_of_a_key() -> None:
    assert find_cut(64, 2, 17, 256).groups == 2
    assert find_cut(65, 2, 17, 256) == ContextCut(2, 4096, 64, 3, 4, None, ahead=2)
    assert find_cut(33, 2, 64, 256) == ContextCut(4, 4096, 64, 3, 4, None, ahead=2)
    assert find_cut(128, 2, 17, 256) == ContextCut(1, 4096, 64, 3, 4, None, ahead=2)
    assert find_cut(256, 2, 32, 256) == ContextCut(1, 512, 64, 3, 2, None, ahead=0)
    assert find_cut(256, 2, 33, 256) == ContextCut(1, 512, 64, 3, 4, None, ahead=0)
    assert [query_rows(group) for group in (1, 16, 17, 32, 33, 64)] == [16, 16, 32, 32, 64, 64]


def test_tiles_have_as_many_tokens_as_fit() -> None:
    assert [find_cut(64, 8, 2, row_bytes).tokens for row_bytes in (128, 256, 512, 1024)] == [64, 32, 16, 16]
    assert find_cut(16, 8, 2, 128).tokens == 128


def test_few_programs_of_a_prompt_have_large_tiles_if_these_fit() -> None:
    tiles = [find_prefill_tile(*each) for each in ((132, 128), (133, 128), (132, 192), (1000, 64))]
    assert [(tile.keys, tile.warps) for tile in tiles] == [(128, 4), (64, 4), (64, 8), (64, 4)]
