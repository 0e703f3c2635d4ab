"""The choice of torch or Triton's kernels: made once, and the only place that knows both."""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch

from contract.domain.errors import invalid
from servicekit.settings import num_cores
from worker_svc.core.attention.choice import choose
from worker_svc.core.attention.flash_attention import FlashAttention, find_flash_attention
from worker_svc.core.attention.torch_backend import TorchAttention
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.device_slots import DeviceSlots
from worker_svc.core.distributed import Group
from worker_svc.core.formats.fp8_channel import has_fp8
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.linear.product import Kind, Product
from worker_svc.core.kernels.linear.table import Line, many_rows_tiles
from worker_svc.core.kernels.linear.ways import ManyRowsTile
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.language_model import LanguageModel
from worker_svc.core.operations.interface import Operations
from worker_svc.core.operations.torch_operations import TorchOperations
from worker_svc.core.runner import ModelRunner
from worker_svc.core.states.slot_states import SlotStates
from worker_svc.tuning import find_lines

if TYPE_CHECKING:
    from worker_svc.core.attention.triton_backend import TritonAttention
    from worker_svc.core.kernels.linear.many_rows import ManyRows

ALL_GRAPHS = sys.maxsize

_log = logging.getLogger(__name__)

_PREFILL_CHOSEN = "prefill attention chosen"

_HOPPER = (9, 0)
_FLASH_HEAD_DIMS = (64, 128)
# With 8, flash-attn-4 took 1.06 s for prompts of Qwen3-30B-A3B for which the own kernel took 0.92 (H200); with 4, of
# Qwen3-8B, it is faster.
_MOST_FLASH_QUERIES = 4
_MOST_COMPILING = 16  # kernels at a time


def _nobody(_done: int, _total: int) -> None:
    """Observes nothing."""


class Compute(Protocol):
    """Operations for a model's layers, and runners over that model."""

    reason: str  # why this one
    operations: Operations

    @property
    def name(self) -> str:
        """Whose kernels compute; once there is a runner, also whose attend for long chunks of prompts, and whose
        multiply many rows.
        """

    def make_runner(
        self,
        model: LanguageModel,
        cache: KVCache,
        num_heads: int,
        limits: Limits,
        clock_ns: Callable[[], int],
        *,
        num_graphs: int,
        observe: Callable[[int, int], None] = _nobody,
        states: SlotStates | None = None,
    ) -> ModelRunner:
        """A runner over `model` and a `cache` of one block more than `limits` says, and `states` of one slot more.

        num_heads are this rank's query heads; num_graphs: of the decode steps that can be recorded on CUDA, so many are
        before it returns, the largest first. `observe` is told how many are, and of how many that can be, before the
        first and after each.
        """


class TorchCompute:
    """Implement `Compute`: the reference, in any dtype on any device."""

    name = "torch"

    def __init__(self, reason: str, device: torch.device | None = None) -> None:
        self.reason = reason
        self.operations: Operations = TorchOperations(device)

    def make_runner(
        self,
        model: LanguageModel,
        cache: KVCache,
        num_heads: int,
        limits: Limits,
        clock_ns: Callable[[], int],
        *,
        num_graphs: int,  # noqa: ARG002  (its steps allocate as they go and cannot be recorded)
        observe: Callable[[int, int], None] = _nobody,  # noqa: ARG002
        states: SlotStates | None = None,
    ) -> ModelRunner:
        """Implement `Compute.make_runner`."""
        attention = TorchAttention(cache, num_heads, model.attentions, states)
        return ModelRunner(model, cache, attention, limits, clock_ns, states=states)


