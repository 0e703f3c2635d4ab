"""Kernels of the gated delta rule against plain torch: chunks, decodes, steps that are padded, whatever slots hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import triton
from hopper import on_hopper
from kernel_inputs import DEVICE
from torch import Tensor

from worker_svc.core.batch import Batch
from worker_svc.core.kernels.compiling import compile_launches
from worker_svc.core.kernels.delta import gates
from worker_svc.core.kernels.delta.sequences import Sequences
from worker_svc.core.kernels.delta.weights import DeltaWeights
from worker_svc.core.states.interface import StepStates
from worker_svc.core.states.slot_states import SlotStates, StateShape
from worker_svc.core.states.torch_states import TorchStates
from worker_svc.core.states.triton_states import ChunkedStates, DecodedStates

SLOTS = 7
SHAPES = [  # layers, key heads, value heads, dimensions of keys and values, width
    StateShape(2, 1, 2, 24, 40, 4, torch.float32),
    StateShape(1, 2, 2, 16, 64, 2, torch.float32),
    StateShape(1, 2, 4, 64, 16, 3, torch.float32),
]


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_weights(shape: StateShape) -> DeltaWeights:
    heads = shape.num_value_heads
    conv = random(shape.num_channels, shape.conv_width, seed=1) * 0.5
    return DeltaWeights(conv, -random(heads, seed=2).exp(), random(heads, seed=3))


def make_states(shape: StateShape, *, written: bool = True) -> SlotStates:
    states = SlotStates(shape, SLOTS + 1, DEVICE)
    for tensor, seed in ((states.seen, 4), (states.matrices, 5)):
        tensor.copy_(random(*tensor.shape, seed=seed) if written else torch.tensor(torch.nan))
    return states


def make_projected(shape: StateShape, rows: int, seed: int = 6) -> Tensor:
    values = shape.num_value_heads * shape.value_dim
    return random(rows, shape.num_channels + values + 2 * shape.num_value_heads, seed=seed)


def make_batch(slots: list[int], lengths: list[int], contexts: list[int]) -> Batch:
    starts = np.concatenate(([0], np.cumsum(lengths)))
    none = np.empty(0, np.int64)
    return Batch(np.array(slots), np.array(lengths), starts, np.array(contexts), none, none)


def on_device(*values: list[int]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(each, dtype=torch.int64, device=DEVICE) for each in values)


def assert_alike(shape: StateShape, batch: Batch, make: Callable[[SlotStates], StepStates], *, written: bool) -> None:
    """In what is read, and in the states of all slots: those of others stay as they are."""
    projected, weights = make_projected(shape, batch.num_tokens), make_weights(shape)
    expected, found = make_states(shape, written=written), make_states(shape, written=written)
    layer = shape.num_layers - 1
    reference = TorchStates(expected, batch).recur(layer, projected, weights)
    torch.testing.assert_close(make(found).recur(layer, projected, weights), reference, atol=2e-5, rtol=2e-4)
    torch.testing.assert_close(found.seen, expected.seen, equal_nan=True)
    torch.testing.assert_close(found.matrices, expected.matrices, atol=2e-5, rtol=2e-4, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_decodes_are_those_of_torch(shape: StateShape) -> None:
    slots, contexts = [3, 0, 6, 5, 1], [9, 1, 2, 40, 3]
    batch = make_batch(slots, [1] * 5, contexts)
    assert_alike(shape, batch, lambda states: DecodedStates(states, *on_device(slots, contexts)), written=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_beside_decodes_are_those_of_torch(shape: StateShape) -> None:
    slots, lengths, contexts = [3, 0, 6, 5, 1], [1, 1, 2, 37, 16], [9, 1, 6, 37, 48]
    batch = make_batch(slots, lengths, contexts)
    ends = batch.query_starts[1:].tolist()
    made = Sequences(*on_device(slots, contexts, ends))
    assert_alike(shape, batch, lambda states: ChunkedStates(states, made), written=True)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 33])
def test_what_a_slot_has_from_before_does_not_matter_to_a_sequence_that_begins(length: int) -> None:
    batch = make_batch([2, 4], [length, 1], [length, 1])
    made = Sequences(*on_device([2, 4], [length, 1], [length, length + 1]))
    assert_alike(SHAPES[0], batch, lambda states: ChunkedStates(states, made), written=False)
    if length == 1:
        rows = on_device([2, 4], [1, 1])
        assert_alike(SHAPES[0], batch, lambda states: DecodedStates(states, *rows), written=False)


@pytest.mark.parametrize("cuts", [[30], [1] * 30, [3, 1, 17, 1, 8], [29, 1], [2, 28]])
def test_a_sequence_gives_the_same_however_it_is_cut(cuts: list[int]) -> None:
    shape = SHAPES[0]
    projected, weights = make_projected(shape, 30), make_weights(shape)
    whole = TorchStates(make_states(shape), make_batch([1], [30], [30])).recur(0, projected, weights)
    for with_decodes in (False, True):
        states, at, found = make_states(shape), 0, []
        for length in cuts:
            rows, at = projected[at : at + length], at + length
            if length == 1 and with_decodes:
                step: StepStates = DecodedStates(states, *on_device([1], [at]))
            else:
                step = ChunkedStates(states, Sequences(*on_device([1], [at], [length])))
            found.append(step.recur(0, rows, weights))
        torch.testing.assert_close(torch.cat(found), whole, atol=2e-5, rtol=2e-4)


def test_sequences_that_pad_a_step_change_no_slot_but_the_dummy() -> None:
    """The rows of several are the dummy's, some are without rows; all of them begin, so that nothing grows there."""
    shape = SHAPES[0]
    weights, states = make_weights(shape), make_states(shape)
    before = make_states(shape)
    slots, contexts, ends = [2, SLOTS, SLOTS, SLOTS, SLOTS], [20, 1, 1, 3, 0], [4, 5, 6, 9, 9]
    for _ in range(3):
        made = Sequences(*on_device(slots, contexts, ends))
        ChunkedStates(states, made).recur(0, make_projected(shape, 9), weights)
        DecodedStates(states, *on_device([SLOTS] * 3, [1] * 3)).recur(0, make_projected(shape, 3), weights)
    others = [slot for slot in range(SLOTS) if slot != 2]
    assert torch.equal(states.seen[:, others], before.seen[:, others])
    assert torch.equal(states.matrices[:, others], before.matrices[:, others])
    assert not torch.equal(states.matrices[0, 2], before.matrices[0, 2])
    assert float(states.matrices[0, SLOTS].abs().max()) < 100


