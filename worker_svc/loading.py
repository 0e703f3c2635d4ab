"""From settings to a runner that is ready, real or simulated. Only the real one imports torch."""

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contract.domain.errors import unimplemented
from contract.domain.kv_kinds import KVKind, Reach, blocks_of_sequence
from contract.domain.model_kind import ModelKind
from servicekit.checkpoint.facts import ModelFacts, model_facts
from servicekit.checkpoint.grammars import GrammarTokens
from servicekit.checkpoint.model import read_checkpoint
from servicekit.settings import num_cores
from worker_svc.core.digest import digest_of
from worker_svc.core.faults import Faults, FaultyRunner
from worker_svc.core.interface import Limits, Runner
from worker_svc.core.memory import MemoryProfile, no_states_to_save
from worker_svc.core.pretended_model import HIDDEN_SIZE
from worker_svc.core.script import Script
from worker_svc.core.simulated import SimulatedConfig, SimulatedRunner
from worker_svc.core.simulated_encoder import SimulatedEncoder
from worker_svc.core.step_sizes import DEFAULT_SIZES
from worker_svc.driver import wake_driver
from worker_svc.settings import WorkerSettings

# Of the standard library, as in `factory`.
_log = logging.getLogger(__name__)

_SIMULATED_MODEL_LEN = 4096  # where neither the settings nor a checkpoint say
_MAX_SIMULATED_BLOCKS = 1 << 16
_PR_SET_TIMERSLACK = 29  # prctl(2), nanoseconds


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """A runner and what the service around it must know."""

    runner: Runner
    profile: MemoryProfile
    device: str  # cpu, cuda or simulated
    broadcast: Callable[[bytes], bytes]  # from rank 0 to all; returns what rank 0 gave
    close: Callable[[], None]
    model_digest: bytes  # 8 bytes: what tells its model from others
    attention: str = "simulated"  # or torch, triton: the kernels


def load_worker(settings: WorkerSettings) -> LoadedWorker:
    """Load what the settings name.

    Raises:
        PenstockError: it cannot be loaded; the message says why and what to do.
    """
    return _load_simulated(settings) if settings.runner == "simulated" else _load_model(settings)


def _load_simulated(settings: WorkerSettings) -> LoadedWorker:
    facts = _simulated_facts(settings)
    eos_token_ids = facts.eos_token_ids or (0,)
    max_num_seqs = settings.max_num_seqs or DEFAULT_SIZES.max_num_seqs
    num_tokens = settings.max_num_batched_tokens or DEFAULT_SIZES.max_num_batched_tokens
    kinds = _simulated_kinds(settings, facts.context_length)
    useful_blocks = max_num_seqs * blocks_of_sequence(kinds, facts.context_length, num_tokens)
    model_kind = ModelKind[settings.simulated_model.upper()]
    is_whole = model_kind.computes_whole_prompts
    if is_whole and settings.num_blocks is not None:
        raise unimplemented("num_blocks", "num_blocks for an encoder, which keeps no keys and values,")
    if is_whole and settings.simulated_state:
        raise unimplemented("simulated_state", "simulated_state of an encoder, whose prompts are computed at once,")
    num_blocks = settings.num_blocks or min(useful_blocks, _MAX_SIMULATED_BLOCKS)
    limits = Limits(
        num_blocks=0 if is_whole else num_blocks,
        block_size=settings.block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=min(facts.context_length, num_tokens) if is_whole else facts.context_length,
        max_num_batched_tokens=num_tokens,
        vocab_size=facts.vocab_size,
        eos_token_ids=eos_token_ids,
        kinds=kinds,
        has_state=settings.simulated_state,
        num_saved_states=_simulated_saved_states(settings, max_num_seqs),
        model_kind=model_kind,
    )
    _wake_promptly()
    script = _script(settings, eos_token_ids[0])
    step_s, seed = settings.step_ms / 1e3, settings.simulated_seed
    size = facts.hidden_size or HIDDEN_SIZE
    behaviour = SimulatedConfig(step_s, settings.eos_every, model_seed=seed, script=script, hidden_size=size)
    runner: Runner
    if is_whole:
        runner = SimulatedEncoder(limits, behaviour, time.monotonic_ns, time.sleep)
    else:
        tokens = _grammar_tokens(settings, facts.vocab_size)
        runner = SimulatedRunner(limits, behaviour, time.monotonic_ns, time.sleep, tokens)
    if faults := Faults(settings.die_on_token, settings.hang_on_token):
        runner = FaultyRunner(runner, faults, _die, time.sleep)
    profile = MemoryProfile(0, 0, 0, 0, 0, limits.num_blocks)
    answers = () if settings.script is None else (settings.script.read_bytes(),)
    known = facts.vocab_size, eos_token_ids, settings.eos_every, settings.simulated_seed
    answers = (*answers, *([settings.simulated_model.encode()] if is_whole else []))
    digest = digest_of("simulated", *known, *answers)
    return LoadedWorker(runner, profile, "simulated", lambda payload: payload, runner.close, digest)


