"""Kernels of mixtures are others for other numbers of tokens: a worker that is ready has compiled all that it needs."""

import math
from functools import partial

import pytest

from worker_svc.core.kernels.experts.routing import _Cut
from worker_svc.core.kernels.experts.sorting import _MOST_WHOLE
from worker_svc.core.kernels.experts.tuning import FEWEST_STREAMED_PAIRS, FEWEST_WIDENED_PAIRS, tile_for
from worker_svc.core.kernels.experts.weights import FLOATS, FP4, FP8, INT4
from worker_svc.core.step_sizes import sizes_between

MOST_TOKENS = 65_536


def kernels(tokens: int, num_experts: int, top_k: int, inputs: int, form: int) -> set[tuple[object, ...]]:
    """Those of a step with so many tokens, with what each is compiled for."""
    pairs, cut = tokens * top_k, _Cut.of(tokens, num_experts, inputs)
    is_widened = pairs >= FEWEST_WIDENED_PAIRS.get(form, 2**31) * num_experts
    multiplied = FLOATS if is_widened else form
    streams = multiplied == FLOATS and pairs >= FEWEST_STREAMED_PAIRS * num_experts
    return {
        ("scores", cut),
        ("chooses", math.ceil(inputs / (cut.steps * cut.inputs))),
        ("sorts", pairs <= _MOST_WHOLE),
        ("gates", multiplied, tile_for(pairs, num_experts, multiplied), streams),
        ("adds", multiplied, streams or tile_for(pairs, num_experts, multiplied, is_added=True)),
        ("widens", is_widened),
    }


@pytest.mark.parametrize("form", [FLOATS, FP8, FP4, INT4])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "inputs"),
    [(128, 8, 2048), (32, 4, 2880), (128, 4, 2880), (64, 6, 2048), (256, 8, 7168), (8, 2, 4096), (512, 10, 2048)],
    ids=["Qwen3-30B-A3B", "gpt-oss-20b", "gpt-oss-120b", "DeepSeek-V2-Lite", "DeepSeek-V3", "Mixtral", "Qwen3-Next"],
)
def test_steps_that_memory_is_measured_with_have_all_kernels(
    num_experts: int, top_k: int, inputs: int, form: int
) -> None:
    of = partial(kernels, num_experts=num_experts, top_k=top_k, inputs=inputs, form=form)
    for most in (1024, 2048, 4096, 8192, 16_384, MOST_TOKENS):
        computed = [*sizes_between(most), most]
        have = set[tuple[object, ...]]().union(*map(of, computed))
        missing = {kernel for tokens in range(computed[0], most, 16) for kernel in of(tokens) - have}
        assert not missing


def test_sizes_grow_by_a_quarter() -> None:
    assert sizes_between(64) == []
    assert sizes_between(200) == [64, 80, 100, 125, 156, 195]