def test_states_are_copied_at_once() -> None:
    states, before = make_states(SHAPES[0]), make_states(SHAPES[0])
    states.copy(*on_device([1, 2, 0], [2, 1, 5]))
    for after, earlier in ((states.seen, before.seen), (states.matrices, before.matrices)):
        assert torch.equal(after[:, [2, 1, 5, 0]], earlier[:, [1, 2, 0, 0]])


def test_keys_that_all_point_one_way_are_corrected_exactly() -> None:
    """Each token finds what the one before it wrote: a piece's system is as far from the identity as it can be."""
    shape = SHAPES[2]
    projected = make_projected(shape, 48)
    keys = slice(shape.num_key_heads * shape.key_dim, 2 * shape.num_key_heads * shape.key_dim)
    projected[:, keys] = 3.0
    projected[:, -2 * shape.num_value_heads : -shape.num_value_heads] = 30.0  # betas of one
    weights = DeltaWeights(
        make_weights(shape).conv.abs(), torch.full((4,), -1e-3, device=DEVICE), torch.zeros(4, device=DEVICE)
    )
    expected = TorchStates(make_states(shape), make_batch([1], [48], [48])).recur(0, projected, weights)
    made = ChunkedStates(make_states(shape), Sequences(*on_device([1], [48], [48])))
    torch.testing.assert_close(made.recur(0, projected, weights), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("rows", "heads", "size"), [(3, 2, 40), (1, 4, 64), (0, 2, 8)])
def test_what_is_read_is_normalised_and_gated(rows: int, heads: int, size: int) -> None:
    x, weight, wide = random(rows, heads * size), random(size, seed=1), random(rows, heads * size + 6, seed=2)
    gate = wide[:, 3:-3]
    expected = F.rms_norm(x.view(rows, heads, size), (size,), weight, 1e-5).flatten(1) * F.silu(gate)
    gates.norm_silu(x, weight, 1e-5, gate)
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize(("rows", "size"), [(3, 40), (1, 1500), (0, 8)])
def test_what_is_attended_to_is_gated(rows: int, size: int) -> None:
    x, gate = random(rows, size), random(rows, size + 6, seed=2)[:, 3:-3]
    expected = x * torch.sigmoid(gate)
    gates.sigmoid_gated(x, gate)
    torch.testing.assert_close(x, expected)


NEXT = StateShape(1, 8, 16, 128, 128, 4, torch.bfloat16)  # Qwen3-Next's, on one rank of two


def compile_all() -> None:
    compiled: list[str] = []

    def observe(**event: Any) -> None:
        compiled.append(event["src"].name)

    def launch() -> None:
        values = NEXT.num_value_heads * NEXT.value_dim
        projected = torch.zeros(4, NEXT.num_channels + values + 2 * NEXT.num_value_heads, dtype=NEXT.dtype)
        states, heads = SlotStates(NEXT, 4, torch.device("cpu")), torch.zeros(NEXT.num_value_heads)
        weights = DeltaWeights(torch.zeros(NEXT.num_channels, NEXT.conv_width, dtype=NEXT.dtype), heads, heads)
        rows = torch.zeros(4, dtype=torch.int64)
        read = DecodedStates(states, rows, rows).recur(0, projected, weights)
        read = ChunkedStates(states, Sequences(rows, rows, rows)).recur(0, projected, weights)
        gates.norm_silu(read, torch.ones(NEXT.value_dim, dtype=NEXT.dtype), 1e-6, projected[:, :values])
        gates.sigmoid_gated(read, projected[:, :values])

    triton.knobs.compilation.listener = observe
    compile_launches(launch, 2)
    assert set(compiled) == {"_decode", "_convolve", "_recur", "_norm_silu", "_sigmoid_gated"}


def test_all_that_layers_with_a_state_launch_compiles_for_a_hopper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    on_hopper(monkeypatch, compile_all)
