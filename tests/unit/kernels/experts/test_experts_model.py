"""A whole model with experts as they are stored, by kernels and by torch."""

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import VARIANTS, save_checkpoint
from kernel_inputs import DEVICE
from plans import Drive, drive
from quantized import BY_NAME, save_mxfp4, save_quantized

from contract.domain.params import Sampling
from worker_svc.factory import load_runner
from worker_svc.runner_options import RunnerOptions

VARIANT = {each.name: each for each in VARIANTS}
NUM_TOP = 5
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="on the CPU, where Triton interprets")


GLM4 = "glm4_moe_groups_and_correction"
QWEN3 = "qwen3_moe_renormalised"


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(
    ("format_", "name", "kept"),
    [
        ("mxfp4", "gpt_oss_sinks", "fp4"),
        ("fp8_channel", GLM4, None),
        *((each, GLM4, "float8_e4m3fn") for each in ("fp8_block_wide", "fp8_tensor_weights")),
        *((each, QWEN3, "int4") for each in ("awq", "awq_published", "gptq_published", "packed_4_bits_zeros")),
    ],
)
def test_experts_as_they_are_stored_give_what_widened_ones_give(
    tmp_path: Path, format_: str, name: str, kept: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """By kernels, of many rows and of one, and by torch, which widens them."""
    caplog.set_level("INFO")
    variant = VARIANT[name]
    sizes = {"head_dim": 64, **({"hidden_size": 128, "moe_intermediate_size": 208} if name == QWEN3 else {})}
    save_checkpoint(tmp_path / "whole", replace(variant, options={**variant.options, **sizes}))
    if format_ == "mxfp4":
        save_mxfp4(tmp_path / "whole", tmp_path / "stored")
    else:
        save_quantized(tmp_path / "whole", tmp_path / "stored", BY_NAME[format_])
    found, sizes_of_weights = [], []
    for attention in ("torch", "triton"):
        options = RunnerOptions(
            str(tmp_path / "stored"), device="cpu", dtype="float32", num_blocks=50, attention=attention
        )
        loaded = load_runner(options, lambda: 0)
        sequence = Drive(list(range(5, 38)), 1, Sampling(temperature=0.0, num_logprobs=NUM_TOP))
        drive(loaded.runner, [sequence], chunk=32)
        sizes_of_weights.append(loaded.profile.weights_bytes)
        loaded.close()
        found.append(sequence)
    by_torch, by_kernels = found
    assert by_kernels.output == by_torch.output
    assert max(abs(one - other) for one, other in zip(by_kernels.logprobs, by_torch.logprobs, strict=True)) < 1e-4
    assert sizes_of_weights[1] < sizes_of_weights[0]
    told = [each.__dict__["to"] for each in caplog.records if each.message == "weights converted"]
    assert (kept in told) == (kept is not None)  # what is not converted is not told of