class TritonCompute:
    """Implement `Compute`: own kernels, decode steps that run on device state; for long chunks of prompts `flash`."""

    def __init__(
        self,
        reason: str,
        device: torch.device,
        lines: Sequence[Line],
        flash: "Future[FlashAttention | None] | None" = None,
        many_rows: "Future[ManyRows | None] | None" = None,
        *,
        chunk_graphs: bool = False,
        needs_flash: bool = False,
    ) -> None:
        """`flash` and `many_rows` may still be on their way: what has to be imported for them takes seconds, as do
        the weights.

        lines: of the tables of tuning for `device`.
        chunk_graphs: where decode steps are recorded, small steps with chunks of prompts are, too.
        needs_flash: a package whose first call fails is an error; else the own kernel goes on attending.
        """
        from worker_svc.core.operations.triton_operations import TritonOperations  # noqa: PLC0415  (imports triton)

        self.reason = reason
        self._triton = TritonOperations(device, lines)
        self.operations: Operations = self._triton
        self._flash = flash
        self._many_rows = many_rows
        self._chunk_graphs = chunk_graphs
        self._needs_flash = needs_flash
        self._is_compiled = False

    @property
    def name(self) -> str:
        """Implement `Compute.name`."""
        flash = self._flash.result() if self._flash is not None and self._flash.done() else None
        prefill = f", prefill {flash.name}" if flash is not None else ""
        products = f", products {self._triton.dense.many_rows.name}" if self._triton.dense.many_rows is not None else ""
        return f"triton{prefill}{products}"

    def make_runner(
        self,
        model: LanguageModel,
        cache: KVCache,
        num_heads: int,
        limits: Limits,
        clock_ns: Callable[[], int],
        *,
        num_graphs: int,
        observe: Callable[[int, int], None] = _nobody,
        states: SlotStates | None = None,
    ) -> ModelRunner:
        """Implement `Compute.make_runner`."""
        from worker_svc.core.attention.triton_backend import TritonAttention  # noqa: PLC0415  (these import triton)
        from worker_svc.core.chunk_graphs import ChunkGraphs, ChunkStep, make_shapes  # noqa: PLC0415
        from worker_svc.core.decode_step import DecodeStep, StepDecoder  # noqa: PLC0415
        from worker_svc.core.graphs import DecodeGraphs  # noqa: PLC0415

        attention = TritonAttention(cache, num_heads, model.attentions, limits.max_num_seqs, states)
        if not isinstance(model, CausalLM):
            _log.info("steps are not recorded", extra={"reason": "only models of Penstock's own families are"})
            self._use_flash(attention, Group(), cache.keys.device)
            return ModelRunner(model, cache, attention, limits, clock_ns)
        own = model

        def make_chunks(slots: DeviceSlots, *, with_flash: bool) -> ChunkGraphs | None:
            if not self._chunk_graphs:
                return None
            shapes = make_shapes(
                limits,
                own.num_layer_weights,
                with_flash=with_flash,
                takes_finished=attention.takes_finished,
            )
            return ChunkGraphs(ChunkStep(own, attention, slots, limits), shapes)

        def make_decoder(slots: DeviceSlots) -> StepDecoder:
            step = DecodeStep(own, attention, slots)
            is_recorded = num_graphs > 0 and cache.keys.device.type == "cuda"
            if is_recorded and not self._is_compiled:
                # Beside the packages' import, if it still goes on; some are compiled whose work is a package's later.
                started_ns = clock_ns()
                num_threads = max(1, min(_MOST_COMPILING, int(num_cores())))
                DecodeGraphs(step, make_chunks(slots, with_flash=False)).compile(num_threads)
                self._is_compiled = True
                _log.info("kernels compiled", extra={"seconds": round((clock_ns() - started_ns) / 1e9, 2)})
            self._triton.dense.use_many_rows(self._many_rows.result() if self._many_rows is not None else None)
            flash = self._use_flash(attention, own.group, cache.keys.device)
            if not is_recorded:
                return StepDecoder(step)
            graphs = DecodeGraphs(step, make_chunks(slots, with_flash=flash is not None and flash.is_recordable))
            started_ns = clock_ns()
            graphs.capture(num_graphs, observe)
            _log.info("decode graphs captured", extra={"seconds": round((clock_ns() - started_ns) / 1e9, 2)})
            return graphs

        return ModelRunner(model, cache, attention, limits, clock_ns, make_decoder=make_decoder, states=states)

    def _use_flash(self, attention: "TritonAttention", group: Group, device: torch.device) -> FlashAttention | None:
        """Have the package that was found attend, if any was, on all ranks: who attends decides which graphs there are,
        and with these what ranks exchange.
        """
        flash = self._try_flash(attention)
        if group.is_same(0 if flash is None else 1 + flash.is_recordable, device):
            return flash
        if flash is not None:
            reason = f"another rank lacks {flash.name}, or cannot record it"
            _log.warning(_PREFILL_CHOSEN, extra={"attention": "triton", "reason": reason})
            attention.flash = self._flash = None
        return None

    def _try_flash(self, attention: "TritonAttention") -> FlashAttention | None:
        """Have the package attend on this rank: its first call shows whether it can on this machine."""
        flash = self._flash.result() if self._flash is not None else None
        if flash is None or not attention.takes_flash:
            return None
        try:
            attention.use_flash(flash.attend)
        except torch.OutOfMemoryError:  # says nothing about the package
            raise
        # It raises whatever it likes, as when it is imported.
        except Exception as error:
            reason = f"the first call of {flash.name} failed: {type(error).__name__}: {error}"
            if self._needs_flash:
                raise invalid(f"prefill_attention is flash_attn, but {reason}", "prefill_attention") from error
            _log.warning(_PREFILL_CHOSEN, extra={"attention": "triton", "reason": reason})
            self._flash = None
            return None
        return flash


