"""Makes the runner of one rank from a checkpoint: device, weights, KV memory."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from contract.domain.errors import invalid, unimplemented
from servicekit.checkpoint.grammars import GrammarTokens
from servicekit.checkpoint.location import find_checkpoint
from servicekit.checkpoint.model import Checkpoint, read_checkpoint
from servicekit.checkpoint.tokenizer import TOKENIZER, read_tokenizer
from worker_svc.compute import Compute, choose_compute
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.config import ModelConfig
from worker_svc.core.distributed import Group, connect
from worker_svc.core.kv_cache import KVCacheShape
from worker_svc.core.layers.placement import Placement
from worker_svc.core.memory import DEFAULT_CPU_KV_CACHE_BYTES, Budget, MemoryProfile, fit_model_len
from worker_svc.core.quantization.choice import choose_quantization
from worker_svc.core.quantization.spec import Fp8OnlineSpec
from worker_svc.core.runner import ModelRunner
from worker_svc.core.step_sizes import StepSizes, choose_step_sizes, peak_flops_per_s
from worker_svc.model_config import read_model_config
from worker_svc.products import model_products
from worker_svc.profiling import Profiler, RunnerMaker
from worker_svc.runner_options import RunnerOptions
from worker_svc.weights import fill_randomly, has_own_head, load_weights

# Of the standard library: `LLM` runs in processes that are not ours to configure.
_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner that is ready, and how it came out."""

    runner: ModelRunner
    profile: MemoryProfile
    config: ModelConfig
    device: torch.device
    group: Group
    compute: Compute
    checkpoint: Checkpoint
    dtype: torch.dtype

    @property
    def precision(self) -> str:
        """The dtype, and the format where it is not that of the checkpoint."""
        quantization = self.config.quantization
        is_online = quantization is not None and isinstance(quantization.format, Fp8OnlineSpec)
        return f"{self.dtype} fp8" if is_online else str(self.dtype)

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
    if options.trust_remote_code:
        raise unimplemented("trust_remote_code (code that comes with a checkpoint)")
    started_ns = clock_ns()
    device = _device(options)
    checkpoint, config, max_model_len = _read_model(options)
    dtype = choose_dtype(options.dtype, config, device)
    group = connect(options.rank, options.world_size, options.distributed_address, device)
    plain = Placement(device, dtype, group, quantization=config.quantization)
    attention = config.attention
    heads = plain.part(attention.num_heads, "num_attention_heads")
    kv_heads = plain.kv_heads(attention.num_kv_heads)
    num_layers, num_kv_heads = len(config.decoder.attentions), kv_heads.stop - kv_heads.start
    shape = KVCacheShape(
        num_layers,
        num_kv_heads,
        attention.head_dim,
        options.block_size,
        dtype,
        shares_values=attention.shares_values,
    )
    num_heads = heads.stop - heads.start
    compute = choose_compute(
        options.attention,
        options.prefill_attention,
        device,
        shape,
        num_heads,
        products=model_products(config, plain),
        tuning=options.tuning,
        chunk_graphs=options.chunk_graphs,
    )
    _log.info("attention chosen", extra={"attention": compute.name, "reason": compute.reason})
    placement = replace(plain, operations=compute.operations)
    budget = _budget(device, options.gpu_memory_utilization)
    _log.info("device ready", extra={"seconds": _seconds(clock_ns() - started_ns)})
    if budget is not None:
        budget.check_weights(num_weights_bytes(config, plain))
    started_ns = clock_ns()
    model = CausalLM(config.decoder, placement, max_model_len)
    if options.load_format == "dummy":
        fill_randomly(placement.weights)
    else:
        num_bytes = load_weights(
            checkpoint.directory,
            placement.wanted,
            placement.conversions,
            unused=config.decoder.unused_tensors,
            unused_prefixes=config.decoder.unused_prefixes,
            unused_suffixes=config.quantization.unused if config.quantization is not None else (),
        )
        _log.info("weights read", extra={"gigabytes": round(num_bytes / 1e9, 2)})
        _tell_conversions(config, placement)
    model.prepare()
    _log.info("weights loaded", extra={"seconds": _seconds(clock_ns() - started_ns)})
    weights_bytes = sum(tensor.destination.nbytes for tensor in placement.weights)
    usable_bytes = DEFAULT_CPU_KV_CACHE_BYTES if budget is None else budget.usable_bytes - weights_bytes
    sizes = _step_sizes(options, config, shape, device, usable_bytes)
    maker = RunnerMaker(options, sizes, config, model, shape, num_heads, device, compute, clock_ns)
    profiler = Profiler(maker, budget, max_model_len)
    started_ns = clock_ns()
    profile = profiler.profile(weights_bytes, group)
    _log.info("memory profiled", extra={"seconds": _seconds(clock_ns() - started_ns)})
    explicit = options.max_model_len is not None
    fitted = fit_model_len(max_model_len, profile, options.block_size, budget, explicit=explicit)
    started_ns = clock_ns()
    runner, profile = profiler.make_runner(profile, fitted)
    runner.take_grammars(_grammar_tokens(options, checkpoint, config))
    _log.info("runner ready", extra={"seconds": _seconds(clock_ns() - started_ns)})
    _log.info("memory used", extra={"memory": profile.describe(), **asdict(maker.used_sizes)})
    return LoadedRunner(runner, profile, config, device, group, compute, checkpoint, dtype)


