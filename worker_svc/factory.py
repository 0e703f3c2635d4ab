"""Makes the runner of one rank from a checkpoint: device, weights, KV memory."""

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from contract.domain.errors import invalid, unimplemented
from servicekit.checkpoint.grammars import GrammarTokens
from servicekit.checkpoint.location import find_checkpoint
from servicekit.checkpoint.model import Checkpoint, read_checkpoint
from servicekit.checkpoint.tokenizer import TOKENIZER, read_tokenizer
from worker_svc.core.distributed import Group
from worker_svc.core.encoder_runner import EncoderRunner
from worker_svc.core.memory import DEFAULT_CPU_KV_CACHE_BYTES, MemoryProfile, fit_model_len
from worker_svc.core.runner import ModelRunner
from worker_svc.core.step_sizes import StepSizes, choose_step_sizes, peak_flops_per_s
from worker_svc.device import choose_device, measure_budget
from worker_svc.encoder_factory import make_encoder_runner
from worker_svc.implementation import find_loader
from worker_svc.loaded_model import LoadedEncoder, LoadedModel, ModelSource
from worker_svc.meeting import connect
from worker_svc.profiling import Profiler, RunnerMaker
from worker_svc.runner_options import RunnerOptions

# Of the standard library: `LLM` runs in processes that are not ours to configure.
_log = logging.getLogger(__name__)

