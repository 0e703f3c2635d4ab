"""Small steps in fixed columns: the reference's tokens, and nothing of anybody's is touched by what pads them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE
from plans import drive
from test_triton_runner import CONFIG, PLAIN, make_runner, sequences

from penstock.domain.params import Sampling
from worker_svc.compute import TorchCompute, TritonCompute
from worker_svc.core.batch import Batch
from worker_svc.core.chunk_graphs import ChunkGraphs, ChunkStep, Shape, make_shapes
from worker_svc.core.decode_step import StepDecoder
from worker_svc.core.decoder import DecodeOutput
from worker_svc.core.runner import ModelRunner

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="exact in the interpreter only")


class Unrecorded(StepDecoder):
    """Small steps as graphs would compute them, without a graph."""

    def __init__(self, runner: ModelRunner, *shapes: Shape) -> None:
        assert isinstance(runner._decoder, StepDecoder)
        super().__init__(runner._decoder._step)
        step = ChunkStep(runner._model, runner._attention, runner._slots, runner.limits)  # type: ignore[arg-type]
        self.chunks = ChunkGraphs(step, list(shapes))
        self.taken: list[Shape] = []

    def compute(self, batch: Batch) -> DecodeOutput | None:
        shape = self.chunks.shape_of(batch)
        if shape is not None:
            self.taken.append(shape)
        return self.chunks.compute(batch)


@pytest.mark.parametrize("samplings", [PLAIN[:3], [*PLAIN[:2], Sampling(temperature=0.0, num_logprobs=2)]])
def test_tokens_are_those_of_the_reference(samplings: list[Sampling]) -> None:
    shapes = Shape(0, 16), Shape(3, 16), Shape(3, 80)
    reference, padded = sequences(samplings, num=3), sequences(samplings, num=3)
    drive(make_runner(CONFIG, TorchCompute("")), reference, chunk=16, stagger=1)
    runner = make_runner(CONFIG, TritonCompute(""))
    decoder = runner._decoder = Unrecorded(runner, *shapes)
    drive(runner, padded, chunk=16, stagger=1)
    assert {Shape(0, 16), Shape(3, 16), Shape(3, 80)} >= set(decoder.taken) >= {Shape(3, 16)}
    assert [each.output for each in padded] == [each.output for each in reference]
    assert int(runner._slots.num_computed[-1]) == 0
    # What pads a step is computed, too: it may not end in what cannot be computed with.
    assert bool(torch.isfinite(runner._cache.keys[:, -1, 0]).all())


def test_a_step_gets_the_smallest_shape_that_has_room() -> None:
    runner = make_runner(CONFIG, TritonCompute(""))
    chunks = Unrecorded(runner, Shape(4, 48), Shape(0, 48), Shape(4, 96), Shape(0, 16)).chunks

    def shape_of(num_decodes: int, *lengths: int) -> Shape | None:
        column = np.array([*[1] * num_decodes, *lengths])
        tokens = np.zeros(int(column.sum()), np.int64)
        return chunks.shape_of(Batch(column, column, column, column, tokens, tokens, tokens, column, column))

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


def test_shapes_end_where_products_outlast_their_launches() -> None:
    limits = make_runner(CONFIG, TorchCompute("")).limits
    limits = replace(limits, max_num_seqs=256, max_num_batched_tokens=8192)
    small, large = make_shapes(limits, 440_000_000), make_shapes(limits, 7_000_000_000)
    assert max(shape.tokens for shape in small) == 8192
    assert {shape.decodes for shape in small} == {0, 16, 64, 256}
    assert max(shape.tokens for shape in large) == 512
    assert set(large) < set(small)
    # However few decodes are in a step, its budget of tokens fits.
    assert Shape(0, 2304) in make_shapes(replace(limits, max_num_batched_tokens=2304), 440_000_000)
