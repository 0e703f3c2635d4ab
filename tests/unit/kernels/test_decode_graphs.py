"""What the host does for decode graphs, with steps in their place: which graph a batch gets, and that what pads it
touches nobody.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE, LINES
from latent_families import DEEPSEEK_V3
from runner_configs import CONFIG, QWEN3_NEXT, changed
from test_triton_runner import PLAIN, make_runner
from torch import Tensor

from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan, StepResult
from worker_svc.compute import ALL_GRAPHS, TritonCompute
from worker_svc.core.config import ModelConfig
from worker_svc.core.decode_step import StepDecoder
from worker_svc.core.device_decoding import DecodeOutput
from worker_svc.core.graphs import DecodeGraphs
from worker_svc.core.runner import ModelRunner

pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="exact in the interpreter only"),
    pytest.mark.usefixtures("large_tiles"),
]

BLOCKS_EACH = 3
SAMPLINGS = [*PLAIN[:3], Sampling(temperature=0.7, top_p=0.8), Sampling(temperature=0.0, num_logprobs=2), PLAIN[5]]


class Replay:
    """A step, whose output is always in the same memory."""

    def __init__(self, compute: Callable[[], DecodeOutput]) -> None:
        self._compute = compute
        self.output = compute()
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        output = self._compute()
        self.output.logits.copy_(output.logits)
        self.output.token_ids.copy_(output.token_ids)
        self.output.positions.copy_(output.positions)


class Unrecorded(DecodeGraphs):
    """Decode graphs without graphs."""

    def __init__(self, runner: ModelRunner) -> None:
        assert isinstance(runner._decoder, StepDecoder)
        super().__init__(runner._decoder._step)

    def _record(self, size: int, pool: Any) -> Any:
        replay = Replay(lambda: self._step(self._slots[:size]))
        return replay, replay.output

    def num_replays(self) -> dict[int, int]:
        """Of each size."""
        replays: dict[int, Any] = {size: graph for size, (graph, _) in self._graphs.items()}
        return {size: replay.num_replays for size, replay in replays.items()}


@pytest.fixture(
    params=[CONFIG, changed(**QWEN3_NEXT), changed(**DEEPSEEK_V3)], ids=["qwen3", "qwen3_next", "deepseek_v3"]
)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    found: ModelConfig = request.param
    return found


@pytest.fixture
def make_graphs(monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> Callable[[], tuple[ModelRunner, Unrecorded]]:
    """A runner with six slots and all its decode graphs, of 1, 2, 4 and 6 rows."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def make() -> tuple[ModelRunner, Unrecorded]:
        runner = make_runner(config, TritonCompute("", DEVICE, LINES))
        graphs = runner._decoder = Unrecorded(runner)
        graphs.capture(ALL_GRAPHS, lambda done, total: None)
        return runner, graphs

    return make


Make = Callable[[], tuple[ModelRunner, Unrecorded]]


def begin(runner: ModelRunner) -> None:
    """Six prompts of other lengths in the slots, each with its first token sampled."""
    lengths = [5, 9, 2, 17, 12, 7]
    admissions = tuple(
        Admission(
            slot=slot,
            token_ids=np.arange(3, 3 + length, dtype=np.uint32) * (slot + 1),
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=np.arange(BLOCKS_EACH * slot, BLOCKS_EACH * (slot + 1), dtype=np.uint32),
            sampling=SAMPLINGS[slot],
            seed=slot,
        )
        for slot, length in enumerate(lengths)
    )
    slots = np.arange(len(lengths), dtype=np.uint32)
    runner.launch(StepPlan(1, admissions=admissions, slots=slots, num_tokens=np.array(lengths, np.uint32))).result()


def decode(runner: ModelRunner, step: int, slots: list[int]) -> StepResult:
    ones = np.ones(len(slots), np.uint32)
    return runner.launch(StepPlan(step, slots=np.array(slots, np.uint32), num_tokens=ones)).result()


def are_equal(one: StepResult, other: StepResult) -> bool:
    """Tokens, and the logprobs where some row has them."""
    columns = [(one.slots, other.slots), (one.token_ids, other.token_ids)]
    if one.logprobs is not None and other.logprobs is not None:
        columns.append((one.logprobs.top_ids, other.logprobs.top_ids))
    return (one.logprobs is None) == (other.logprobs is None) and all(np.array_equal(*pair) for pair in columns)


def state_of(runner: ModelRunner, slot: int) -> list[Tensor]:
    """Copies of all that the device has of a slot."""
    state, blocks = runner._slots, slice(BLOCKS_EACH * slot, BLOCKS_EACH * (slot + 1))
    tables = [table[slot] for table in (state.tokens, state.block_tables[0], state.num_computed)]
    tables += [state.integers[slot], state.floats[slot]]
    kept = [runner._cache.keys[:, blocks], runner._cache.values[:, blocks]]
    if runner._states is not None:
        kept += [runner._states.seen[:, slot], runner._states.matrices[:, slot]]
    return [each.clone() for each in (*tables, *kept)]


def is_as_before(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(before, after, strict=True))


# Batches between the sizes of graphs, smaller and larger ones in turn, and slot 0 in few of them.
BATCHES = ([1, 2, 5], [3], [5, 1, 2, 3, 4], [4, 2], [1, 2, 5], [1, 2, 5], [2, 1, 5], [0, 3, 4], [0, 1, 2, 3, 4])


def test_padded_batches_have_the_tokens_of_unpadded_ones_and_touch_nobody_else(
    make_graphs: Make, config: ModelConfig
) -> None:
    runner, graphs = make_graphs()
    plain = make_runner(config, TritonCompute("", DEVICE, LINES))
    begin(runner)
    begin(plain)
    dummy_slot = runner.limits.max_num_seqs
    for step, slots in enumerate(BATCHES, 2):
        others = sorted({*range(dummy_slot)} - {*slots})
        before = [state_of(runner, slot) for slot in others]
        assert are_equal(decode(runner, step, slots), decode(plain, step, slots))
        assert all(map(is_as_before, before, (state_of(runner, slot) for slot in others)))
        assert int(runner._slots.num_computed[dummy_slot]) == 0
    assert graphs.num_replays() == {1: 1, 2: 1, 4: 5, 6: 2}
    for slot in range(dummy_slot):
        assert torch.equal(runner._slots.tokens[slot], plain._slots.tokens[slot])


def test_the_largest_graphs_are_recorded_first(make_graphs: Make) -> None:
    _, graphs = make_graphs()
    assert list(graphs._graphs) == [6, 4, 2, 1]
    told: list[tuple[int, int]] = []
    graphs._graphs.clear()
    graphs.capture(2, lambda done, total: told.append((done, total)))
    assert list(graphs._graphs) == [6, 4]
    assert told == [(0, 4), (1, 4), (2, 4)]
