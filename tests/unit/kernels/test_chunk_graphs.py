"""Small steps in fixed columns: the reference's tokens, and nothing of anybody's is touched by what pads them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE, LINES
from latent_families import DEEPSEEK_V3, expand_short_steps
from plans import Drive, drive
from runner_configs import CONFIG, QWEN3_5, QWEN3_NEXT, changed
from test_flash_attention import always, reference  # noqa: F401  (a fixture)
from test_triton_runner import PLAIN, make_runner, sequences

from contract.domain.params import Sampling
from contract.domain.pooling import Pooling, PoolingKind
from worker_svc.compute import TorchCompute, TritonCompute
from worker_svc.core import chunk_graphs
from worker_svc.core.attention import chunk_work
from worker_svc.core.attention.triton_backend import TritonAttention
from worker_svc.core.batch import Batch
from worker_svc.core.chunk_graphs import ChunkGraphs, ChunkStep, Shape, make_shapes
from worker_svc.core.config import ModelConfig
from worker_svc.core.decode_step import StepDecoder
from worker_svc.core.device_decoding import DecodeOutput
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.attention import decode, latent
from worker_svc.core.kernels.attention.tuning import LatentCut, LatentTile, Shares
from worker_svc.core.runner import ModelRunner
from worker_svc.core.slots import I64

pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="exact in the interpreter only"),
    pytest.mark.usefixtures("large_tiles"),
]


class Unrecorded(StepDecoder):
    """Small steps as graphs would compute them, without a graph."""

    def __init__(self, runner: ModelRunner, *shapes: Shape) -> None:
        assert isinstance(runner._decoder, StepDecoder)
        super().__init__(runner._decoder._step)
        step = ChunkStep(runner._model, runner._attention, runner._slots, runner.limits)  # type: ignore[arg-type]
        self.chunks = ChunkGraphs(step, list(shapes))
        self.taken: list[Shape] = []

    def compute(self, batch: Batch, rows: I64) -> DecodeOutput | None:
        shape = self.chunks.shape_of(batch, len(rows))
        if shape is not None:
            self.taken.append(shape)
        return self.chunks.compute(batch, rows)


@pytest.mark.parametrize(
    ("config", "samplings"),
    [
        (CONFIG, PLAIN[:3]),
        (CONFIG, [*PLAIN[:2], Sampling(temperature=0.0, num_logprobs=2)]),
        (changed(**QWEN3_NEXT), PLAIN[:3]),
        (changed(**QWEN3_5), PLAIN[:3]),
        (changed(**DEEPSEEK_V3), PLAIN[:3]),
    ],
    ids=["plain", "logprobs", "qwen3_next", "qwen3_5", "deepseek_v3"],
)
def test_tokens_are_those_of_the_reference(config: ModelConfig, samplings: list[Sampling]) -> None:
    shapes = Shape(0, 16), Shape(3, 16), Shape(3, 80)
    reference, padded = sequences(samplings, num=3), sequences(samplings, num=3)
    drive(make_runner(config, TorchCompute("")), reference, chunk=16, stagger=1)
    runner = make_runner(config, TritonCompute("", DEVICE, LINES))
    decoder = runner._decoder = Unrecorded(runner, *shapes)
    drive(runner, padded, chunk=16, stagger=1)
    assert {Shape(0, 16), Shape(3, 16), Shape(3, 80)} >= set(decoder.taken) >= {Shape(3, 16)}
    assert [each.output for each in padded] == [each.output for each in reference]
    assert int(runner._slots.num_computed[-1]) == 0
    # What pads a step is computed, too: it may not end in what cannot be computed with.
    assert bool(torch.isfinite(runner._cache.keys[:, -1, 0]).all())
    assert runner._states is None or bool(torch.isfinite(runner._states.matrices[:, -1]).all())


def test_what_a_step_has_no_room_for_enters_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_graphs, "_CELLS_OF_TOKEN", 0)
    monkeypatch.setattr(chunk_graphs, "_CELLS", 16)
    expected, padded = sequences(PLAIN[:3], num=3), sequences(PLAIN[:3], num=3)
    drive(make_runner(CONFIG, TorchCompute("")), expected, chunk=16, stagger=1)
    runner = make_runner(CONFIG, TritonCompute("", DEVICE, LINES))
    decoder = runner._decoder = Unrecorded(runner, Shape(0, 16), Shape(3, 16))
    drive(runner, padded, chunk=16, stagger=1)
    assert decoder.taken
    assert [each.output for each in padded] == [each.output for each in expected]


@pytest.mark.parametrize("config", [CONFIG, changed(**DEEPSEEK_V3)], ids=["qwen3", "deepseek_v3"])
def test_tokens_stand_where_decodes_are_not(monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> None:
    monkeypatch.setattr(decode, "find_shares", lambda *_: Shares(3, 16, 3, 2, 1))
    monkeypatch.setattr(latent, "find_latent_cut", lambda *_: LatentCut(3, 8, LatentTile(16, 16, 4, 2)))
    expected, padded = sequences(PLAIN[:3], num=3), sequences(PLAIN[:3], num=3)
    drive(make_runner(config, TorchCompute("")), expected, chunk=16, stagger=1)
    runner = make_runner(config, TritonCompute("", DEVICE, LINES))
    assert isinstance(runner._attention, TritonAttention)
    assert runner._attention.takes_finished(3)
    decoder = runner._decoder = Unrecorded(runner, Shape(3, 14, is_flexible=True), Shape(3, 40, is_flexible=True))
    drive(runner, padded, chunk=16, stagger=1)
    assert set(decoder.taken) == {Shape(3, 14, is_flexible=True), Shape(3, 40, is_flexible=True)}
    assert [each.output for each in padded] == [each.output for each in expected]
    assert int(runner._slots.num_computed[-1]) == 0
    assert bool(torch.isfinite(runner._cache.keys[:, -1, 0]).all())


@pytest.mark.parametrize("shapes", [(Shape(3, 40, is_flexible=True),), (Shape(0, 16), Shape(3, 16), Shape(3, 80))])
def test_a_graph_brings_contexts_to_heads_or_not_as_its_columns_say(
    monkeypatch: pytest.MonkeyPatch, shapes: tuple[Shape, ...]
) -> None:
    config = changed(**DEEPSEEK_V3)
    monkeypatch.setattr(chunk_work, "_FEWEST_CONTEXTS", 96)
    expected, padded = sequences(PLAIN[:4], num=4), sequences(PLAIN[:4], num=4)
    drive(make_runner(config, TorchCompute("")), expected, chunk=16, stagger=1)
    choices = expand_short_steps(monkeypatch)
    runner = make_runner(config, TritonCompute("", DEVICE, LINES))
    decoder = runner._decoder = Unrecorded(runner, *shapes)
    drive(runner, padded, chunk=16, stagger=1)
    assert decoder.taken
    assert set(choices) == {True, False}
    assert [each.output for each in padded] == [each.output for each in expected]
    assert int(runner._slots.num_computed[-1]) == 0
    assert bool(torch.isfinite(runner._cache.keys[:, -1, 0]).all())


@pytest.mark.usefixtures("always")
def test_a_package_that_attends_for_chunks_is_given_what_the_reference_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_graphs, "_LONGEST_PAD", 24)
    shapes = Shape(0, 40, by_flash=True), Shape(3, 40, by_flash=True), Shape(3, 80, by_flash=True), Shape(3, 80)
    expected, padded = sequences(PLAIN[:4], num=3), sequences(PLAIN[:4], num=3)
    drive(make_runner(CONFIG, TorchCompute("")), expected, chunk=16, stagger=1)
    runner = make_runner(CONFIG, TritonCompute("", DEVICE, LINES))
    assert isinstance(runner._attention, TritonAttention)
    runner._attention.flash = reference
    decoder = runner._decoder = Unrecorded(runner, *shapes)
    drive(runner, padded, chunk=16, stagger=1)
    assert set(decoder.taken) >= {Shape(3, 40, by_flash=True)}
    assert all(shape.by_flash for shape in decoder.taken)
    assert [each.output for each in padded] == [each.output for each in expected]
    assert int(runner._slots.num_computed[-1]) == 0
    assert bool(torch.isfinite(runner._cache.keys[:, -1]).all())


def test_vectors_and_logprobs_of_prompts_are_those_of_the_reference_beside_decodes() -> None:
    """As long as a shape has room for their rows: the mean of a chunk has none, and is computed without it."""
    scored = Sampling(temperature=0.0, num_prompt_logprobs=1)

    def mixed() -> list[Drive]:
        made = sequences([*PLAIN[:3], PLAIN[0], PLAIN[0], scored], num=6)
        for one, kind in zip(made[2:5], (PoolingKind.LAST, PoolingKind.MEAN, PoolingKind.CLS), strict=True):
            one.pooling, one.max_tokens = Pooling(kind), 1
        return made

    expected, padded = mixed(), mixed()
    drive(make_runner(CONFIG, TorchCompute("")), expected, chunk=24, stagger=1)
    runner = make_runner(CONFIG, TritonCompute("", DEVICE, LINES))
    decoder = runner._decoder = Unrecorded(runner, Shape(3, 80))
    stats = drive(runner, padded, chunk=24, stagger=1)
    assert 2 <= len(decoder.taken) < stats.num_steps
    assert [each.output for each in padded] == [each.output for each in expected]
    for one, other in zip(padded, expected, strict=True):
        assert (one.vector is None) == (other.vector is None) == (one.pooling is None)
        if one.vector is not None and other.vector is not None:
            np.testing.assert_allclose(one.vector, other.vector, atol=2e-6)
    assert padded[5].prompt is not None
    assert expected[5].prompt is not None
    np.testing.assert_allclose(padded[5].prompt.logprobs.sampled, expected[5].prompt.logprobs.sampled, atol=2e-5)


def test_rows_that_are_wanted_must_have_room() -> None:
    runner = make_runner(CONFIG, TritonCompute("", DEVICE, LINES))
    chunks = Unrecorded(runner, Shape(4, 48)).chunks
    batch = make_batch(2, 30)
    room = Shape(4, 48).last_tokens - len(batch.samples)
    assert chunks.shape_of(batch, room) == Shape(4, 48)
    assert chunks.shape_of(batch, room + 1) is None


def make_batch(num_decodes: int, *lengths: int) -> Batch:
    """So many decodes, and chunks of `lengths` without a context before them."""
    column = np.array([*[1] * num_decodes, *lengths])
    return Batch(column, column, np.append(0, np.cumsum(column)), column, column, column)


def test_a_step_gets_the_smallest_shape_that_has_room() -> None:
    runner = make_runner(CONFIG, TritonCompute("", DEVICE, LINES))
    chunks = Unrecorded(runner, Shape(4, 48), Shape(0, 48), Shape(4, 96), Shape(0, 16)).chunks

    def shape_of(num_decodes: int, *lengths: int) -> Shape | None:
        return chunks.shape_of(make_batch(num_decodes, *lengths))

    assert shape_of(0, 16) == Shape(0, 16)
    assert shape_of(0, 14, 3) == Shape(0, 48)
    assert shape_of(1, 16) == Shape(4, 48)
    assert shape_of(4, 40, 9) == Shape(4, 96)
    assert shape_of(0, 60) == Shape(4, 96)
    assert shape_of(5, 16) is None
    assert shape_of(4, 97) is None
    assert shape_of(4) is None
    most = Shape(0, 48).chunks
    assert shape_of(0, *[2] * most) == Shape(0, 48)
    assert shape_of(0, *[2] * (most + 1)) is None


def test_steps_with_much_attention_are_left_to_the_package() -> None:
    runner = make_runner(CONFIG, TritonCompute("", DEVICE, LINES))
    assert isinstance(runner._attention, TritonAttention)
    runner._attention.flash = reference
    chunks = Unrecorded(runner, Shape(0, 12_000), Shape(0, 12_000, by_flash=True)).chunks
    # Two heads of 64 and half of all pairs of tokens: 256 operations a pair of 8,000 tokens are 16e9.
    assert chunks.shape_of(make_batch(0, 8000)) == Shape(0, 12_000)
    assert chunks.shape_of(make_batch(0, 11_500)) == Shape(0, 12_000, by_flash=True)
    assert chunks.shape_of(make_batch(0, 12_500)) is None
    assert chunks.shape_of(make_batch(1, 11_500)) is None


LIMITS = Limits(
    num_blocks=80, block_size=16, max_num_seqs=256, max_model_len=200, max_num_batched_tokens=8192, vocab_size=9
)


def test_shapes_end_where_products_outlast_their_launches() -> None:
    limits = LIMITS
    small, large = (make_shapes(limits, num_weights, with_flash=False) for num_weights in (440_000_000, 7_000_000_000))
    assert max(shape.tokens for shape in small) == 8192
    assert {shape.decodes for shape in small} == {0, 16, 64, 256}
    assert max(shape.tokens for shape in large) == 1536
    assert set(large) < set(small)
    # However few decodes are in a step, its budget of tokens fits.
    fewer = replace(limits, max_num_batched_tokens=2304)
    assert Shape(0, 2304) in make_shapes(fewer, 440_000_000, with_flash=False)
    assert Shape(0, 2304, by_flash=True) in make_shapes(fewer, 440_000_000, with_flash=True)


def test_shapes_of_many_rows_keep_none_for_decodes_that_are_not_there() -> None:
    def shapes(budget: int, num_weights: int) -> list[Shape]:
        limits = replace(LIMITS, max_num_batched_tokens=budget)
        return make_shapes(limits, num_weights, with_flash=False, takes_finished=lambda count: count > 32)

    found = shapes(1536, 7_000_000_000)
    flexible = [shape for shape in found if shape.is_flexible]
    assert {shape.decodes for shape in flexible} == {64, 256}
    assert sorted({shape.rows for shape in flexible}) == [*range(576, 1537, 64), 1552]
    assert max(shape.tokens for shape in found if not shape.is_flexible) == 512
    # A full step beside any number of decodes has room.
    assert all(any(shape.has_room(count, 4, 1536 - count) for shape in found) for count in range(257))
    # A budget that would keep a device busy for longer than launches take is left to these.
    assert max(shape.rows for shape in shapes(2048, 7_000_000_000) if shape.is_flexible) == 1536
    tokens = {shape.tokens for shape in shapes(8192, 440_000_000) if not shape.is_flexible}
    assert tokens == {64, 128, 192, 256, 384, 512, 1792, 2048, 3072, 4096, 6144, 8192}


def test_a_flexible_shape_has_room_for_more_tokens_beside_fewer_decodes() -> None:
    shape = Shape(4, 12, is_flexible=True)
    assert shape.has_room(4, 1, 12)
    assert not shape.has_room(4, 1, 13)
    # One row is left for decodes that are not there.
    assert shape.has_room(3, 1, 12)
    assert not shape.has_room(3, 1, 13)
    assert shape.has_room(0, 1, 15)
    assert not shape.has_room(0, 1, 16)
    assert not shape.has_room(5, 1, 3)


def test_a_package_that_can_be_recorded_has_shapes_of_its_own() -> None:
    without, found = (make_shapes(LIMITS, 440_000_000, with_flash=with_flash) for with_flash in (False, True))
    assert not any(shape.by_flash for shape in without)
    assert [shape for shape in found if not shape.by_flash] == without
    flash = [shape for shape in found if shape.by_flash]
    assert {shape.decodes for shape in flash} == {0, 16, 64, 256}
    assert max(shape.tokens for shape in flash) == 8192


def test_contexts_shorter_than_a_tile_have_no_shapes() -> None:
    assert make_shapes(replace(LIMITS, max_model_len=63), 440_000_000, with_flash=True) == []
