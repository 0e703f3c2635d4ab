"""A runner whose keys and values are kept in 8 bits gives the tokens of the reference."""

import pytest
from kernel_inputs import DEVICE, LINES
from plans import drive
from runner_configs import CONFIG, GPT_OSS, LLAMA4, changed
from test_triton_runner import make_runner, sequences

from contract.domain.params import Sampling
from worker_svc.compute import TorchCompute, TritonCompute
from worker_svc.core.attention.triton_backend import TritonAttention
from worker_svc.core.config import ModelConfig
from worker_svc.core.kernels.attention import decode
from worker_svc.core.kernels.attention.tuning import Shares
from worker_svc.core.kv_scales import KVScales
from worker_svc.core.runner import ModelRunner

pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="exact in the interpreter only"),
    pytest.mark.usefixtures("large_tiles"),
]


def check(config: ModelConfig) -> ModelRunner:
    """The runner that was held against the reference. Numbers that lie between two of 8 bits, but for rounding, may be
    kept as either.
    """
    runs = []
    for compute in (TorchCompute(""), TritonCompute("", DEVICE, LINES)):
        drives = sequences([Sampling(temperature=0.0, num_logprobs=1)] * 6)
        runner = make_runner(config, compute, scales=KVScales((0.01, 0.3), (0.02, 0.005)))
        assert drive(runner, drives, chunk=24, window=2, stagger=2).num_mixed > 0
        runs.append(drives)
    assert [each.output for each in runs[1]] == [each.output for each in runs[0]]
    for reference, fused in zip(*runs, strict=True):
        assert fused.logprobs == pytest.approx(reference.logprobs, abs=2e-2)
    return runner


@pytest.mark.parametrize("config", [CONFIG, changed(**GPT_OSS), changed(**LLAMA4)], ids=["qwen3", "gpt_oss", "llama4"])
def test_tokens_are_those_of_the_reference_where_eight_bits_are_kept(config: ModelConfig) -> None:
    check(config)


def test_eight_bits_are_kept_and_read_alike_whoever_ends_the_heads_of_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside chunks the heads of decodes are ended with theirs; both have the scales of the cache."""
    monkeypatch.setattr(decode, "find_shares", lambda *_: Shares(3, 16, 3, 2, 1))
    attention = check(CONFIG)._attention
    assert isinstance(attention, TritonAttention)
    assert attention.takes_finished(3)
