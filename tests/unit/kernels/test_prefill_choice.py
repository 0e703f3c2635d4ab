"""Who attends for long chunks of prompts: what is asked for, what there is, and what is said about it."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICE, LINES
from plans import drive
from runner_configs import CONFIG
from test_triton_runner import PLAIN, make_runner, sequences
from torch import Tensor

from contract.domain.errors import ErrorCode, PenstockError
from worker_svc import compute
from worker_svc.compute import Compute, TritonCompute, choose_compute
from worker_svc.core.attention.flash_attention import FlashAttention
from worker_svc.core.distributed import Group
from worker_svc.core.kv_cache import KVCacheShape
from worker_svc.core.kv_scales import KVScales

HOPPER, AMPERE = (9, 0), (8, 0)
CHOSEN = "prefill attention chosen"

in_the_interpreter = pytest.mark.skipif(DEVICE.type == "cuda", reason="the small model is in fp32")


def attend(query: Tensor, *_rest: object) -> Tensor:
    return torch.zeros_like(query)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[FlashAttention]:
    """The packages that there are: one; tests may take it away."""
    packages = [FlashAttention("flash-attn-9", attend, is_recordable=False)]
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # so that it is as before afterwards

    def find(_block_size: int, observe: Callable[[str, str], None]) -> FlashAttention | None:
        observe("flash-attn-10", "OSError: built for another machine")
        return packages[0] if packages else None

    monkeypatch.setattr(compute, "find_flash_attention", find)
    return packages


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    prefill: str,
    capability: tuple[int, int],
    head_dim: int,
    requested: str = "auto",
    *,
    scales: KVScales | None = None,
    shares_values: bool = False,
    num_heads: int = 8,
) -> Compute:
    """What is chosen on a GPU of that kind, once its packages are imported."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(compute, "find_lines", lambda *_: LINES)
    shape = KVCacheShape(1, 2, head_dim, 16, torch.bfloat16, shares_values=shares_values, scales=scales)
    found = choose_compute(requested, prefill, torch.device("cuda", 0), shape, num_heads, products=())
    if isinstance(found, TritonCompute) and found._flash is not None:
        found._flash.result()
    return found


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Who was chosen, and why, as the log has it."""
    records: list[Any] = [record for record in caplog.records if record.message == CHOSEN]
    return [(record.attention, record.reason) for record in records]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("auto", HOPPER, 64), ("flash-attn-9", "installed")),
        (("auto", HOPPER, 128), ("flash-attn-9", "installed")),
        (("auto", HOPPER, 256), ("triton", "FlashAttention was not measured with heads of 256 dimensions")),
        (("auto", AMPERE, 128), ("triton", "FlashAttention was measured on a Hopper only")),
        (("triton", HOPPER, 128), ("triton", "asked for")),
        (("flash_attn", HOPPER, 128), ("flash-attn-9", "asked for")),
        (("flash_attn", AMPERE, 256), ("flash-attn-9", "asked for")),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_package_attends_where_it_was_measured_or_asked_for(
    asked: tuple[str, tuple[int, int], int],
    expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    found = chosen(monkeypatch, *asked)
    name, _ = expected
    assert found.name == ("triton" if name == "triton" else f"triton, prefill {name}")
    assert said(caplog) == [expected]


def test_without_a_package_the_own_kernel_attends_and_the_broken_one_is_named(
    installed: list[FlashAttention], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    installed.clear()
    assert chosen(monkeypatch, "auto", HOPPER, 128).name == "triton"
    assert said(caplog) == [("triton", "no package can be imported that suits blocks of 16 tokens")]
    [broken] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert broken.__dict__["reason"] == "flash-attn-10: OSError: built for another machine"


def test_a_package_that_is_asked_for_and_not_there_is_refused_with_what_would_do(
    installed: list[FlashAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.clear()
    with pytest.raises(PenstockError, match=r"flash-attn-10: OSError.*flash-attn-2 needs a multiple of 256") as caught:
        chosen(monkeypatch, "flash_attn", HOPPER, 128)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.usefixtures("installed")
def test_where_torch_computes_it_attends_and_a_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert chosen(monkeypatch, "triton", HOPPER, 128, "torch").name == "torch"
    assert said(caplog) == [("torch", "torch computes all attention")]
    with pytest.raises(PenstockError, match="is flash_attn, but torch computes"):
        chosen(monkeypatch, "flash_attn", HOPPER, 128, "torch")
    assert "no kernels for this model" not in caplog.text, "it was asked for"


@pytest.mark.usefixtures("installed")
def test_that_a_model_has_no_kernels_on_a_gpu_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(monkeypatch, "auto", HOPPER, 128, num_heads=130).name == "torch"
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.message.startswith("no kernels for this model")
    assert "more than 64 queries" in warning.__dict__["reason"]


@pytest.mark.usefixtures("installed")
def test_no_package_is_given_eight_bits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scales = KVScales.of_one(1)
    assert chosen(monkeypatch, "auto", HOPPER, 128, scales=scales).name == "triton"
    assert said(caplog) == [("triton", "FlashAttention is not given 8-bit floats")]
    with pytest.raises(PenstockError, match="is flash_attn, but the KV cache has 8-bit floats") as caught:
        chosen(monkeypatch, "flash_attn", HOPPER, 128, scales=scales)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "prefill_attention")


@pytest.mark.usefixtures("installed")
def test_a_package_that_was_slower_attends_only_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert chosen(monkeypatch, "auto", HOPPER, 128, num_heads=10).name == "triton"
    assert chosen(monkeypatch, "flash_attn", HOPPER, 128, num_heads=10).name == "triton, prefill flash-attn-9"
    reason = "FlashAttention was slower with more than 4 queries of a key"
    assert said(caplog) == [("triton", reason), ("flash-attn-9", "asked for")]


@pytest.mark.usefixtures("installed")
def test_no_package_is_given_latents(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert chosen(monkeypatch, "auto", HOPPER, 64, shares_values=True).name == "triton"
    assert said(caplog) == [("triton", "FlashAttention is not given latents")]
    with pytest.raises(PenstockError, match="is flash_attn, but the model has latent attention") as caught:
        chosen(monkeypatch, "flash_attn", HOPPER, 64, shares_values=True)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "prefill_attention")


def test_no_package_attends_off_a_gpu() -> None:
    shape = KVCacheShape(1, 2, 64, 16, torch.float32)
    with ThreadPoolExecutor(1) as packages, pytest.raises(PenstockError, match="the device is cpu"):
        compute._look_for_flash_attention("flash_attn", torch.device("cpu"), shape, 2, packages)


def with_package(error: Exception, *, needs_flash: bool = False) -> TritonCompute:
    """A package that was imported, and whose calls fail."""

    def fail(*_tensors: object) -> Tensor:
        raise error

    flash: Future[FlashAttention | None] = Future()
    flash.set_result(FlashAttention("flash-attn-9", fail, is_recordable=True))
    return TritonCompute("", DEVICE, LINES, flash, needs_flash=needs_flash)


@in_the_interpreter
def test_a_package_whose_first_call_fails_is_left_for_the_own_kernel(caplog: pytest.LogCaptureFixture) -> None:
    both = with_package(TypeError("no such argument")), TritonCompute("", DEVICE, LINES)
    outputs = []
    for each in both:
        drives = sequences(PLAIN[:2])
        drive(make_runner(CONFIG, each), drives)
        outputs.append([one.output for one in drives])
    assert outputs[0] == outputs[1]
    assert both[0].name == "triton"
    assert said(caplog) == [("triton", "the first call of flash-attn-9 failed: TypeError: no such argument")]


@pytest.mark.usefixtures("installed")
def test_no_graph_is_recorded_for_a_package_whose_first_call_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_attend: object) -> None:
        raise RuntimeError("no kernel image")

    attention: Any = SimpleNamespace(takes_flash=True, use_flash=fail)
    unasked, asked = (chosen(monkeypatch, prefill, HOPPER, 128) for prefill in ("auto", "flash_attn"))
    assert isinstance(unasked, TritonCompute)
    assert unasked._use_flash(attention, Group(), torch.device("cpu")) is None
    assert isinstance(asked, TritonCompute)
    with pytest.raises(PenstockError, match="is flash_attn, but the first call"):
        asked._use_flash(attention, Group(), torch.device("cpu"))


@in_the_interpreter
def test_a_package_that_was_asked_for_must_work() -> None:
    with pytest.raises(
        PenstockError, match=r"flash_attn, but the first call of flash-attn-9 failed: .*image"
    ) as caught:
        make_runner(CONFIG, with_package(RuntimeError("no kernel image"), needs_flash=True))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@in_the_interpreter
def test_memory_that_is_short_at_the_first_call_is_said_to_be_short() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        make_runner(CONFIG, with_package(torch.OutOfMemoryError("2 GiB")))
