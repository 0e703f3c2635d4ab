"""What computes, torch or Triton's kernels: chosen once, and the only place that knows both."""

import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch

from worker_svc.core.attention.choice import Choice, choose
from worker_svc.core.attention.torch_backend import TorchAttention
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.interface import Limits
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.models.llama import LlamaForCausalLM
from worker_svc.core.operations.interface import Operations
from worker_svc.core.operations.torch_operations import TorchOperations
from worker_svc.core.runner import ModelRunner

ALL_GRAPHS = sys.maxsize

_log = logging.getLogger(__name__)


def _nobody(_done: int, _total: int) -> None:
    """Observes nothing."""


class Compute(Protocol):
    """Operations for a model's layers, and runners over that model."""

    name: str
    reason: str  # why this one
    operations: Operations

    def make_runner(
        self,
        model: LlamaForCausalLM,
        cache: KVCache,
        num_heads: int,
        limits: Limits,
        clock_ns: Callable[[], int],
        *,
        num_graphs: int,
        observe: Callable[[int, int], None] = _nobody,
    ) -> ModelRunner:
        """A runner over `model` and a `cache` of one block more than `limits` says.

        num_heads are this rank's query heads; num_graphs: of the decode steps that can be recorded on CUDA, so many are
        before it returns, the largest first. `observe` is told how many are, and of how many that can be, before the
        first and after each.
        """


class TorchCompute:
    """See `Compute`: the reference, in any dtype on any device."""

    name = "torch"

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.operations: Operations = TorchOperations()

    def make_runner(
        self,
        model: LlamaForCausalLM,
        cache: KVCache,
        num_heads: int,
        limits: Limits,
        clock_ns: Callable[[], int],
        *,
        num_graphs: int,  # noqa: ARG002  (its steps allocate as they go and cannot be recorded)
        observe: Callable[[int, int], None] = _nobody,  # noqa: ARG002
    ) -> ModelRunner:
        """See `Compute.make_runner`."""
        return ModelRunner(model, cache, TorchAttention(cache, num_heads, model.rotary), limits, clock_ns)


class TritonCompute:
    """See `Compute`: own kernels, and decode steps that run on device state."""

    name = "triton"

    def __init__(self, reason: str) -> None:
        from worker_svc.core.operations.triton_operations import TritonOperations  # noqa: PLC0415  (imports triton)

        self.reason = reason
        self.operations: Operations = TritonOperations()

    def make_runner(
        self,
        model: LlamaForCausalLM,
        cache: KVCache,
        num_heads: int,
        limits: Limits,
        clock_ns: Callable[[], int],
        *,
        num_graphs: int,
        observe: Callable[[int, int], None] = _nobody,
    ) -> ModelRunner:
        """See `Compute.make_runner`."""
        from worker_svc.core.attention.triton_backend import TritonAttention  # noqa: PLC0415  (these import triton)
        from worker_svc.core.decode_step import DecodeStep, StepDecoder  # noqa: PLC0415
        from worker_svc.core.graphs import DecodeGraphs  # noqa: PLC0415

        attention = TritonAttention(cache, num_heads, model.rotary, limits.max_num_seqs)

        def make_decoder(slots: DeviceSlots) -> StepDecoder:
            step = DecodeStep(model, attention, slots)
            if num_graphs == 0 or cache.keys.device.type != "cuda":
                return StepDecoder(step)
            graphs = DecodeGraphs(step)
            started_ns = clock_ns()
            graphs.capture(num_graphs, observe)
            _log.info("decode graphs captured", extra={"seconds": round((clock_ns() - started_ns) / 1e9, 2)})
            return graphs

        return ModelRunner(model, cache, attention, limits, clock_ns, make_decoder=make_decoder)


def choose_compute(requested: str, device: torch.device, shape: KVCacheShape, num_heads: int) -> Compute:
    """See `choose`.

    Raises:
        PenstockError: INVALID_ARGUMENT, what was asked for by name cannot be had.
    """
    has_triton = find_spec("triton") is not None
    choice = choose(
        requested,
        device,
        shape,
        num_heads,
        has_triton=has_triton,
        is_interpreted=has_triton and requested == "triton" and _is_interpreted(),
    )
    return _compute(choice)


def _compute(choice: Choice) -> Compute:
    return TritonCompute(choice.reason) if choice.name == "triton" else TorchCompute(choice.reason)


def _is_interpreted() -> bool:
    from worker_svc.core.kernels.launch import INTERPRETED  # noqa: PLC0415  (imports triton)

    return INTERPRETED
