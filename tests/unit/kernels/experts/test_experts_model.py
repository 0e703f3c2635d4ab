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


@pytest.mark.parametrize("format_", ["mxfp4", "fp8_channel", "fp8_block_wide", "fp8_tensor_weights"])
def test_experts_as_they_are_stored_give_what_widened_ones_give(tmp_path: Path, format_: str) -> None:
    """By kernels and by torch."""
    variant = VARIANT["gpt_oss_sinks" if format_ == "mxfp4" else "glm4_moe_groups_and_correction"]
    save_checkpoint(tmp_path / "whole", replace(variant, options={**variant.options, "head_dim": 64}))
    if format_ == "mxfp4":
        save_mxfp4(tmp_path / "whole", tmp_path / "stored")
    else:
        save_quantized(tmp_path / "whole", tmp_path / "stored", BY_NAME[format_])
    found = []
    for attention in ("torch", "triton"):
        options = RunnerOptions(
            str(tmp_path / "stored"), device="cpu", dtype="float32", num_blocks=50, attention=attention
        )
        loaded = load_runner(options, lambda: 0)
        sequence = Drive(list(range(5, 45)), 1, Sampling(temperature=0.0, num_logprobs=NUM_TOP))
        drive(loaded.runner, [sequence], chunk=32)
        loaded.close()
        found.append(sequence)
    widened, kept = found
    assert kept.output == widened.output
    assert max(abs(one - other) for one, other in zip(kept.logprobs, widened.logprobs, strict=True)) < 1e-4
