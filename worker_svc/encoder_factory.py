"""Makes the runner of an encoder, and finds out whether its steps fit beside the weights."""

from collections.abc import Callable

import numpy as np
import torch

from contract.domain.errors import invalid
from contract.domain.model_kind import ModelKind
from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan
from contract.domain.pooling import SCORED, Pooling, PoolingKind
from worker_svc.core.encoder_runner import EncoderRunner
from worker_svc.core.interface import Limits
from worker_svc.core.memory import Budget, MemoryProfile
from worker_svc.core.step_sizes import StepSizes
from worker_svc.loaded_model import LoadedEncoder, ModelSource


def make_encoder_runner(
    loaded: LoadedEncoder, source: ModelSource, sizes: StepSizes, clock_ns: Callable[[], int]
) -> tuple[EncoderRunner, MemoryProfile]:
    """The runner, and the uses of the memory.

    Args:
        loaded: the model.
        source: what it is loaded from, and onto.
        sizes: where its options say nothing.
        clock_ns: monotonic.

    Raises:
        PenstockError: INVALID_ARGUMENT: a full step does not fit, or its tokens are fewer than a prompt was to have.
    """
    options, budget = source.options, source.budget
    num_tokens = options.max_num_batched_tokens or max(sizes.max_num_batched_tokens, loaded.longest_prompt)
    if options.max_model_len is not None and options.max_model_len > num_tokens:
        raise invalid(
            f"max_num_batched_tokens {num_tokens} are fewer than max_model_len {options.max_model_len}, and an encoder "
            "computes a prompt in one step: raise the one or lower the other",
            "max_num_batched_tokens",
        )
    limits = Limits(
        num_blocks=0,
        block_size=options.block_size,
        max_num_seqs=min(options.max_num_seqs or sizes.max_num_seqs, num_tokens),
        max_model_len=min(loaded.longest_prompt, num_tokens),
        max_num_batched_tokens=num_tokens,
        vocab_size=loaded.model.vocab_size,
        model_kind=loaded.kind,
    )
    runner = EncoderRunner(loaded.model, limits, source.device, clock_ns)
    step_bytes = 0 if budget is None else _measure(runner, budget, source.device)
    total_bytes = 0 if budget is None else budget.total_bytes
    return runner, MemoryProfile(total_bytes, loaded.weights_bytes, step_bytes, 0, 0, 0)


def _measure(runner: EncoderRunner, budget: Budget, device: torch.device) -> int:
    """Bytes that full steps need: of the longest prompts, and of short ones, which all count."""
    limits = runner.limits
    short = max(1, limits.max_num_batched_tokens // limits.max_num_seqs)
    before_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        for length in (limits.max_model_len, min(short, limits.max_model_len)):
            runner.launch(_full_plan(limits, length)).result()
    except torch.OutOfMemoryError as error:
        raise invalid(
            f"there is no room for a full step ({budget.describe()}; {error}): lower max_num_batched_tokens or "
            "max_model_len",
            "gpu_memory_utilization",
        ) from error
    needed_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    torch.cuda.empty_cache()
    missing = before_bytes + needed_bytes - budget.usable_bytes
    if missing > 0:
        raise invalid(
            f"weights and a full step need {missing >> 20} MiB more than there is ({budget.describe()}): lower "
            "max_num_batched_tokens or max_model_len, or raise gpu_memory_utilization",
            "gpu_memory_utilization",
        )
    return needed_bytes


def _full_plan(limits: Limits, length: int) -> StepPlan:
    """A first step of prompts of that length, as many as fit."""
    count = min(limits.max_num_seqs, limits.max_num_batched_tokens // length)
    admissions = [
        Admission(
            slot=slot,
            token_ids=np.ones(length, np.uint32),
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=np.empty(0, np.uint32),
            sampling=Sampling(),
            seed=0,
            pooling=SCORED if limits.model_kind is ModelKind.CROSS_ENCODER else Pooling(PoolingKind.MEAN),
        )
        for slot in range(count)
    ]
    slots = np.arange(count, dtype=np.uint32)
    return StepPlan(step=1, admissions=tuple(admissions), slots=slots, num_tokens=np.full(count, length, np.uint32))