def _simulated_saved_states(settings: WorkerSettings, max_num_seqs: int) -> int:
    """As many as slots, unless the settings say."""
    if settings.simulated_state:
        return max_num_seqs if settings.num_saved_states is None else settings.num_saved_states
    if settings.num_saved_states:
        raise no_states_to_save(settings.num_saved_states)
    return 0


def _simulated_kinds(settings: WorkerSettings, context_length: int) -> tuple[KVKind, ...]:
    """All layers see all tokens; with a window, one of four does, as in many models."""
    size, window = settings.block_size, settings.simulated_window
    if window is None or window >= context_length:
        return (KVKind(size),)
    return KVKind(3 * size), KVKind(size, Reach(window))


def _simulated_facts(settings: WorkerSettings) -> ModelFacts:
    """Of the checkpoint whose model is simulated, if there is one."""
    directory = Path(settings.model).expanduser()
    if not directory.is_dir():
        return ModelFacts(settings.vocab_size, (), settings.max_model_len or _SIMULATED_MODEL_LEN)
    from servicekit.checkpoint.tokenizer import TOKENIZER, read_tokenizer_files  # noqa: PLC0415  (a real model needs none)

    has_tokenizer = (directory / TOKENIZER).is_file()
    text = read_tokenizer_files(directory) if has_tokenizer else None
    return model_facts(read_checkpoint(directory), text, max_model_len=settings.max_model_len)


def _grammar_tokens(settings: WorkerSettings, vocab_size: int) -> GrammarTokens | None:
    """The tokens that grammars are made of, where there is a tokenizer."""
    directory = Path(settings.tokenizer or settings.model).expanduser()
    from servicekit.checkpoint.tokenizer import TOKENIZER, read_tokenizer  # noqa: PLC0415  (as above)

    return GrammarTokens(lambda: read_tokenizer(directory), vocab_size) if (directory / TOKENIZER).is_file() else None


def _script(settings: WorkerSettings, eos_token_id: int) -> Script | None:
    """The script that the settings name.

    Raises:
        PenstockError: INTERNAL (operator): it cannot be used, or there is no tokenizer for its answers.
    """
    if settings.script is None:
        return None
    from servicekit.checkpoint.tokenizer import read_tokenizer  # noqa: PLC0415  (as above)
    from worker_svc.script_file import read_script  # noqa: PLC0415

    return read_script(
        settings.script, read_tokenizer(Path(settings.tokenizer or settings.model).expanduser()), eos_token_id
    )


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wake_promptly() -> None:
    """Linux lets a sleep take 50 µs longer than asked for, so that wake-ups can be batched; the device would not. Holds
    for this thread and those that it starts."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)


def _load_model(settings: WorkerSettings) -> LoadedWorker:
    began_s = time.perf_counter()
    driver = wake_driver(settings.rank) if settings.device != "cpu" else None
    import torch  # noqa: PLC0415  (heavy: the simulated runner does without)

    from worker_svc.factory import load_runner  # noqa: PLC0415
    from worker_svc.model_digest import model_digest  # noqa: PLC0415
    from worker_svc.runner_options import RunnerOptions  # noqa: PLC0415

    if driver is not None:
        driver.join()
    _log.info("torch imported", extra={"seconds": round(time.perf_counter() - began_s, 2)})
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    elif settings.device == "cpu" or not torch.cuda.is_available():
        # Threads of one step wait for each other: beside other work on every core, each step waits for the slowest.
        torch.set_num_threads(max(1, int(num_cores()) - 1))
    options = RunnerOptions(
        model=settings.model,
        revision=settings.revision,
        tokenizer=settings.tokenizer,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        device=settings.device,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        num_saved_states=settings.num_saved_states,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_blocks=settings.num_blocks,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        rank=settings.rank,
        world_size=settings.tensor_parallel_size,
        distributed_address=settings.distributed_address,
        attention=settings.attention,
        prefill_attention=settings.prefill_attention,
        tuning=settings.tuning,
        cuda_graphs=settings.cuda_graphs,
        chunk_graphs=settings.chunk_graphs,
        model_impl=settings.model_impl,
        load_format=settings.load_format,
        quantization=settings.quantization,
    )
    loaded = load_runner(options, time.monotonic_ns)
    device = loaded.device
    return LoadedWorker(
        loaded.runner,
        loaded.profile,
        device.type,
        lambda payload: loaded.group.broadcast(payload, device),
        loaded.close,
        model_digest(loaded.checkpoint, loaded.precision, is_dummy=settings.load_format == "dummy"),
        loaded.kernels,
    )
