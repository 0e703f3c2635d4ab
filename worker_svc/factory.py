"""Makes the runner of one rank from a checkpoint: device, weights, KV memory."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.domain.errors import invalid, unimplemented
from penstock.domain.params import Sampling
from penstock.domain.plan import Admission, StepPlan
from worker_svc.checkpoint import read_model_config, resolve_checkpoint
from worker_svc.compute import Compute, choose_compute
from worker_svc.core.config import ModelConfig
from worker_svc.core.distributed import Group, connect
from worker_svc.core.interface import Limits
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.layers.placement import Placement
from worker_svc.core.memory import DEFAULT_CPU_KV_CACHE_BYTES, MemoryProfile, fit_model_len, num_blocks_in
from worker_svc.core.models import build_model
from worker_svc.core.models.llama import LlamaForCausalLM
from worker_svc.core.runner import ModelRunner
from worker_svc.weights import fill_randomly, load_weights

# Of the standard library: `LLM` runs in processes that are not ours to configure.
_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What to load and how much memory to use."""

    model: str  # a local directory or a hub id
    revision: str | None = None  # of a hub id
    dtype: str = "auto"  # auto: as stored, but float32 on a CPU
    device: str = "auto"  # auto: cuda if there is one
    block_size: int = 16  # tokens
    max_num_seqs: int = 256
    max_model_len: int | None = None  # None: the model's context, as far as the KV cache reaches
    max_num_batched_tokens: int = 2048
    num_blocks: int | None = None  # None: from the memory
    kv_cache_memory_bytes: int | None = None  # None: modest on a CPU, what is free on CUDA
    gpu_memory_utilization: float = 0.9  # of the device's memory, weights included
    rank: int = 0
    world_size: int = 1
    distributed_address: str = "tcp://127.0.0.1:29500"  # where tensor-parallel ranks meet
    quantization: str | None = None
    trust_remote_code: bool = False
    attention: str = "auto"  # auto, torch, triton
    cuda_graphs: bool = True  # of decode steps, where Triton's kernels compute
    load_format: str = "auto"  # dummy: random weights


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner that is ready, and how it came out."""

    runner: ModelRunner
    profile: MemoryProfile
    config: ModelConfig
    device: torch.device
    group: Group
    compute: Compute

    def close(self) -> None:
        """Give everything back."""
        self.runner.close()
        self.group.close()


def load_runner(options: RunnerOptions, clock_ns: Callable[[], int]) -> LoadedRunner:
    """Load a checkpoint and make room for its KV cache; waits for the other ranks if there are any.

    Raises:
        PenstockError: UNIMPLEMENTED or INVALID_ARGUMENT naming the option or feature; INTERNAL (the operator's fault)
            naming the file that is missing or corrupt.
    """
    if options.quantization is not None:
        raise unimplemented(f"quantization ({options.quantization})")
    if options.trust_remote_code:
        raise unimplemented("trust_remote_code (code that comes with a checkpoint)")
    device = _device(options)
    directory = resolve_checkpoint(options.model, options.revision)
    config = read_model_config(directory)
    dtype = _dtype(options.dtype, config, device)
    max_model_len = options.max_model_len or config.max_position_embeddings
    if max_model_len > config.max_position_embeddings:
        raise invalid(
            f"max_model_len {max_model_len} exceeds the model's context of {config.max_position_embeddings} tokens",
            "max_model_len",
        )
    group = connect(options.rank, options.world_size, options.distributed_address, device)
    plain = Placement(device, dtype, group)
    heads = plain.part(config.num_heads, "num_attention_heads")
    kv_heads = plain.kv_heads(config.num_kv_heads)
    shape = KVCacheShape(config.num_layers, kv_heads.stop - kv_heads.start, config.head_dim, options.block_size, dtype)
    num_heads = heads.stop - heads.start
    compute = choose_compute(options.attention, device, shape, num_heads)
    _log.info("attention chosen", extra={"attention": compute.name, "reason": compute.reason})
    placement = replace(plain, operations=compute.operations)
    model = build_model(config, placement, max_model_len)
    started_ns = clock_ns()
    if options.load_format == "dummy":
        fill_randomly(placement.shards)
    else:
        load_weights(directory, placement.shards, tied=config.tie_word_embeddings)
    _log.info("weights loaded", extra={"seconds": _seconds(clock_ns() - started_ns)})
    maker = _RunnerMaker(options, config, model, shape, num_heads, device, compute, clock_ns)
    weights_bytes = sum(shard.destination.nbytes for shard in placement.shards.values())
    profile = maker.profile(weights_bytes, max_model_len, group)
    fitted = fit_model_len(
        max_model_len,
        profile.num_blocks,
        options.block_size,
        shape.block_bytes,
        explicit=options.max_model_len is not None,
    )
    started_ns = clock_ns()
    runner = maker.make(profile.num_blocks, fitted, with_graphs=options.cuda_graphs and group.world_size == 1)
    _log.info("runner ready", extra={"seconds": _seconds(clock_ns() - started_ns), "kv_blocks": profile.num_blocks})
    return LoadedRunner(runner, profile, config, device, group, compute)


@dataclass(frozen=True, slots=True)
class _RunnerMaker:
    """Makes runners over one loaded model: first a small one to measure with, then the real one."""

    options: RunnerOptions
    config: ModelConfig
    model: LlamaForCausalLM
    shape: KVCacheShape
    num_heads: int  # query heads of this rank
    device: torch.device
    compute: Compute
    clock_ns: Callable[[], int]

    def make(self, num_blocks: int, max_model_len: int, *, with_graphs: bool) -> ModelRunner:
        options = self.options
        limits = Limits(
            num_blocks=num_blocks,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=options.max_num_batched_tokens,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
        )
        cache = KVCache(self.shape, num_blocks + 1, self.device)
        return self.compute.make_runner(
            self.model, cache, self.num_heads, limits, self.clock_ns, with_graphs=with_graphs
        )

    def profile(self, weights_bytes: int, max_model_len: int, group: Group) -> MemoryProfile:
        """How many blocks there will be: the fewest that any rank has room for."""
        options, block_bytes = self.options, self.shape.block_bytes
        total_bytes = activation_bytes = 0
        if self.device.type == "cuda":
            total_bytes = torch.cuda.get_device_properties(self.device).total_memory
            activation_bytes = self._measure_peak(max_model_len)
        if options.num_blocks is not None:
            num_blocks = options.num_blocks
        else:
            kv_bytes = options.kv_cache_memory_bytes
            if kv_bytes is None and self.device.type == "cuda":
                free_bytes, _ = torch.cuda.mem_get_info(self.device)
                others_bytes = total_bytes - free_bytes  # weights, CUDA's own, other processes
                kv_bytes = int(total_bytes * options.gpu_memory_utilization) - others_bytes - activation_bytes
            elif kv_bytes is None:
                kv_bytes = DEFAULT_CPU_KV_CACHE_BYTES
            num_blocks = num_blocks_in(kv_bytes, block_bytes, options.max_num_seqs, max_model_len, options.block_size)
        num_blocks = group.minimum(num_blocks, self.device)
        return MemoryProfile(
            total_bytes, weights_bytes, activation_bytes, num_blocks * block_bytes, block_bytes, num_blocks
        )

    def _measure_peak(self, max_model_len: int) -> int:
        """Bytes that a full step needs beyond what is allocated before it: as many sequences as there are slots, one of
        them as long as the step allows, all sampled with a sort of the whole vocabulary.
        """
        options = self.options
        num_others = min(options.max_num_seqs, options.max_num_batched_tokens) - 1
        lengths = [min(max_model_len, options.max_num_batched_tokens - num_others)] + [1] * num_others
        num_blocks = [-(-length // options.block_size) for length in lengths]
        starts = np.cumsum([0, *num_blocks])
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        runner = self.make(int(starts[-1]), max_model_len, with_graphs=False)
        admissions = tuple(
            Admission(
                slot=slot,
                token_ids=np.zeros(length, np.uint32),
                num_prompt_tokens=length,
                num_computed_tokens=0,
                block_ids=np.arange(starts[slot], starts[slot + 1], dtype=np.uint32),
                sampling=Sampling(top_p=0.9, presence_penalty=0.1, num_logprobs=1),
                seed=0,
            )
            for slot, length in enumerate(lengths)
        )
        plan = StepPlan(
            step=1,
            admissions=admissions,
            slots=np.arange(len(lengths), dtype=np.uint32),
            num_tokens=np.array(lengths, np.uint32),
        )
        runner.launch(plan).result()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        runner.close()
        torch.cuda.empty_cache()
        return peak


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 2)


def _device(options: RunnerOptions) -> torch.device:
    name = options.device
    if name not in ("auto", "cpu", "cuda"):
        raise invalid(f"device must be auto, cpu or cuda, got {name!r}", "device")
    if name == "cuda" and not torch.cuda.is_available():
        raise invalid("device is cuda, but torch finds no CUDA device: use cpu or auto", "device")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # fp32 means fp32: TF32 would keep ten bits of a product's mantissa.
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    device = torch.device("cuda", options.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = (config.dtype or "float32") if device.type == "cuda" else "float32"
    if name not in _DTYPES:
        raise invalid(f"dtype must be auto, {', '.join(_DTYPES)}, got {name!r}", "dtype")
    return _DTYPES[name]
