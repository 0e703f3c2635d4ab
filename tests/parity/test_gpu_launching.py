"""On a GPU: the host launches steps without ever waiting for the device, and steps that just go on take no memory."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from checkpoints import save_rounded_checkpoint
from near_the_likeliest import NUM_PROMPTS, load, sequences
from plans import Drive, drive
from test_gpu_parity import VARIANTS

from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan
from worker_svc.core.chunk_graphs import ChunkGraphs
from worker_svc.core.interface import Limits, PendingStep
from worker_svc.core.runner import ModelRunner

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]

# All that a sampler may be asked for.
MIXED = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, top_k=20),
    Sampling(temperature=0.8, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.1),
    Sampling(temperature=1.0, min_p=0.05, frequency_penalty=0.2),
    Sampling(temperature=0.0, num_logprobs=3, logit_bias=((7, 1.0), (9, -1.0))),
    Sampling(temperature=1.0),
    Sampling(temperature=0.9, allowed_token_ids=(5, 6, 7, 8), suppress_token_ids=(6,), bad_word_ids=((5, 7), (8,))),
)
CUT = (
    Sampling(temperature=0.9, top_k=20),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=0.7, top_k=40, top_p=0.95),
    Sampling(temperature=0.0),
)


def refuse() -> NoReturn:
    raise AssertionError("torch.cuda.synchronize while a step is launched")


@contextmanager
def nothing_waits() -> Iterator[None]:
    """What makes the host wait for the device raises, as far as torch knows of it.

    Copies that wait, values that the host looks at and streams that are waited for are known to the debug mode; that
    for a whole device is not.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", refuse)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@dataclass
class Unwaiting:
    """Launches what a runner launches, where nothing may wait, and notes what kinds of steps these were."""

    runner: ModelRunner
    kinds: set[str] = field(default_factory=set)

    @property
    def limits(self) -> Limits:
        return self.runner.limits

    def launch(self, plan: StepPlan) -> PendingStep:
        going_on, num_chunked = self.runner._going_on, self._num_chunked()
        with nothing_waits():
            pending = self.runner.launch(plan)
        goes_on = going_on is not None and self.runner._going_on is going_on
        found = {
            "sequences enter": len(plan.admissions) > 0,
            "blocks are appended": len(plan.append_slots) > 0,
            "it goes on": goes_on,
            "it goes on in appended blocks": goes_on and len(plan.append_slots) > 0,
            "a graph with chunks": self._num_chunked() > num_chunked,
        }
        self.kinds.update(kind for kind, is_so in found.items() if is_so)
        return pending

    def close(self) -> None:
        self.runner.close()

    def _num_chunked(self) -> int:
        chunks: ChunkGraphs | None = getattr(self.runner._decoder, "_chunks", None)
        return chunks._staging._num_launched if chunks is not None else 0


def drives(samplings: tuple[Sampling, ...]) -> list[Drive]:
    found = sequences(samplings[0])
    for index, each in enumerate(found):
        each.sampling = samplings[index % len(samplings)]
        if each.sampling.num_logprobs is not None:
            each.min_output_tokens, each.stop_token_ids = 6, (2, 5)
    return found


def test_a_mode_that_finds_what_waits() -> None:
    values = torch.zeros(4, device="cuda")
    with nothing_waits(), pytest.raises(RuntimeError, match="synchronizing"):
        values[0].item()
    with nothing_waits(), pytest.raises(AssertionError):
        torch.cuda.synchronize()
    assert values[0].item() == 0


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("samplings", [MIXED[:1], CUT, MIXED], ids=["plain", "cut", "mixed"])
def test_launching_waits_for_nothing(samplings: tuple[Sampling, ...], tmp_path: Path, *, cuda_graphs: bool) -> None:
    save_rounded_checkpoint(tmp_path, VARIANTS[0])
    loaded = load(tmp_path, dtype="bfloat16", attention="triton", cuda_graphs=cuda_graphs)
    unwaiting = Unwaiting(loaded.runner)
    # The first time kernels are compiled, and memory is found. Sequences enter one by one, and all at once. Few steps
    # are on their way at a time: the ninth would wait for the first, see `worker_svc.core.staging`.
    for runner in (loaded.runner, unwaiting):
        for stagger in (1, 0):
            drive(runner, drives(samplings), chunk=100, window=3, stagger=stagger)
    expected = {"sequences enter", "blocks are appended", "it goes on", "it goes on in appended blocks"}
    if cuda_graphs:
        expected |= {"a graph with chunks"}
    assert unwaiting.kinds >= expected


def begin(prompt: int, num_blocks: int) -> StepPlan:
    """A first step in which every slot gets a prompt of so many tokens, and blocks."""
    blocks = np.arange(NUM_PROMPTS * num_blocks, dtype=np.uint32).reshape(NUM_PROMPTS, num_blocks)
    admissions = tuple(
        Admission(
            slot, np.arange(3, 3 + prompt, dtype=np.uint32), prompt, 0, blocks[slot], Sampling(temperature=0.0), seed=0
        )
        for slot in range(NUM_PROMPTS)
    )
    return going_on(1, prompt, admissions=admissions)


def going_on(step: int, num_tokens: int = 1, **more: Any) -> StepPlan:
    """A step in which every slot advances by as many tokens."""
    slots = np.arange(NUM_PROMPTS, dtype=np.uint32)
    return StepPlan(step, slots=slots, num_tokens=np.full_like(slots, num_tokens), **more)


def test_copied_blocks_wait_for_nothing(tmp_path: Path) -> None:
    save_rounded_checkpoint(tmp_path, VARIANTS[0])
    runner = load(tmp_path, dtype="bfloat16", attention="triton").runner
    own, others = np.array([0, 2], np.uint32), np.array([1000, 1001], np.uint32)
    for launcher in (runner, Unwaiting(runner)):
        launcher.launch(begin(10, 2)).result()
        copied = going_on(
            2,
            copy_sources=own,
            copy_targets=others,
        )
        assert len(launcher.launch(copied).result().token_ids) == NUM_PROMPTS


def test_a_decode_graph_that_goes_on_allocates_nothing_on_the_device(tmp_path: Path) -> None:
    """Steps in which blocks are appended are not meant: they upload a few bytes, for which the allocator is asked."""
    save_rounded_checkpoint(tmp_path, VARIANTS[0])
    runner = load(tmp_path, dtype="bfloat16", attention="triton").runner
    pending: deque[PendingStep] = deque()
    for step in range(1, 25):
        if step == 5:
            before, batch = torch.cuda.memory_stats()["allocation.all.allocated"], runner._going_on
        pending.append(runner.launch(begin(10, 4) if step == 1 else going_on(step)))
        if len(pending) == 3:
            pending.popleft().result()
    assert batch is not None
    assert runner._going_on is batch
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
