"""The comparison with transformers sees every field of a mixture of experts: without it, logprobs are others."""

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
from worker_svc import factory
from worker_svc.core.config import ModelConfig
from worker_svc.core.models.spec import ExpertsSpec, Mixer
from worker_svc.model_config import read_model_config
from worker_svc.runner_options import RunnerOptions

GLM, QWEN = "glm4_moe_groups_and_correction", "qwen2_moe_renormalised_windows"
GPT = "gpt_oss_sinks"
BY_NAME = {variant.name: variant for variant in VARIANTS}
# Logprobs that are right are off by less than a hundredth of that.
SEEN = 1e-2


def of_router(**changes: Any) -> Callable[[ExpertsSpec], ExpertsSpec]:
    return lambda spec: replace(spec, router=replace(spec.router, **changes))


def of_experts(**changes: Any) -> Callable[[ExpertsSpec], ExpertsSpec]:
    return lambda spec: replace(spec, **changes)


def changed(config: ModelConfig, change: Callable[[ExpertsSpec], ExpertsSpec], unused: str) -> ModelConfig:
    """The model with other mixtures; tensors that these do without are left out."""

    def of(mixer: Mixer) -> Mixer:
        return change(mixer) if isinstance(mixer, ExpertsSpec) else mixer

    layers = tuple(
        tuple(replace(sublayer, mixers=tuple(map(of, sublayer.mixers))) for sublayer in layer)
        for layer in config.decoder.layers
    )
    prefixes = tuple(f"model.layers.{layer}.mlp.{unused}" for layer in range(len(layers))) if unused else ()
    assert layers != config.decoder.layers
    return replace(config, decoder=replace(config.decoder, layers=layers, unused_prefixes=prefixes))


@pytest.mark.parametrize(
    ("name", "change", "unused"),
    [
        (GLM, of_router(score="softmax"), ""),
        (GLM, of_router(renormalizes=False), ""),
        (GLM, of_router(scale=1.0), ""),
        (GLM, of_router(correction=None), "gate.e_score_correction_bias"),
        (GLM, of_router(num_groups=1, num_chosen_groups=1), ""),
        (GLM, of_router(num_chosen_groups=3), ""),
        (GLM, of_router(top_k=2), ""),
        (GLM, of_experts(shared=None), "shared_experts."),
        (QWEN, of_router(renormalizes=False), ""),
        (QWEN, of_experts(shared_gate=None), "shared_expert_gate."),
        (GPT, of_router(has_bias=False), "router.bias"),
    ],
    ids=[
        *("score", "renormalizes", "scale", "correction", "groups", "chosen_groups", "top_k", "shared"),
        *("renormalizes_softmax", "shared_gate", "bias"),
    ],
)
def test_a_field_that_is_dropped_moves_logprobs(
    name: str,
    change: Callable[[ExpertsSpec], ExpertsSpec],
    unused: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = save_checkpoint(tmp_path, BY_NAME[name])

    def read_changed(checkpoint: Checkpoint) -> ModelConfig:
        return changed(read_model_config(checkpoint), change, unused)

    monkeypatch.setattr(factory, "read_model_config", read_changed)
    options = RunnerOptions(str(tmp_path), device="cpu", dtype="float32", max_num_seqs=1, num_blocks=32)
    loaded = factory.load_runner(options, time.monotonic_ns)
    prompt = [3 + 7 * place % (VOCAB_SIZE - 3) for place in range(40)]
    sequence = Drive(prompt, 4, Sampling(temperature=0.0, num_logprobs=2))
    drive(loaded.runner, [sequence])
    answer = Answered.of(sequence)
    assert float(logprob_errors(expected_logprobs(model, answer), answer, 2).max()) > SEEN
