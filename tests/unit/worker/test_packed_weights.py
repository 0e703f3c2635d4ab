"""Weights with scales for groups of inputs, as they are multiplied: what they stand for."""

import pytest
import torch

from worker_svc.core.formats.fp8_channel import FP8
from worker_svc.core.formats.fp8_groups import Fp8GroupsFormat
from worker_svc.core.formats.int4 import Int4Format, Integers, pack_integers, widen_integers
from worker_svc.core.layers.placement import WantedTensor
from worker_svc.weights import fill_randomly


@pytest.mark.parametrize("group", [16, 48, 128, None])
def test_integers_of_4_bits_are_what_they_stand_for_scaled_and_in_another_order(group: int | None) -> None:
    draw = torch.Generator().manual_seed(1)
    groups = 1 if group is None else -(-200 // group)
    numbers = torch.randint(0, 16, (24, 200), generator=draw, dtype=torch.int32)
    zeros = torch.randint(0, 16, (24, groups), generator=draw, dtype=torch.int32)
    scales = torch.randn(24, groups, generator=draw).half().float()
    integers = Integers(numbers, zeros, scales)
    packed, expected = pack_integers(integers, 200, group), widen_integers(integers, group)
    assert packed.widen(torch.float32).equal(expected)
    assert packed.numbers.nbytes == 24 * 2 * 64
    packed.scale_outputs(3.0)
    torch.testing.assert_close(packed.widen(torch.float32), 3 * expected, rtol=1e-5, atol=0)
    order = torch.randperm(24, generator=draw)
    packed.reorder_outputs(order)
    torch.testing.assert_close(packed.widen(torch.float32), 3 * expected[order], rtol=1e-5, atol=0)
    x, bias = torch.randn(3, 200, generator=draw), torch.randn(24, generator=draw)
    torch.testing.assert_close(packed.multiply(x, bias), x @ packed.widen(torch.float32).t() + bias)


def test_floats_in_groups_are_what_they_stand_for_scaled_and_in_another_order() -> None:
    draw = torch.Generator().manual_seed(1)
    weight, scales = torch.randn(24, 200, generator=draw).to(FP8), torch.rand(5, 24, generator=draw)
    packed = Fp8GroupsFormat(48).pack({"weight": weight.clone(), "weight_scale": scales.clone()}, 200)
    expected = torch.stack([weight[:, place].float() * scales[place // 48] for place in range(200)], 1)
    assert packed.widen(torch.float32).equal(expected)
    assert (packed.outputs, packed.inputs) == (24, 200)
    packed.scale_outputs(3.0)
    torch.testing.assert_close(packed.widen(torch.float32), 3 * expected)
    order = torch.randperm(24, generator=draw)
    packed.reorder_outputs(order)
    torch.testing.assert_close(packed.widen(torch.float32), 3 * expected[order])
    x, bias = torch.randn(3, 200, generator=draw), torch.randn(24, generator=draw)
    torch.testing.assert_close(packed.multiply(x, bias), x @ packed.widen(torch.float32).t() + bias)


def test_random_integers_of_4_bits_are_weights_of_the_deviation_that_others_have() -> None:
    tensors = {each.suffix: torch.empty(each.shape(64, 1024), dtype=each.dtype) for each in Int4Format(128).pieces}
    torch.manual_seed(2)
    fill_randomly(WantedTensor(f"a.{name}", each, tuple(each.shape), ()) for name, each in tensors.items())
    weight = Int4Format(128).pack(tensors, 1024).widen(torch.float32)
    assert abs(float(weight.square().mean().sqrt()) - 0.02) < 1e-3
    assert len(weight.unique()) == 16
