"""Small steps in fixed columns: the reference's tokens, and nothing of anybody's is touched by what pads them."""

import pytest
import torch
from kernel_inputs import DEVICE
from plans import drive
from test_triton_runner import CONFIG, PLAIN, make_runner, sequences

from penstock.domain.params import Sampling
from worker_svc.compute import TorchCompute, TritonCompute
from worker_svc.core.batch import Batch
from worker_svc.core.chunk_graphs import MAX_SEQS, ChunkGraphs, ChunkStep
from worker_svc.core.decode_step import StepDecoder
from worker_svc.core.decoder import DecodeOutput
from worker_svc.core.runner import ModelRunner

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="exact in the interpreter only")


class Unrecorded(StepDecoder):
    """Small steps as graphs would compute them, without a graph."""

    def __init__(self, runner: ModelRunner, sizes: tuple[int, ...]) -> None:
        assert isinstance(runner._decoder, StepDecoder)
        super().__init__(runner._decoder._step)
        step = ChunkStep(runner._model, runner._attention, runner._slots, runner.limits)  # type: ignore[arg-type]
        self.chunks = ChunkGraphs(step, sizes)
        self.num_taken = 0

    def compute(self, batch: Batch) -> DecodeOutput | None:
        if not self.chunks.takes(batch):
            return None
        self.num_taken += 1
        return self.chunks.compute(batch)


@pytest.mark.parametrize("samplings", [PLAIN[:3], [*PLAIN[:2], Sampling(temperature=0.0, num_logprobs=2)]])
def test_tokens_are_those_of_the_reference(samplings: list[Sampling]) -> None:
    reference, padded = sequences(samplings, num=2), sequences(samplings, num=2)
    drive(make_runner(CONFIG, TorchCompute("")), reference, chunk=16, stagger=1)
    runner = make_runner(CONFIG, TritonCompute(""))
    decoder = runner._decoder = Unrecorded(runner, (16, 32))
    drive(runner, padded, chunk=16, stagger=1)
    assert decoder.num_taken > 1
    assert [each.output for each in padded] == [each.output for each in reference]
    assert int(runner._slots.num_computed[-1]) == 0
    # What pads a step is computed, too: it may not end in what cannot be computed with.
    assert bool(torch.isfinite(runner._cache.keys[:, -1, 0]).all())


def test_only_steps_that_fit_are_taken() -> None:
    runner = make_runner(CONFIG, TritonCompute(""))
    chunks = Unrecorded(runner, (16, 48)).chunks

    def batch(*lengths: int) -> Batch:
        column = torch.tensor(lengths).numpy()
        tokens = torch.zeros(int(column.sum()), dtype=torch.int64).numpy()
        return Batch(column, column, column, column, tokens, tokens, tokens, column, column)

    assert chunks.takes(batch(48))
    assert chunks.takes(batch(*[1] * MAX_SEQS))
    assert not chunks.takes(batch(40, 9))
    assert not chunks.takes(batch(*[1] * (MAX_SEQS + 1)))
