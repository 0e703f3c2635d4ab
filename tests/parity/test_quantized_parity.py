"""Quantized checkpoints against who else reads them: transformers' classes with the weights that are stood for, its own
conversions of 8-bit blocks and of MXFP4, and the package compressed-tensors.
"""

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VARIANTS, VOCAB_SIZE, save_checkpoint
from environments import CLIENTS, python_with
from plans import Drive, drive
from quantized import BY_NAME, CASES, Case, fp8_block, round_inputs, save_mxfp4, save_quantized
from safetensors.torch import load_file
from teacher import Answered, expected_logprobs, logprob_errors
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from contract.domain.params import Sampling
from worker_svc.core.distributed import Group
from worker_svc.core.formats.fp8_block import Fp8BlockFormat
from worker_svc.core.layers.placement import Placement, StoredPart
from worker_svc.core.quantization.choice import parse_quantization
from worker_svc.core.quantization.spec import Fp8BlockSpec
from worker_svc.factory import load_runner
from worker_svc.runner_options import RunnerOptions
from worker_svc.weights import load_weights

NUM_TOP = 5
VARIANT = {variant.name: variant for variant in VARIANTS}
WIDENED = [case for case in CASES if case.logits_differ <= 1e-4]
ROUNDED = [case for case in CASES if case.logits_differ > 1e-4]
# Heads that are tied and are not, biases, projections that share a tensor, experts.
NAMES = (
    "llama_llama3_rope_tied",
    "qwen3_biases",
    "phi3_packed",
    "qwen2_moe_shared",
    "glm4_moe_groups_and_correction",
    "deepseek_v3_biases",
)
PAIRS = [(NAMES[number % len(NAMES)], case) for number, case in enumerate(WIDENED)]
# Heads that stand together in a tensor.
PAIRS += [("qwen3_next_states", case) for case in WIDENED]
# As it is published.
PAIRS += [("minimax_m2_half_turns", case) for case in WIDENED if case.name == "fp8_block"]


def answers_of(directory: Path, prompts: list[list[int]], num_tokens: int) -> list[Answered]:
    """What the checkpoint says after each prompt: greedy tokens and logprobs."""
    options = RunnerOptions(str(directory), device="cpu", dtype="float32", num_blocks=100)
    loaded = load_runner(options, lambda: 0)
    sequences = [Drive(prompt, num_tokens, Sampling(temperature=0.0, num_logprobs=NUM_TOP)) for prompt in prompts]
    drive(loaded.runner, sequences, chunk=32, stagger=1)
    loaded.close()
    return [Answered.of(sequence) for sequence in sequences]


def prompts_of(lengths: Iterable[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def save_both(directory: Path, name: str, case: Case) -> PreTrainedModel:
    """The variant quantized, in `stored`, and the model of the weights that are stood for, which is in `dense`."""
    save_checkpoint(directory / "whole", VARIANT[name])
    save_quantized(directory / "whole", directory / "stored", case, dense=directory / "dense")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory / "dense", dtype=torch.float32, attn_implementation="eager"
    )
    return model


def assert_like(model: PreTrainedModel, directory: Path) -> None:
    """Greedy tokens and logprobs of the checkpoint are the model's."""
    for answer in answers_of(directory, prompts_of((1, 17, 60)), num_tokens=4):
        expected = expected_logprobs(model, answer)
        assert answer.token_ids == expected.argmax(-1).tolist()
        assert float(logprob_errors(expected, answer, NUM_TOP).max()) < 1e-4


@pytest.mark.parametrize(("name", "case"), PAIRS, ids=[f"{name}-{case.name}" for name, case in PAIRS])
def test_quantized_checkpoints_are_what_transformers_makes_of_their_weights(
    tmp_path: Path, name: str, case: Case
) -> None:
    dense = save_both(tmp_path, name, case)
    assert_like(dense, tmp_path / "stored")


@pytest.mark.parametrize("name", ["llama_llama3_rope_tied", "qwen3_biases", "phi3_packed", "gemma2_caps_and_windows"])
@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)
def test_rounded_inputs_are_those_of_transformers_classes_that_round_them(
    tmp_path: Path, name: str, case: Case
) -> None:
    dense = save_both(tmp_path, name, case)
    round_inputs(dense)
    # Of short prompts: an input that lies between two numbers of 8 bits up to rounding may become the other one, and
    # all tokens after it are then others. Without rounding none is as near.
    answers = answers_of(tmp_path / "stored", prompts_of(number % 6 + 1 for number in range(30)), num_tokens=2)
    errors = [float(logprob_errors(expected_logprobs(dense, each), each, NUM_TOP).max()) for each in answers]
    assert sum(error < 1e-4 for error in errors) >= 24