_STATES_SHARE = 0.5  # of the memory for sequences, that states may take unless `max_num_seqs` says so
_SAVED_SHARE = 0.125  # of what these leave, that saved states may take unless `num_saved_states` says so
# Options of which all ranks of a worker have the same: steps follow from them, and what is exchanged within these.
_ALIKE = (
    *("dtype", "kv_cache_dtype", "quantization", "block_size", "num_blocks", "max_num_seqs", "num_saved_states"),
    *("max_model_len", "max_num_batched_tokens", "attention", "prefill_attention", "cuda_graphs", "chunk_graphs"),
    "model_impl",
)
_DIGEST_BYTES = 7  # of an option, which ranks compare as an integer of 64 bits


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner that is ready, and how it came out."""

    runner: ModelRunner | EncoderRunner
    profile: MemoryProfile
    device: torch.device
    group: Group
    kernels_name: str  # as `Compute.name`
    checkpoint: Checkpoint
    implementation: str  # see `LoadedModel`, as the next
    precision: str

    @property
    def kernels(self) -> str:
        """Whose kernels compute, and whose module what they do not."""
        return self.kernels_name + (", module transformers" if self.implementation == "transformers" else "")

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
    device = choose_device(options)
    checkpoint = read_checkpoint(find_checkpoint(options.model, options.revision, with_weights=True))
    loader = find_loader(options, checkpoint)
    max_model_len = checkpoint.context_length(options.max_model_len)
    group = connect(options.rank, options.world_size, options.distributed_address, device)
    _require_alike(options, group, device)
    budget = measure_budget(device, options.gpu_memory_utilization)
    _log.info("device ready", extra={"seconds": _seconds(clock_ns() - started_ns)})
    started_ns = clock_ns()
    source = ModelSource(options, checkpoint, max_model_len, device, group, budget)
    loaded = loader.load(source)
    if isinstance(loaded, LoadedEncoder):
        _log.info("weights loaded", extra={"seconds": _seconds(clock_ns() - started_ns)})
        sizes = choose_step_sizes(loaded.num_layer_weights, _flops_per_s(device, loaded.dtype), None, 0)
        made = make_encoder_runner(loaded, source, sizes, clock_ns)
        return LoadedRunner(*made, device, group, "torch", checkpoint, "transformers", loaded.precision)
    compute, shape = loaded.compute, loaded.shape
    _log.info("attention chosen", extra={"attention": compute.name, "reason": compute.reason})
    if loaded.state is not None:
        size = f"{loaded.state.slot_bytes / 2**20:.1f} MiB"
        _log.info("layers keep a state", extra={"each sequence": size})
    _log.info("weights loaded", extra={"seconds": _seconds(clock_ns() - started_ns)})
    usable_bytes = DEFAULT_CPU_KV_CACHE_BYTES if budget is None else budget.usable_bytes - loaded.weights_bytes
    sizes = _step_sizes(options, loaded, group, device, usable_bytes)
    if loaded.state is not None:
        state_bytes = loaded.state.slot_bytes
        # A CPU's memory is not measured.
        taken = 0 if budget is None else taken_bytes(options, sizes, shape.block_bytes, state_bytes)
        left_bytes = group.minimum(max(0, usable_bytes - taken), device)  # all ranks save as many
        sizes = replace(sizes, num_saved_states=int(left_bytes * _SAVED_SHARE) // state_bytes)
    maker = RunnerMaker(options, sizes, loaded.model, shape, loaded.state, loaded.num_heads, device, compute, clock_ns)
    profiler = Profiler(maker, budget, max_model_len)
    started_ns = clock_ns()
    profile = profiler.profile(loaded.weights_bytes, group)
    _log.info("memory profiled", extra={"seconds": _seconds(clock_ns() - started_ns)})
    explicit = options.max_model_len is not None
    step = maker.max_num_batched_tokens
    fitted = fit_model_len(max_model_len, profile, shape.layout.kinds, step, budget, explicit=explicit)
    started_ns = clock_ns()
    runner, profile = profiler.make_runner(profile, fitted)
    runner.take_grammars(_grammar_tokens(options, checkpoint, loaded.model.vocab_size))
    _log.info("runner ready", extra={"seconds": _seconds(clock_ns() - started_ns)})
    _log.info("memory used", extra={"memory": profile.describe(), **asdict(maker.used_sizes)})
    described = compute.name, checkpoint, loaded.implementation, loaded.precision
    return LoadedRunner(runner, profile, device, group, *described)


def _require_alike(options: RunnerOptions, group: Group, device: torch.device) -> None:
    """Refuse ranks that would not launch the same steps, and exchange the same in them.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the options, on all ranks.
    """
    here = {name: repr(getattr(options, name)) for name in _ALIKE}
    others = {name: value for name, value in here.items() if not group.is_same(_number_of(value), device)}
    if others:
        told = ", ".join(f"{name} is {value} here" for name, value in others.items())
        raise invalid(f"the ranks of a worker must have the same options: {told}", next(iter(others)))


def _number_of(value: str) -> int:
    return int.from_bytes(hashlib.sha256(value.encode()).digest()[:_DIGEST_BYTES])


def _grammar_tokens(options: RunnerOptions, checkpoint: Checkpoint, vocab_size: int) -> GrammarTokens:
    """The tokens that grammars are made of; they are made meanwhile, so that the first grammar need not wait."""
    directory = find_checkpoint(options.tokenizer, options.revision) if options.tokenizer else checkpoint.directory
    tokens = GrammarTokens(lambda: read_tokenizer(directory), vocab_size)
    if (directory / TOKENIZER).is_file():
        threading.Thread(target=tokens, name="grammar tokens", daemon=True).start()
    return tokens


def _step_sizes(
    options: RunnerOptions, loaded: LoadedModel, group: Group, device: torch.device, usable_bytes: int
) -> StepSizes:
    """As suits model and device, on which there are `usable_bytes` beside the weights. All ranks have those of the one
    that has least: what they exchange within a graph is as large on each.
    """
    shape, state = loaded.shape, loaded.state
    kv_bytes = group.minimum(options.kv_cache_memory_bytes or max(0, usable_bytes), device)
    flops_per_s = _flops_per_s(device, shape.dtype)
    wanted = (
        loaded.model.num_layer_weights,
        None if flops_per_s is None else float(group.minimum(int(flops_per_s), device)),
        kv_bytes if options.num_blocks is None else None,
        shape.token_bytes,
    )
    if state is None:
        return choose_step_sizes(*wanted)
    sizes = choose_step_sizes(*wanted, most_states=int(kv_bytes * _STATES_SHARE) // state.slot_bytes)
    without = choose_step_sizes(*wanted).max_num_seqs
    if sizes.max_num_seqs < without and options.max_num_seqs is None:
        size = f"{state.slot_bytes / 2**20:.1f} MiB"
        reason = (
            f"each has {size} of states, which take {_STATES_SHARE:g} of what weights leave unless max_num_seqs says"
        )
        _log.warning("fewer sequences at once", extra={"max_num_seqs": sizes.max_num_seqs, "reason": reason})
    return sizes


def taken_bytes(options: RunnerOptions, sizes: StepSizes, block_bytes: int, state_bytes: int) -> int:
    """What slots' states take, of so many bytes each, and blocks, if some were asked for."""
    num_tokens = options.max_num_batched_tokens or sizes.max_num_batched_tokens
    num_slots = min(options.max_num_seqs or sizes.max_num_seqs, num_tokens)
    blocks_bytes = options.kv_cache_memory_bytes or (options.num_blocks or 0) * block_bytes
    return (num_slots + 1) * state_bytes + blocks_bytes


def _flops_per_s(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak of a device in half precision; None: it is not known, or another precision is used."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    properties = torch.cuda.get_device_properties(device)
    return peak_flops_per_s((properties.major, properties.minor), properties.multi_processor_count)


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 2)