def choose_compute(
    requested: str,
    prefill: str,
    device: torch.device,
    shape: KVCacheShape,
    num_heads: int,
    *,
    products: Sequence[Product],
    tuning: str | None = None,
    chunk_graphs: bool = False,
) -> Compute:
    """See `choose`; `prefill` says who attends for long chunks of prompts: auto, triton or flash_attn.

    products: of this rank's part of the model. tuning: see `find_lines`. chunk_graphs: see `TritonCompute`.

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
        has_eight_bits=has_fp8(device),
        is_interpreted=has_triton and requested == "triton" and _is_interpreted(),
    )
    if choice.name == "torch":
        if prefill == "flash_attn":
            raise invalid(f"prefill_attention is flash_attn, but torch computes ({choice.reason})", "prefill_attention")
        if tuning is not None:
            raise invalid(f"tuning is {tuning}, but torch computes ({choice.reason})", "tuning")
        _log.info(_PREFILL_CHOSEN, extra={"attention": "torch", "reason": "torch computes all attention"})
        if requested == "auto" and device.type == "cuda":
            _log.warning(
                "no kernels for this model: torch computes it, several times slower", extra={"reason": choice.reason}
            )
        return TorchCompute(choice.reason, device)
    lines = find_lines(device, tuning)
    packages = ThreadPoolExecutor(1, "packages")  # one after the other: they import much of the same
    flash = _look_for_flash_attention(prefill, device, shape, num_heads, packages)
    many_rows = _look_for_many_rows(device, shape, many_rows_tiles(lines, products), packages)
    return TritonCompute(
        choice.reason, device, lines, flash, many_rows, chunk_graphs=chunk_graphs, needs_flash=prefill == "flash_attn"
    )


def _look_for_flash_attention(
    prefill: str, device: torch.device, shape: KVCacheShape, num_heads: int, packages: ThreadPoolExecutor
) -> "Future[FlashAttention | None] | None":
    if prefill == "flash_attn":
        if device.type != "cuda":
            raise invalid(f"prefill_attention is flash_attn, but the device is {device.type}", "prefill_attention")
        if shape.scales is not None:
            raise invalid("prefill_attention is flash_attn, but the KV cache has 8-bit floats", "prefill_attention")
        if shape.shares_values:
            raise invalid("prefill_attention is flash_attn, but the model has latent attention", "prefill_attention")
    elif (reason := "asked for" if prefill == "triton" else _unfit_for_flash(device, shape, num_heads)) is not None:
        _log.info(_PREFILL_CHOSEN, extra={"attention": "triton", "reason": reason})
        return None

    def find() -> FlashAttention | None:
        began_s = time.perf_counter()
        # FlashAttention-4 compiles its kernels when they are first used, and keeps them only if it is told to.
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        broken: list[str] = []
        found = find_flash_attention(shape.block_size, lambda name, reason: broken.append(f"{name}: {reason}"))
        for reason in broken:
            _log.warning("a FlashAttention package cannot be imported", extra={"reason": reason})
        name, reason = "triton", f"no package can be imported that suits blocks of {shape.block_size} tokens"
        if found is not None:
            name, reason = found.name, "asked for" if prefill == "flash_attn" else "installed"
        elif prefill == "flash_attn":
            raise invalid(
                f"prefill_attention is flash_attn, but {'; '.join([reason, *broken])} (penstock[flash-attn] brings "
                "flash-attn-4, for a block_size other than 80, 112, 128 and 144; flash-attn-2 needs a multiple of 256)",
                "prefill_attention",
            )
        _log.info(_PREFILL_CHOSEN, extra={"attention": name, "reason": reason, "seconds": _since(began_s)})
        return found

    return packages.submit(find)


def _unfit_for_flash(device: torch.device, shape: KVCacheShape, num_heads: int) -> str | None:
    """The reason why a FlashAttention package cannot attend, or was not found to be faster; None: there is none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _HOPPER:
        return "FlashAttention was measured on a Hopper only"
    if shape.scales is not None:
        return "FlashAttention is not given 8-bit floats"
    if shape.shares_values:
        return "FlashAttention is not given latents"
    if shape.head_dim not in _FLASH_HEAD_DIMS:
        return f"FlashAttention was not measured with heads of {shape.head_dim} dimensions"
    if num_heads > _MOST_FLASH_QUERIES * shape.num_kv_heads:
        return f"FlashAttention was slower with more than {_MOST_FLASH_QUERIES} queries of a key"
    return None


def _look_for_many_rows(
    device: torch.device,
    shape: KVCacheShape,
    tiles: Mapping[Kind, Sequence[ManyRowsTile]],
    packages: ThreadPoolExecutor,
) -> "Future[ManyRows | None] | None":
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _HOPPER or shape.dtype != torch.bfloat16:
        return None
    if not tiles:
        return None

    def find() -> "ManyRows | None":
        from worker_svc.core.kernels.linear.many_rows import make_many_rows  # noqa: PLC0415  (imports triton)

        began_s = time.perf_counter()
        try:
            torch.cuda.set_device(device)
            found = make_many_rows(device, tiles)
        # A package that is there but was built for another machine raises whatever it likes.
        except Exception as error:  # noqa: BLE001
            _log.info("no package for products of many rows", extra={"reason": f"{type(error).__name__}: {error}"})
            return None
        _log.info("products of many rows chosen", extra={"product": found.name, "seconds": _since(began_s)})
        return found

    return packages.submit(find)


def _since(began_s: float) -> float:
    return round(time.perf_counter() - began_s, 2)


def _is_interpreted() -> bool:
    from worker_svc.core.kernels.launch import INTERPRETED  # noqa: PLC0415  (imports triton)

    return INTERPRETED
