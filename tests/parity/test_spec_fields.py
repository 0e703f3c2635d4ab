"""The comparison with transformers sees every field of mixtures of experts, of latent attention, of Llama 4's and of
the delta rule: without it, logprobs are others.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VARIANTS, VOCAB_SIZE, save_checkpoint
from plans import Drive, drive
from teacher import Answered, expected_logprobs, logprob_errors

from contract.domain.params import Sampling
from servicekit.checkpoint.model import Checkpoint
from worker_svc import native
from worker_svc.core.config import ModelConfig
from worker_svc.core.models.spec import (
    AttentionSpec,
    DeltaRuleSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    Mixer,
    RopeSpec,
    StoredRows,
    TemperatureSpec,
)
from worker_svc.factory import load_runner
from worker_svc.model_config import read_model_config
from worker_svc.runner_options import RunnerOptions

GLM, QWEN = "glm4_moe_groups_and_correction", "qwen2_moe_renormalised_windows"
GPT = "gpt_oss_sinks"
LLAMA, SPARSE_LLAMA = "llama4_chunks_and_temperature", "llama4_some_dense"
DEEPSEEK_2, DEEPSEEK_3 = "deepseek_v2_groups", "deepseek_v3_biases"
NEXT, NEXT_DENSE, QWEN3_5 = "qwen3_next_states", "qwen3_next_some_dense", "qwen3_5_states"
PROPORTIONAL = "qwen3_proportional"
BY_NAME = {variant.name: variant for variant in VARIANTS}
# Logprobs that are right are off by less than a hundredth of that.
SEEN = 1e-2


def of_router(**changes: Any) -> Callable[[Mixer], Mixer]:
    def change(mixer: Mixer) -> Mixer:
        is_mixture = isinstance(mixer, ExpertsSpec)
        return replace(mixer, router=replace(mixer.router, **changes)) if is_mixture else mixer

    return change


def of_experts(**changes: Any) -> Callable[[Mixer], Mixer]:
    return lambda mixer: replace(mixer, **changes) if isinstance(mixer, ExpertsSpec) else mixer


def of_latent(**changes: Any) -> Callable[[Mixer], Mixer]:
    return lambda mixer: replace(mixer, **changes) if isinstance(mixer, LatentAttentionSpec) else mixer


def of_delta(**changes: Any) -> Callable[[Mixer], Mixer]:
    return lambda mixer: replace(mixer, **changes) if isinstance(mixer, DeltaRuleSpec) else mixer


def of_delta_rows(**names: str) -> Callable[[Mixer], Mixer]:
    """Projections in the place of others."""

    def change(mixer: Mixer) -> Mixer:
        if not isinstance(mixer, DeltaRuleSpec):
            return mixer
        return replace(mixer, **{name: getattr(mixer, other) for name, other in names.items()})

    return change


def of_delta_norm(**changes: Any) -> Callable[[Mixer], Mixer]:
    def change(mixer: Mixer) -> Mixer:
        return replace(mixer, norm=replace(mixer.norm, **changes)) if isinstance(mixer, DeltaRuleSpec) else mixer

    return change


def of_gates(**names: str) -> Callable[[Mixer], Mixer]:
    def change(mixer: Mixer) -> Mixer:
        if not isinstance(mixer, AttentionSpec):
            return mixer
        return replace(mixer, **{name: getattr(mixer, other) for name, other in names.items()})

    return change


def of_chunks(**changes: Any) -> Callable[[Mixer], Mixer]:
    return lambda mixer: replace(mixer, **changes) if isinstance(mixer, AttentionSpec) and mixer.chunk else mixer


def of_temperature(temperature: TemperatureSpec | None) -> Callable[[Mixer], Mixer]:
    def change(mixer: Mixer) -> Mixer:
        is_tempered = isinstance(mixer, AttentionSpec) and mixer.temperature is not None
        return replace(mixer, temperature=temperature) if is_tempered else mixer

    return change


def of_rope(**changes: Any) -> Callable[[Mixer], Mixer]:
    def change(mixer: Mixer) -> Mixer:
        is_turned = isinstance(mixer, AttentionSpec | LatentAttentionSpec) and mixer.rope is not None
        return replace(mixer, rope=replace(mixer.rope, **changes)) if is_turned else mixer

    return change


def of_norm(name: str) -> Callable[[Mixer], Mixer]:
    def change(mixer: Mixer) -> Mixer:
        if not isinstance(mixer, LatentAttentionSpec):
            return mixer
        return replace(mixer, **{name: replace(getattr(mixer, name), eps=1.0)})

    return change


def changed(config: ModelConfig, change: Callable[[Mixer], Mixer], unused: str | tuple[str, ...]) -> ModelConfig:
    """The model with other mixers; tensors that these do without are left out."""

    layers = tuple(
        tuple(replace(sublayer, mixers=tuple(map(change, sublayer.mixers))) for sublayer in layer)
        for layer in config.decoder.layers
    )
    names = (unused,) if isinstance(unused, str) else unused
    prefixes = tuple(f"model.layers.{layer}.{name}" for layer in range(len(layers)) for name in names if name)
    assert layers != config.decoder.layers
    return replace(config, decoder=replace(config.decoder, layers=layers, unused_prefixes=prefixes))


@pytest.mark.parametrize(
    ("name", "change", "unused"),
    [
        (GLM, of_router(score="softmax"), ""),
        (GLM, of_router(renormalizes=False), ""),
        (GLM, of_router(scale=1.0), ""),
        (GLM, of_router(correction=None), "mlp.gate.e_score_correction_bias"),
        (GLM, of_router(num_groups=1, num_chosen_groups=1), ""),
        (GLM, of_router(num_chosen_groups=3), ""),
        (GLM, of_router(top_k=2), ""),
        (GLM, of_experts(shared=None), "mlp.shared_experts."),
        (QWEN, of_router(renormalizes=False), ""),
        (QWEN, of_experts(shared_gate=None), "mlp.shared_expert_gate."),
        (GPT, of_router(has_bias=False), "mlp.router.bias"),
        (DEEPSEEK_2, of_router(num_group_scores=2), ""),
        (LLAMA, of_chunks(chunk=None), ""),
        (LLAMA, of_chunks(chunk=21), ""),
        (LLAMA, of_chunks(chunk=None, window=20), ""),
        (LLAMA, of_chunks(query_norm=None, key_norm=None), ""),
        (LLAMA, of_temperature(None), ""),
        (LLAMA, of_temperature(TemperatureSpec(9, 0.3)), ""),
        (LLAMA, of_temperature(TemperatureSpec(8, 0.4)), ""),
        (LLAMA, of_router(weighs_inputs=False), ""),
        (LLAMA, of_router(score="softmax"), ""),
        (LLAMA, of_rope(is_paired=False), ""),
        (LLAMA, of_experts(shared=None), "feed_forward.shared_expert."),
        (SPARSE_LLAMA, of_chunks(chunk=None), ""),
        (SPARSE_LLAMA, of_router(weighs_inputs=False), ""),
        (DEEPSEEK_3, of_latent(scale=None), ""),
        (DEEPSEEK_3, of_latent(has_bias=False), ("self_attn.q_a_proj.bias", "self_attn.kv_a_proj_with_mqa.bias")),
        (DEEPSEEK_3, of_latent(has_output_bias=False), "self_attn.o_proj.bias"),
        (DEEPSEEK_3, of_norm("down_norm"), ""),
        (DEEPSEEK_3, of_norm("query_norm"), ""),
        (DEEPSEEK_3, of_rope(is_paired=False), ""),
        (DEEPSEEK_3, of_rope(attention_factor=1.0), ""),
        (DEEPSEEK_3, of_latent(rope=None), ""),
        (DEEPSEEK_3, of_latent(rope=RopeSpec(dims=16, is_paired=True)), ""),
        (NEXT, of_delta_rows(query="key", key="query"), ""),
        (NEXT, of_delta_rows(value="gate", gate="value"), ""),
        (NEXT, of_delta_rows(beta="decay", decay="beta"), ""),
        (NEXT, of_delta_rows(decay_rate="decay_bias", decay_bias="decay_rate"), ""),
        (NEXT, of_delta_norm(eps=1.0), ""),
        (NEXT, of_delta_norm(offset=1.0), ""),
        (NEXT, of_gates(query="gate", gate="query"), ""),
        (NEXT, of_rope(dims=8), ""),
        (NEXT, of_router(renormalizes=False), ""),
        (NEXT_DENSE, of_router(renormalizes=True), ""),
        (QWEN3_5, of_delta_rows(query="key", key="query"), ""),
        (QWEN3_5, of_delta_rows(beta="decay", decay="beta"), ""),
        (QWEN3_5, of_rope(dims=4), ""),
        (QWEN3_5, of_delta(query=StoredRows("model.layers.0.linear_attn.in_proj_qkv", 2, 160)), ""),
        (PROPORTIONAL, of_rope(turning_pairs=12), ""),
        (PROPORTIONAL, of_rope(factor=1.0), ""),
        (PROPORTIONAL, of_rope(rope_type="default", dims=6), ""),
    ],
    ids=[
        *("score", "renormalizes", "scale", "correction", "groups", "chosen_groups", "top_k", "shared"),
        *("renormalizes_softmax", "shared_gate", "bias"),
        "group_scores",
        *("chunk", "chunk_size", "window", "head_norms", "temperature", "floor_scale", "attn_scale"),
        *("weighs_inputs", "score_of_inputs", "is_paired_4", "shared_4", "chunk_unrotated", "weighs_inputs_of_one"),
        *("scale", "biases", "output_bias", "down_norm", "query_norm"),
        *("is_paired", "attention_factor", "no_rope", "yarn"),
        *("query", "gate", "beta", "decay_rate", "norm_eps", "norm_offset", "output_gate", "turning"),
        *("renormalizes_next", "plain_weights", "query_apart", "beta_apart", "turning_apart", "first_row"),
        *("turning_pairs", "factor", "of_a_part"),
    ],
)
def test_a_field_that_is_dropped_moves_logprobs(
    name: str,
    change: Callable[[Mixer], Mixer],
    unused: str | tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = save_checkpoint(tmp_path, BY_NAME[name])

    def read_changed(checkpoint: Checkpoint) -> ModelConfig:
        return changed(read_model_config(checkpoint), change, unused)

    monkeypatch.setattr(native, "read_model_config", read_changed)
    options = RunnerOptions(str(tmp_path), device="cpu", dtype="float32", max_num_seqs=1, num_blocks=32)
    loaded = load_runner(options, time.monotonic_ns)
    prompt = [3 + 7 * place % (VOCAB_SIZE - 3) for place in range(40)]
    sequence = Drive(prompt, 4, Sampling(temperature=0.0, num_logprobs=2))
    drive(loaded.runner, [sequence])
    answer = Answered.of(sequence)
    assert float(logprob_errors(expected_logprobs(model, answer), answer, 2).max()) > SEEN
