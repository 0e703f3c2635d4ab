"""Which kernels compute, and what is said about it."""

import pytest
import torch

from contract.domain.errors import ErrorCode, PenstockError
from worker_svc.core.attention.choice import Choice, choose
from worker_svc.core.kv_cache import KVCacheShape
from worker_svc.core.kv_scales import KVScales

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


def chosen(
    requested: str,
    device: torch.device = CUDA,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    num_heads: int = 32,
    *,
    has_triton: bool = True,
    has_eight_bits: bool = True,
    is_interpreted: bool = False,
    scales: KVScales | None = None,
    shares_values: bool = False,
) -> Choice:
    shape = KVCacheShape(1, 2, head_dim, 16, dtype, shares_values=shares_values, scales=scales)
    machine = {"has_triton": has_triton, "has_eight_bits": has_eight_bits, "is_interpreted": is_interpreted}
    return choose(requested, device, shape, num_heads, **machine)


def test_auto_takes_triton_for_half_precision_on_cuda() -> None:
    assert chosen("auto").name == "triton"
    assert chosen("auto", dtype=torch.float16).name == "triton"


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 120, 192, 256])
def test_triton_has_heads_whose_dimensions_are_no_power_of_two(head_dim: int) -> None:
    assert chosen("auto", head_dim=head_dim).name == "triton"


@pytest.mark.parametrize("num_heads", [2, 34, 96, 128])
def test_triton_has_up_to_64_queries_of_a_key(num_heads: int) -> None:
    assert chosen("auto", num_heads=num_heads).name == "triton"


@pytest.mark.parametrize("head_dim", [48, 72, 576])
def test_triton_has_latents_of_any_number_of_heads(head_dim: int) -> None:
    assert chosen("auto", head_dim=head_dim, num_heads=128, shares_values=True).name == "triton"


@pytest.mark.parametrize(
    ("differs", "reason"),
    [
        ({"device": CPU}, "device is cpu"),
        ({"dtype": torch.float32}, "dtype is float32"),
        ({"head_dim": 56}, "not of 56"),
        ({"head_dim": 100}, "not of 100"),
        ({"head_dim": 264}, "not of 264"),
        ({"num_heads": 130}, "more than 64 queries"),
        ({"head_dim": 578, "shares_values": True}, "up to 576 dimensions, not 578"),
        ({"has_triton": False}, "triton is not installed"),
        ({"has_eight_bits": False, "scales": KVScales.of_one(1)}, "does not convert the 8-bit floats"),
    ],
)
def test_what_triton_cannot_do_goes_to_torch_and_the_reason_is_said(differs: dict, reason: str) -> None:
    choice = chosen("auto", **differs)
    assert choice.name == "torch"
    assert reason in choice.reason
    with pytest.raises(PenstockError, match=reason) as caught:
        chosen("triton", **differs)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_only_caches_of_eight_bits_need_a_card_that_converts_them() -> None:
    assert chosen("auto", has_eight_bits=False).name == "triton"
    assert chosen("auto", scales=KVScales.of_one(1)).name == "triton"
    assert chosen("auto", dtype=torch.float32, scales=KVScales.of_one(1)).name == "torch"


def test_torch_can_always_be_asked_for() -> None:
    assert chosen("torch").name == "torch"


def test_the_interpreter_runs_anywhere_but_only_if_asked_for() -> None:
    assert chosen("triton", CPU, torch.float32, is_interpreted=True).name == "triton"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(PenstockError, match="must be auto, torch or triton"):
        chosen("flash")
