"""Columns of chunks: what tiles and contexts they name, what a step of latent attention chooses, that a graph's columns
have room for it.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from worker_svc.core.attention.chunk_work import LatentForm, Room, SpanForm, TileForm
from worker_svc.core.batch import Batch
from worker_svc.core.kernels.attention.latent_shape import LatentShape

V2 = LatentShape(plain=128, values=128, rank=512, rotated=64, is_paired=True)


def batch_of(queries: list[int], contexts: list[int]) -> Batch:
    """Sequences in slots from 10 on."""
    nothing = np.empty(0, np.int64)
    starts = np.cumsum([0, *queries])
    return Batch(10 + np.arange(len(queries)), np.array(queries), starts, np.array(contexts), nothing, nothing)


def is_expanded(queries: list[int], contexts: list[int], room: int | None = None, shape: LatentShape = V2) -> bool:
    form = LatentForm(shape, Room(room or sum(queries), 0, 0))
    columns = form.columns(batch_of(queries, contexts), 0)
    return len(columns) > 4 and len(columns[4]) > 0


@pytest.mark.parametrize(
    ("queries", "contexts", "expected"),
    [
        ([2048], [2048], True),
        ([256], [256], True),
        ([255], [255], False),  # so few do not pay for launches
        ([400], [8000], True),  # a pair costs 768 multiplications less, a token before the chunk 131,072 more
        ([160], [8000], False),
        ([300], [100_000], False),  # of more than 16,384 tokens there is no room
        ([4096, 4096], [16_000, 16_000], True),
        ([4096, 4096], [16_000, 17_000], False),  # of four times the step's there is
        ([150, 2048], [8000, 2048], True),  # all together gain
    ],
)
def test_contexts_are_brought_to_heads_where_that_is_less_arithmetic_and_there_is_room(
    queries: list[int], contexts: list[int], *, expected: bool
) -> None:
    assert is_expanded(queries, contexts) is expected


def test_latents_of_few_dimensions_are_always_met() -> None:
    assert not is_expanded([2048], [2048], shape=LatentShape(128, 128, 128, 64, is_paired=True))


def test_columns_name_each_token_and_each_place_of_a_context_once() -> None:
    """Two decodes stand first."""
    batch = batch_of([1, 1, 300, 5], [9, 9, 340, 5])
    columns = LatentForm(V2, Room(305, 0, 0)).columns(batch, 2)
    rows, positions, lengths, places = columns[4:8]
    assert [len(column) for column in columns[:4]] == [0] * 4
    assert list(zip(rows, positions, lengths, places, strict=True)) == [
        (258, 296, 44, 0),
        (130, 168, 128, 0),
        (2, 40, 128, 0),
        (302, 0, 5, 340),
    ]
    assert list(zip(*columns[8:12], strict=True)) == [
        (0, 128, 12, 0),
        (128, 128, 12, 128),
        (256, 84, 12, 256),
        (0, 5, 13, 340),
    ]
    assert columns[12].tolist() == [2]


lengths = st.lists(st.integers(2, 700), min_size=1, max_size=16)


@given(lengths, st.lists(st.integers(0, 3000), min_size=16, max_size=16))
def test_a_graph_has_room_for_the_columns_of_any_step(queries: list[int], before: list[int]) -> None:
    contexts = [query + past for query, past in zip(queries, before, strict=False)]
    tokens = -(-sum(queries) // 64) * 64 + 100
    pads = [*[64] * ((tokens - sum(queries)) // 64), (tokens - sum(queries)) % 64]
    pads = [pad for pad in pads if pad]
    room = Room(tokens, tokens, 4096, chunks=16, pads=-(-tokens // 64))
    batch = batch_of([*queries, *pads], [*contexts, *pads])
    for form in (TileForm(room), SpanForm(room), LatentForm(V2, room)):
        columns = form.columns(batch, 0)
        assert len(columns) == len(form.lengths()) == len(form.rests(columns))
        assert all(len(column) <= length for column, length in zip(columns, form.lengths(), strict=True))
