"""For which batch sizes graphs are made."""

import pytest

from worker_svc.core.graphs import batch_sizes


@pytest.mark.parametrize("most", [1, 2, 3, 40, 64, 65, 96, 97, 200, 256, 300, 1024])
def test_sizes_rise_to_the_most_and_waste_little(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    for batch in range(1, most + 1):
        size = next(each for each in sizes if each >= batch)
        assert size - batch < max(batch, 2) if batch < 16 else size - batch < (16 if batch <= 256 else 32)