@pytest.mark.parametrize("format_", ["fp8_channel", "packed_4_bits_groups"])
def test_a_part_of_a_product_may_be_stored_as_floats(tmp_path: Path, format_: str) -> None:
    """As the smallest projections of the delta rule are."""
    save_checkpoint(tmp_path / "whole", VARIANT["qwen3_next_states"])
    case, directory = BY_NAME[format_], tmp_path / "stored"
    config = {**case.config, "ignore": ["lm_head", "re:.*in_proj_ba$"]}
    save_quantized(tmp_path / "whole", directory, case, dense=tmp_path / "dense", config=config, ignored="in_proj_ba")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32, attn_implementation="eager")
    assert_like(dense, tmp_path / "stored")


@pytest.mark.parametrize(
    ("format_", "config"),
    [
        ("gptq_4_bits", {"lm_head": True}),
        ("fp8_channel", {"ignore": []}),
        ("packed_4_bits_zeros", {"ignore": ["re:.*embed.*"]}),
    ],
)
def test_a_head_may_be_quantized(tmp_path: Path, format_: str, config: dict[str, Any]) -> None:
    save_checkpoint(tmp_path / "whole", VARIANT["qwen3_biases"])
    case, directory = BY_NAME[format_], tmp_path / "stored"
    described = {**case.config, **config}
    save_quantized(tmp_path / "whole", directory, case, dense=tmp_path / "dense", config=described, has_head=True)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32, attn_implementation="eager")
    assert not dense.config.tie_word_embeddings
    assert_like(dense, tmp_path / "stored")


def test_experts_of_gpt_oss_as_published_are_those_that_transformers_reads(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "whole", VARIANT["gpt_oss_sinks"])
    save_mxfp4(tmp_path / "whole", tmp_path / "stored")
    widening = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "stored", quantization_config=widening, dtype=torch.float32, attn_implementation="eager"
    )
    assert_like(model, tmp_path / "stored")


def test_blocks_are_widened_as_transformers_does() -> None:
    stored = fp8_block(torch.randn(48, 64), 16, 32, "weight_scale_inv")
    (expected,) = Fp8Dequantize(None).convert(dict(stored)).values()
    torch.testing.assert_close(Fp8BlockFormat(Fp8BlockSpec(16, 32, "weight_scale_inv")).widen(stored), expected)


@pytest.fixture(scope="session")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that `compressed_tensors_calls.py` writes."""
    folder = tmp_path_factory.mktemp("compressed")
    command = [str(python_with("compressed-tensors")), str(CLIENTS / "compressed_tensors_calls.py"), str(folder)]
    environ = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize(
    "scheme",
    [
        "w4a16",
        "w4a16_asymmetric",
        "w8a16",
        "w8a8_int",
        "fp8_dynamic",
        "fp8_tensor",
        "fp8_block",
        "nvfp4a16",
        "mxfp4a16",
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_compressed_tensors_writes_is_read_as_it_reads_it(compressed: Path, scheme: str, world_size: int) -> None:
    quantization = parse_quantization(json.loads((compressed / f"{scheme}.json").read_text()))
    folder = compressed / scheme
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes((compressed / f"{scheme}.stored.safetensors").read_bytes())
    expected = load_file(compressed / f"{scheme}.safetensors")["weight"]
    found = []
    for rank in range(world_size):
        group = Group(rank, world_size)
        placement = Placement(torch.device("cpu"), torch.float32, group, quantization=quantization)
        columns = placement.columns(64)
        weight = torch.empty(48, columns.stop - columns.start)
        part = StoredPart("layer", (48, 64), slice(0, 48), columns)
        placement.want_weight(part, weight)
        load_weights(folder, placement.wanted, placement.conversions, unused_suffixes=quantization.unused)
        found.append(weight)
    # That package multiplies scales of floats of 4 bits in bfloat16.
    closeness = {"rtol": 2**-7, "atol": 1e-5} if scheme == "nvfp4a16" else {}
    torch.testing.assert_close(torch.cat(found, 1), expected, **closeness)