def _grammar_tokens(options: RunnerOptions, checkpoint: Checkpoint, config: ModelConfig) -> GrammarTokens:
    """The tokens that grammars are made of; they are made meanwhile, so that the first grammar need not wait."""
    directory = find_checkpoint(options.tokenizer, options.revision) if options.tokenizer else checkpoint.directory
    tokens = GrammarTokens(lambda: read_tokenizer(directory), config.decoder.vocab_size)
    if (directory / TOKENIZER).is_file():
        threading.Thread(target=tokens, name="grammar tokens", daemon=True).start()
    return tokens


def _read_model(options: RunnerOptions) -> tuple[Checkpoint, ModelConfig, int]:
    """The checkpoint, its model, and the context length that is wanted."""
    checkpoint = read_checkpoint(find_checkpoint(options.model, options.revision, with_weights=True))
    config = read_model_config(checkpoint)
    config = replace(config, quantization=choose_quantization(config.quantization, options.quantization))
    max_model_len = checkpoint.context_length(options.max_model_len)
    decoder, is_read = config.decoder, options.load_format != "dummy"
    if decoder.is_tied and is_read and has_own_head(checkpoint.directory, decoder.embedding, decoder.head):
        _log.warning("the head is not tied", extra={"reason": "the checkpoint has another lm_head than embed_tokens"})
        config = replace(config, decoder=replace(decoder, is_tied=False))
    return checkpoint, config, max_model_len


def _tell_conversions(config: ModelConfig, placement: Placement) -> None:
    """Log the weights that are not kept as they are stored."""
    if config.quantization is None:
        return
    num_bytes: dict[torch.dtype, int] = defaultdict(int)
    for conversion in placement.conversions:
        weight = conversion.made["weight"].destination
        num_bytes[weight.dtype] += weight.nbytes
    for dtype, size in num_bytes.items():
        name = str(dtype).removeprefix("torch.")
        event = "weights widened" if dtype == placement.dtype else "weights converted"
        extra = {"quantization": config.quantization.method, "to": name, "gigabytes": round(size / 1e9, 2)}
        _log.info(event, extra=extra)
    if config.quantization.has_kv_scales:
        reason = f"keys and values are kept in {str(placement.dtype).removeprefix('torch.')}, without scales"
        _log.warning("the checkpoint's scales of keys and values are not used", extra={"reason": reason})


def _step_sizes(
    options: RunnerOptions, config: ModelConfig, shape: KVCacheShape, device: torch.device, usable_bytes: int
) -> StepSizes:
    """As suits model and device, on which there are `usable_bytes` beside the weights; all ranks are alike."""
    flops_per_s = None
    if device.type == "cuda" and shape.dtype != torch.float32:
        properties = torch.cuda.get_device_properties(device)
        capability = properties.major, properties.minor
        flops_per_s = peak_flops_per_s(capability, properties.multi_processor_count)
    kv_bytes = options.kv_cache_memory_bytes or max(0, usable_bytes)
    return choose_step_sizes(
        config.decoder.num_layer_weights // options.world_size,
        flops_per_s,
        kv_bytes if options.num_blocks is None else None,
        shape.block_bytes // shape.block_size,
    )


def _budget(device: torch.device, share: float) -> Budget | None:
    """Of a GPU, before anything is loaded."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return Budget(total_bytes, share, total_bytes - free_bytes)


def num_weights_bytes(config: ModelConfig, plain: Placement) -> int:
    """The bytes that this rank's weights will take: the model is built without memory."""
    meta = replace(plain, device=torch.device("meta"), wanted=[], conversions=[])
    CausalLM(config.decoder, meta, max_model_len=1)
    return sum(tensor.destination.nbytes for tensor in meta.weights)


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


def choose_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of the model: on a CPU float32 unless another is named.

    Raises:
        PenstockError: INVALID_ARGUMENT naming `dtype`: there is no such one.
    """
    if name == "auto":
        name = (config.dtype or "float32") if device.type == "cuda" else "float32"
    if name not in _DTYPES:
        raise invalid(f"dtype must be auto, {', '.join(_DTYPES)}, got {name!r}", "dtype")
    return _DTYPES[name]
