"""Rotations against those of transformers, of whole heads and of parts."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from worker_svc.core.layers.rotary import RotaryEmbedding, inverse_frequencies, order_of_dims, rotate
from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.spec import RopeSpec

DIMS, POSITIONS = 16, 512
CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * each for each in range(8)],
    "long_factor": [2.0 + each for each in range(8)],
    "original_max_position_embeddings": 128,
}


def read(parameters: dict[str, Any]) -> tuple[RopeSpec, LlamaConfig]:
    told = {"rope_theta": 10000.0, **parameters}
    fields = {"head_dim": DIMS, "max_position_embeddings": POSITIONS, "rope_parameters": told}
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, **{**fields, "rope_parameters": dict(told)})
    return ConfigFields({**sizes, **fields}, "config.json").rope(), config


@pytest.mark.parametrize(
    "parameters",
    [
        YARN,
        {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "attention_factor": 0.7},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        {**YARN, "factor": None},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "proportional", "partial_rotary_factor": 0.3},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
        {"rope_type": "proportional"},
    ],
)
def test_stretched_frequencies_and_magnitudes_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    rope, config = read(parameters)
    expected, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    torch.testing.assert_close(inverse_frequencies(rope, DIMS, POSITIONS, CPU), expected)
    assert rope.attention_factor == pytest.approx(magnitude)


@pytest.mark.parametrize("length", [128, 129])
def test_longrope_has_long_factors_where_the_context_exceeds_the_original_one(length: int) -> None:
    rope, config = read(LONG)
    expected, magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
    torch.testing.assert_close(inverse_frequencies(rope, DIMS, length, CPU), expected)
    assert rope.attention_factor == pytest.approx(magnitude)


@pytest.mark.parametrize("length", [POSITIONS, 2 * POSITIONS])
def test_a_dynamic_base_is_that_of_the_longest_context(length: int) -> None:
    rope, config = read({"rope_type": "dynamic", "factor": 2.0})
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    torch.testing.assert_close(inverse_frequencies(rope, DIMS, length, CPU), expected)


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("dims", [None, 4, 12])
def test_ordered_heads_have_the_products_of_those_that_turn_in_place(*, is_paired: bool, dims: int | None) -> None:
    rope = RopeSpec(100.0, dims=dims, is_paired=is_paired, attention_factor=1.3)
    turning = dims or DIMS
    query, key = torch.randn(2, 5, 1, DIMS, generator=torch.Generator().manual_seed(1))
    rotary = RotaryEmbedding(rope, DIMS, 9, CPU)
    angles = rotary.angles(torch.tensor([0, 1, 3, 8, 8]))

    def in_place(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (each[..., : turning // 2] for each in angles)
        first, rest = x[..., :turning], x[..., turning:]
        left, right = (first[..., ::2], first[..., 1::2]) if is_paired else first.chunk(2, -1)
        turned = left * cos - right * sin, right * cos + left * sin
        joined = torch.stack(turned, -1).flatten(-2) if is_paired else torch.cat(turned, -1)
        return torch.cat((joined, rest), -1)

    order = order_of_dims(rope, DIMS)
    assert (order is None) == (dims is None and not is_paired)
    ordered = [x[..., order] if order is not None else x for x in (query, key)]
    found = [rotate(x, *angles).squeeze(1) for x in ordered]
    expected = [in_place(x).squeeze(1) for x in (query, key)]
    torch.testing.assert_close(found[0] @ found[1].T, expected[0] @ expected[1].T)


def test_what_is_not_rotated_stays_as_it_is() -> None:
    rotary = RotaryEmbedding(None, DIMS, 9, CPU)
    x = torch.randn(3, 2, DIMS)
    assert torch.equal(rotate(x, *rotary.angles(torch.tensor([0, 4, 8]))), x)
