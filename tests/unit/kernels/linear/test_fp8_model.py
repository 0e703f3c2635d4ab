"""A whole model with weights of 8-bit floats by kernels and by torch: here, where the interpreter rounds to 8 bits as
devices do.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VARIANTS, save_checkpoint
from kernel_inputs import DEVICE
from plans import drive_few_and_many_rows
from quantized import BY_NAME, save_quantized
from torch import Tensor

from worker_svc.core.kernels.linear.fp8_few_rows import Fp8FewRows
from worker_svc.core.operations import fp8_multiplier
from worker_svc.factory import load_runner
from worker_svc.runner_options import RunnerOptions

VARIANT = next(each for each in VARIANTS if each.name == "qwen3_biases")
NEAR = 1e-4  # of logprobs
# Where rows are rounded, too: one that lies between two numbers of 8 bits goes to either if sums differ by an ulp.
NEAR_IF_ROUNDED = 0.3
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="on the CPU, where Triton interprets")


@pytest.mark.parametrize("format_", ["fp8_channel", "fp8_tokens", "fp8_tensor_modelopt", None])
def test_kernels_of_8_bit_floats_give_what_torch_gives(
    tmp_path: Path, format_: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, where sums differ least. Without a format: of a checkpoint that is rounded when it is read."""
    sizes = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 256}
    save_checkpoint(tmp_path / "whole", replace(VARIANT, options={**VARIANT.options, **sizes}))
    if format_ is not None:
        save_quantized(tmp_path / "whole", tmp_path / "stored", BY_NAME[format_])
    launched: set[tuple[str, bool]] = set()
    one, few = fp8_multiplier.fp8_row_linear, Fp8FewRows.multiply

    def of_one(*args: Any, **options: Any) -> Tensor:
        launched.add(("one", options["is_gated"]))
        return one(*args, **options)

    def of_few(*args: Any, **options: Any) -> Tensor:
        launched.add(("few", options["is_gated"]))
        return few(*args, **options)

    monkeypatch.setattr(fp8_multiplier, "fp8_row_linear", of_one)
    monkeypatch.setattr(Fp8FewRows, "multiply", of_few)
    found = []
    for attention in ("torch", "triton"):
        options = RunnerOptions(
            str(tmp_path / ("whole" if format_ is None else "stored")),
            device="cpu",
            dtype="float32",
            num_blocks=50,
            attention=attention,
            quantization="fp8" if format_ is None else None,
        )
        assert not launched
        loaded = load_runner(options, lambda: 0)
        sequences = drive_few_and_many_rows(loaded.runner)
        loaded.close()
        found.append(sequences)
    assert launched == {(kernel, is_gated) for kernel in ("one", "few") for is_gated in (True, False)}
    for by_torch, by_kernels in zip(*found, strict=True):
        assert by_kernels.output == by_torch.output
        pairs = zip(by_kernels.logprobs, by_torch.logprobs, strict=True)
        near = NEAR if format_ == "fp8_channel" else NEAR_IF_ROUNDED
        assert max(abs(one - other) for one, other in pairs) < near
