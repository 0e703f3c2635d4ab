"""A runner on Triton's kernels against one on plain torch: the same plans, the same tokens."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE, LINES
from latent_families import DEEPSEEK_V2, DEEPSEEK_V3, expand_short_steps
from plans import Drive, drive
from random_models import random_model, unwritten_cache, unwritten_states
from runner_configs import (
    CONFIG,
    GLM4_MOE,
    GPT_OSS,
    LLAMA,
    LLAMA4,
    MINIMAX_M2,
    MULTIPLIERS,
    QWEN2_MOE,
    QWEN3_5,
    QWEN3_NEXT,
    changed,
)
from torch import Tensor

from contract.domain.params import Sampling
from contract.domain.plan import StepPlan
from worker_svc.compute import Compute, TorchCompute, TritonCompute
from worker_svc.core.attention.triton_backend import TritonAttention
from worker_svc.core.config import ModelConfig
from worker_svc.core.formats.dense import Dense
from worker_svc.core.interface import Limits
from worker_svc.core.kv_cache import KVCacheShape
from worker_svc.core.kv_scales import KVScales
from worker_svc.core.operations import triton_operations
from worker_svc.core.operations.dense_multiplier import DenseMultiplier
from worker_svc.core.runner import ModelRunner

# Matrix products of the device round fp32 to TF32, so that its tokens may differ: there the GPU checks compare logits.
pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="exact in the interpreter only"),
    pytest.mark.usefixtures("large_tiles"),
]


def make_runner(
    config: ModelConfig, compute: Compute, max_num_seqs: int = 6, scales: KVScales | None = None
) -> ModelRunner:
    limits = Limits(
        num_blocks=80,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_model_len=200,
        max_num_batched_tokens=256,
        vocab_size=config.decoder.vocab_size,
        has_state=bool(config.decoder.delta_rules),
    )
    model = random_model(config, compute, limits.max_model_len)
    attention = config.attention
    shape = KVCacheShape(
        len(config.decoder.attentions),
        attention.num_kv_heads,
        attention.head_dim,
        limits.block_size,
        torch.float32,
        shares_values=attention.shares_values,
        scales=scales,
    )
    cache, states = unwritten_cache(shape, limits.num_blocks + 1), unwritten_states(config, max_num_seqs + 1)
    given = model, cache, attention.num_heads, limits, lambda: 0
    return compute.make_runner(*given, num_graphs=0, states=states)


def sequences(samplings: list[Sampling], num: int = 4) -> list[Drive]:
    rng = np.random.default_rng(8)
    lengths = [1, 40, 15, 17, 33, 2]
    return [
        Drive(rng.integers(3, CONFIG.decoder.vocab_size, length).tolist(), num, sampling, seed=length)
        for length, sampling in zip(lengths, samplings, strict=False)
    ]


PLAIN = [Sampling(temperature=t) for t in (0.0, 1.0, 0.0, 0.7, 2.0, 0.0)]
CUT = [
    Sampling(temperature=0.9, top_k=20),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=1.1, top_k=30, top_p=0.8, min_p=0.01),
    Sampling(temperature=0.0, top_k=3),
    Sampling(temperature=1.0),
]
MIXED = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, top_k=20),
    Sampling(temperature=0.8, top_p=0.9, presence_penalty=0.5),
    Sampling(temperature=0.0, num_logprobs=3),
    Sampling(temperature=1.0),
    Sampling(temperature=0.0, logit_bias=((7, 100.0),)),
]

CHANGED = [
    Sampling(temperature=0.5, presence_penalty=0.5),
    Sampling(temperature=2.0),
    Sampling(temperature=1.0, repetition_penalty=1.2),
    Sampling(temperature=0.7, num_logprobs=2),
    Sampling(temperature=0.0),
    Sampling(temperature=1.5, logit_bias=((7, 2.0),)),
]


# Each row by two things of which one must come before the other, or must not know of it.
TWOFOLD = [
    Sampling(temperature=0.0, num_logprobs=3, logit_bias=((7, 5.0), (9, 4.0)), presence_penalty=1.0),
    Sampling(temperature=1.0, top_k=2, logit_bias=tuple((token, -100.0) for token in range(3, 170))),
    Sampling(temperature=2.0, num_logprobs=5, repetition_penalty=1.5),
    Sampling(temperature=1.0, top_p=0.3, frequency_penalty=2.0, allowed_token_ids=(40, 41, 42, 90)),
    Sampling(temperature=1.0, min_p=0.5, presence_penalty=-2.0),
    Sampling(
        temperature=0.0,
        num_logprobs=0,
        frequency_penalty=1.0,
        allowed_token_ids=(40, 41, 42),
        bad_word_ids=((40, 41), (42, 40, 42), (41, 41)),
    ),
]


@pytest.mark.parametrize(
    ("config", "samplings"),
    [
        (CONFIG, PLAIN),
        (CONFIG, CUT),
        (CONFIG, MIXED),
        (CONFIG, CHANGED),
        (CONFIG, TWOFOLD),
        (LLAMA, PLAIN),
        (LLAMA, MIXED),
        (changed(head_dim=96), PLAIN),
        (changed(**MULTIPLIERS), PLAIN),
        (changed(architectures=["Olmo2ForCausalLM"]), PLAIN),
        (changed(architectures=["Phi3ForCausalLM"]), PLAIN),
        (changed(**QWEN2_MOE), PLAIN),
        (changed(**GLM4_MOE), PLAIN),
        (changed(**MINIMAX_M2), PLAIN),
        (changed(**GPT_OSS), PLAIN),
        (changed(**LLAMA4), PLAIN),
        (changed(**QWEN3_NEXT), PLAIN),
        (changed(**QWEN3_5), PLAIN),
        (changed(**DEEPSEEK_V2), PLAIN),
        (changed(**DEEPSEEK_V3), PLAIN),
        (changed(**DEEPSEEK_V3), MIXED),
    ],
    ids=[
        "qwen3-plain",
        "qwen3-cut",
        "qwen3-mixed",
        "qwen3-changed",
        "qwen3-twofold",
        "llama-plain",
        "llama-mixed",
        "heads_of_96",
        "granite-plain",
        "olmo2-plain",
        "phi3-plain",
        "qwen2_moe-plain",
        "glm4_moe-plain",
        "minimax_m2-plain",
        "gpt_oss-plain",
        "llama4-plain",
        "qwen3_next-plain",
        "qwen3_5-plain",
        "deepseek_v2-plain",
        "deepseek_v3-plain",
        "deepseek_v3-mixed",
    ],
)
def test_tokens_are_those_of_the_reference(config: ModelConfig, samplings: list[Sampling]) -> None:
    both = []
    for compute in (TorchCompute(""), TritonCompute("", DEVICE, LINES)):
        drives = sequences(samplings)
        stats = drive(make_runner(config, compute), drives, chunk=24, window=2, stagger=2)
        assert stats.num_mixed > 0
        assert stats.num_chunked > 0
        both.append(drives)
    for reference, fused in zip(*both, strict=True):
        assert fused.output == reference.output
        assert fused.logprobs == pytest.approx(reference.logprobs, abs=1e-4, nan_ok=True)
        # Rounding may swap neighbours.
        assert fused.ranks == pytest.approx(reference.ranks, abs=1)
        assert [rank > 0 for rank in fused.ranks] == [not math.isnan(each) for each in fused.logprobs]
        assert len(fused.tops) == len(reference.tops)
        for found, expected in zip(fused.tops, reference.tops, strict=True):
            assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "config",
    [CONFIG, changed(architectures=["LlamaForCausalLM"]), changed(**MINIMAX_M2)],
    ids=["norms_of_heads", "no_norms", "norms_of_projections"],
)
def test_tokens_are_those_of_the_reference_where_norms_are_folded_and_many_rows_are_not_scaled(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig
) -> None:
    """As in bf16."""
    both = sequences(PLAIN), sequences(PLAIN)
    drive(make_runner(config, TorchCompute("")), both[0], chunk=24, window=2, stagger=2)
    rows = []

    def multiply(self: DenseMultiplier, x: Tensor, packed: Dense, bias: Tensor | None) -> Tensor:
        rows.append(len(x))
        return multiply_dense(self, x, packed, bias)

    multiply_dense = DenseMultiplier.multiply
    monkeypatch.setattr(DenseMultiplier, "multiply", multiply)
    monkeypatch.setattr(DenseMultiplier, "fold_norm", lambda _, norm, packed, bias: norm.fold(packed.weight))
    monkeypatch.setattr(triton_operations, "MOST_SCALED_ROWS", 8)
    drive(make_runner(config, TritonCompute("", DEVICE, LINES)), both[1], chunk=24, window=2, stagger=2)
    assert max(rows) > 8
    for reference, fused in zip(*both, strict=True):
        assert fused.output == reference.output
        assert fused.logprobs == pytest.approx(reference.logprobs, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("config", [changed(**DEEPSEEK_V2), changed(**DEEPSEEK_V3)], ids=["v2", "v3"])
def test_tokens_are_those_of_the_reference_where_contexts_are_brought_to_heads(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig
) -> None:
    """First chunks are, those after longer contexts are not."""
    both = sequences(MIXED), sequences(MIXED)
    drive(make_runner(config, TorchCompute("")), both[0], chunk=24, window=2, stagger=2)
    choices = expand_short_steps(monkeypatch)
    drive(make_runner(config, TritonCompute("", DEVICE, LINES)), both[1], chunk=24, window=2, stagger=2)
    assert set(choices) == {True, False}
    assert [each.output for each in both[1]] == [each.output for each in both[0]]
    for reference, fused in zip(*both, strict=True):
        assert fused.logprobs == pytest.approx(reference.logprobs, abs=1e-4, nan_ok=True)


def test_logprobs_of_chosen_tokens_are_those_of_the_reference_beside_others() -> None:
    asked = [
        replace(
            each, num_logprobs=(None, 0, 4)[index % 3], logprob_token_ids=(3, 17, 90)[: index % 3 * (index // 3) + 1]
        )
        for index, each in enumerate(PLAIN)
    ]
    reference, fused = sequences(asked), sequences(asked)
    drive(make_runner(CONFIG, TorchCompute("")), reference, chunk=24, window=2, stagger=2)
    drive(make_runner(CONFIG, TritonCompute("", DEVICE, LINES)), fused, chunk=24, window=2, stagger=2)
    for found, expected in zip(fused, reference, strict=True):
        assert found.output == expected.output
        wanted = found.sampling.logprob_token_ids if found.sampling.num_logprobs is not None else ()
        for top, expected_top in zip(found.tops, expected.tops, strict=True):
            assert tuple(top) == wanted
            assert top == pytest.approx(expected_top, abs=1e-4)


def test_logprobs_of_prompts_are_those_of_the_reference_and_change_nothing_for_others() -> None:
    asked = [replace(each, num_prompt_logprobs=3) if index % 2 else each for index, each in enumerate(PLAIN)]
    runs = []
    for compute, samplings in (
        (TorchCompute(""), asked),
        (TritonCompute("", DEVICE, LINES), asked),
        (TritonCompute("", DEVICE, LINES), PLAIN),
    ):
        drives = sequences(samplings)
        assert drive(make_runner(CONFIG, compute), drives, chunk=24, window=2, stagger=2).num_mixed > 0
        runs.append(drives)
    for reference, fused, unasked in zip(*runs, strict=True):
        assert fused.output == reference.output == unasked.output
        assert (fused.prompt is None) == (fused.sampling.num_prompt_logprobs is None)
        if fused.prompt is None or reference.prompt is None:
            continue
        assert fused.prompt.token_ids.tolist() == fused.token_ids[1:]
        found, expected = fused.prompt.logprobs, reference.prompt.logprobs
        assert found.sampled == pytest.approx(expected.sampled, abs=1e-4)
        assert found.ranks == pytest.approx(expected.ranks, abs=1)
        assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("samplings", [PLAIN, CUT], ids=["plain", "cut"])
def test_a_sequence_alone_is_decoded_as_in_a_batch(samplings: list[Sampling]) -> None:
    together = sequences(samplings)
    drive(make_runner(CONFIG, TritonCompute("", DEVICE, LINES)), together)
    alone = sequences(samplings)[1:2]
    drive(make_runner(CONFIG, TritonCompute("", DEVICE, LINES)), alone)
    assert alone[0].output == together[1].output


@pytest.mark.parametrize("samplings", [PLAIN, CUT, MIXED, CHANGED], ids=["plain", "cut", "mixed", "changed"])
def test_batches_go_on_whatever_they_ask_for(samplings: list[Sampling], monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[StepPlan] = []
    begin = ModelRunner._begin

    def note(self: ModelRunner, plan: StepPlan) -> Any:
        built.append(plan)
        return begin(self, plan)

    monkeypatch.setattr(ModelRunner, "_begin", note)
    drive(make_runner(CONFIG, TritonCompute("", DEVICE, LINES)), sequences(samplings, num=5), chunk=64)
    # The prompts, and the first step that only decodes; not the three behind that.
    assert len([plan for plan in built if plan.num_tokens.max() == 1]) == 1


@pytest.mark.parametrize("min_output_tokens", [2, 4])
def test_stop_tokens_are_possible_again_once_there_are_enough(min_output_tokens: int) -> None:
    both = []
    for compute in (TorchCompute(""), TritonCompute("", DEVICE, LINES)):
        # All but the last bring one token to the top that stops them.
        drives = sequences([Sampling(temperature=0.0, logit_bias=((7, 100.0),))] * 5 + [Sampling(temperature=1.0)], 6)
        for index, each in enumerate(drives[:5]):
            each.min_output_tokens, each.stop_token_ids = min_output_tokens + index % 2, (7,)
        drive(make_runner(CONFIG, compute), drives, chunk=64)
        both.append([each.output for each in drives])
    assert both[0] == both[1]
    for index, output in enumerate(both[1][:5]):
        num_forbidden = min_output_tokens + index % 2
        assert 7 not in output[:num_forbidden]
        assert set(output[num_forbidden:]) == {7}


@pytest.mark.parametrize(("config", "expected"), [(CONFIG, True), (changed(**DEEPSEEK_V3), False)])
def test_a_package_may_attend_to_all_but_latents(config: ModelConfig, *, expected: bool) -> None:
    attention = make_runner(config, TritonCompute("", DEVICE, LINES))._attention
    assert isinstance(attention, TritonAttention)
    assert attention.takes_flash is expected


def test_counts_on_the_device_are_those_of_the_host() -> None:
    runner = make_runner(CONFIG, TritonCompute("", DEVICE, LINES))
    drive(runner, sequences(PLAIN), chunk=24, stagger=1)
    on_device = runner._slots.num_computed[:-1].tolist()
    assert on_device == runner._host.num_computed.tolist()
    assert int(runner._slots.num_computed[-1]) == 0
